"""The model types of Hugging Face that can be exported, and what config.json says of their sizes.

The login side looks at it, so that a size that cannot work is found before a job waits for it; the
converter reads the same table. Neither numpy nor torch is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.sources import huggingface_configs as configs
from launcher_scripts.checkpoint.sources import huggingface_decoders as decoders
from launcher_scripts.checkpoint.sources import huggingface_experts as experts
from launcher_scripts.checkpoint.sources import huggingface_gemma as gemma
from launcher_scripts.checkpoint.sources import huggingface_hybrids as hybrids
from launcher_scripts.checkpoint.sources import huggingface_latent as latent
from launcher_scripts.checkpoint.sources.huggingface_classes import NOT_READ, class_keys, is_agm
from launcher_scripts.checkpoint.sources.huggingface_configs import has_decoder
from launcher_scripts.checkpoint.sources.huggingface_raw import MULTIMODAL, RawConfig, text_config
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import mapping, parse_json, read_plain
from launcher_scripts.models.family import ModelConfig

CONFIG_NAME = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Architecture:
    """A row of ARCHITECTURES.

    family:   the row of FAMILIES
    read:     RawConfig -> hyperparameters
    dialect:  the dialect of the weight table
    tied:     name of a tensor -> names it may be stored under instead, or again
    variants: RawConfig -> what the names of variants add to the dialect's, first choice first
    inherits: dialects that say what the row's own do not
    ties:     what tie_word_embeddings is where config.json does not say it
    may_be:   whether another maker's model with such hyperparameters can be one of this type
    """

    family: str
    read: Callable[[RawConfig], ModelConfig]
    dialect: str
    tied: Mapping[str, tuple[str, ...]]
    variants: Callable[[RawConfig], Sequence[str]] = lambda _: ()
    inherits: tuple[str, ...] = ()
    ties: bool = True
    may_be: Callable[[Any], bool] = lambda _: True

    def dialects(self, raw: RawConfig) -> tuple[str, ...]:
        """The dialects of the weight table for the tensors of one model, first choice first."""
        variants = (self.dialect + variant for variant in self.variants(raw))
        return (*variants, self.dialect, *self.inherits)


HEAD = "lm_head.weight"
# Model types whose checkpoints may lack a decoder.
_ENCODERS = ("t5", "mt5", "umt5", "longt5", "t5gemma", "t5gemma2")

# Those whose classes tie the output table, whatever config.json says, if it is not stored.
_TIED = ("mt5", "umt5", "longt5")


def has_separate_head(raw: RawConfig, ties: bool) -> bool:
    """Return whether config.json promises an output table beside the input's, which a T5's encoder
    does not have."""
    name = raw.raw["model_type"]
    if name in _ENCODERS and not has_decoder(raw):
        return False
    if name in _TIED and HEAD not in raw.keys:
        raw.unused("tie_word_embeddings")
        return False
    return not raw.flag("tie_word_embeddings", ties)


# Of these, scale_embedding is true where config.json does not say it.
_SCALED = ("m2m_100", "nllb-moe", "xglm")


def _scaled(raw: RawConfig) -> list[str]:
    return ["_scaled"] if raw.flag("scale_embedding", raw.raw["model_type"] in _SCALED) else []


def _m2m_100(raw: RawConfig) -> list[str]:
    return [*_scaled(raw), "_fairseq_sinusoids"]


def _nllb_moe(raw: RawConfig) -> list[str]:
    return [*_m2m_100(raw), "_experts"]


def _sinusoidal(raw: RawConfig) -> list[str]:
    """Some files hold the positions that are computed otherwise."""
    stored = "encoder.embed_positions.weight" in raw.keys
    return [*_scaled(raw), "_whole_positions" if stored else "_sinusoids"]


def _marian(raw: RawConfig) -> list[str]:
    """transformers bans a Marian's padding token, whose row the training did not have."""
    return [*_sinusoidal(raw), "_unpadded"]


def _scaled_or_untied(raw: RawConfig) -> list[str]:
    return [*_scaled(raw), *(["_untied"] if HEAD in raw.keys else [])]


def _projected_or_untied(raw: RawConfig) -> list[str]:
    projected = "_projected" if "decoder.project_in.weight" in raw.keys else ""
    return [f"{projected}_untied", projected] if HEAD in raw.keys else [projected]


def _falcon_norms(raw: RawConfig) -> list[str]:
    if "h.0.ln_attn.weight" in raw.keys:
        return ["_two_norms"]
    return ["_one_norm"] if raw.flag("parallel_attn", True) else []


def _one_norm(raw: RawConfig) -> list[str]:
    return ["_one_norm"] if raw.flag("use_parallel_residual", False) else []


def _in_memory(raw: RawConfig) -> list[str]:
    """transformers 5 has other names in memory than in what it saves."""
    routers = ("mlp.gate", "mlp.router", "block_sparse_moe.router")
    stacked = any(f"layers.0.{router}.weight" in raw.keys for router in routers)
    return ["_in_memory"] if stacked else []


def _gpt(
    read: Callable[[RawConfig], ModelConfig],
    dialect: str,
    table: str,
    variants: Callable[[RawConfig], Sequence[str]] = lambda _: (),
    *,
    inherits: tuple[str, ...] = (),
    ties: bool = True,
    may_be: Callable[[Any], bool] = lambda _: True,
) -> Architecture:
    """The row of a decoder.  table: its embeddings, which may be the output table, too"""
    return Architecture("gpt", read, dialect, {table: (HEAD,)}, variants, inherits, ties, may_be)


def _llama(
    read: Callable[[RawConfig], ModelConfig],
    dialect: str = "llama",
    variants: Callable[[RawConfig], Sequence[str]] = lambda _: (),
    *,
    ties: bool = False,
    may_be: Callable[[Any], bool] = lambda _: True,
) -> Architecture:
    """The row of a model type that descends from Llama."""
    table, inherits = "embed_tokens.weight", ("llama",)
    return _gpt(read, dialect, table, variants, inherits=inherits, ties=ties, may_be=may_be)


def _interleaved(
    read: Callable[[RawConfig], ModelConfig], dialect: str = "interleaved", *, ties: bool = False
) -> Architecture:
    """Of other makers' models none is taken for one of these: they keep heads in halves."""
    return _llama(read, dialect, ties=ties, may_be=lambda _: False)


def _latent(read: Callable[[RawConfig], ModelConfig], *, ties: bool = False) -> Architecture:
    """The row of a model with latent attention."""
    return _llama(read, "deepseek", latent.rope_pairs, ties=ties, may_be=latent.is_latent)


def _cohere(read: Callable[[RawConfig], ModelConfig], dialect: str = "cohere") -> Architecture:
    """Of other makers' models only those whose attention and MLP read the same can be a Cohere."""
    return _llama(read, dialect, ties=True, may_be=lambda config: bool(config.parallel_residual))


def _hybrid(
    read: Callable[[RawConfig], ModelConfig],
    dialect: str,
    variants: Callable[[RawConfig], Sequence[str]] = lambda _: (),
    *,
    inherits: tuple[str, ...] = (),
    ties: bool = False,
    table: str = "embed_tokens.weight",
) -> Architecture:
    """The row of a hybrid, which no model of another maker is taken for."""
    more = (*inherits, "llama")
    return _gpt(read, dialect, table, variants, inherits=more, ties=ties, may_be=lambda _: False)


def _joined(raw: RawConfig) -> list[str]:
    return ["_joined"] if "layers.0.experts.0.gate_up_proj.weight" in raw.keys else []


def _dense_granite(raw: RawConfig) -> list[str]:
    return [] if raw.raw.get("num_local_experts") else ["_dense", *_in_memory(raw)]


_SHARED = {"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)}
_GEMMA_HEAD = {HEAD: ("lm_head.out_proj.weight",), "decoder.embed_tokens.weight": (HEAD,)}
_OF_ENCODER = {
    HEAD: ("lm_head.out_proj.weight",),
    "encoder.embed_tokens.weight": ("decoder.embed_tokens.weight", HEAD),
}

ARCHITECTURES = {
    "gpt2": _gpt(configs.gpt2, "gpt2", "wte.weight"),
    "gpt_bigcode": _gpt(configs.gpt_bigcode, "gpt_bigcode", "wte.weight", inherits=("gpt2",)),
    "gpt_neo": _gpt(configs.gpt_neo, "gpt_neo", "wte.weight", inherits=("gpt2",)),
    "bloom": _gpt(configs.bloom, "bloom", "word_embeddings.weight"),
    "mpt": _gpt(configs.mpt, "mpt", "wte.weight"),
    "opt": _gpt(configs.opt, "opt", "decoder.embed_tokens.weight", _projected_or_untied),
    "xglm": _gpt(configs.xglm, "xglm", "embed_tokens.weight", _scaled_or_untied),
    "llama": _llama(decoders.llama),
    "mistral": _llama(decoders.mistral),
    "qwen2": _llama(decoders.qwen2),
    "qwen3": _llama(decoders.qwen3),
    "gemma": _llama(gemma.gemma, ties=True),
    "gemma2": _llama(gemma.gemma2, "gemma2", ties=True),
    "gemma3_text": _llama(gemma.gemma3, "gemma2", ties=True),
    "gemma4_text": _hybrid(gemma.gemma4, "gemma4", _joined, inherits=("gemma2",), ties=True),
    "gemma3n_text": _hybrid(gemma.gemma3n, "gemma3n", inherits=("gemma2",), ties=True),
    "phi": _llama(decoders.phi, "phi"),
    "phi3": _llama(decoders.phi3, "phi3"),
    "smollm3": _llama(decoders.smollm3, ties=True),
    "cohere": _cohere(decoders.cohere),
    "cohere2": _cohere(decoders.cohere2),
    "stablelm": _llama(decoders.stablelm, "stablelm", _one_norm),
    "granite": _llama(decoders.granite),
    "glm": _interleaved(decoders.glm, "glm"),
    "glm4": _interleaved(decoders.glm4, "glm4"),
    "helium": _interleaved(decoders.helium),
    "ernie4_5": _interleaved(decoders.ernie4_5, ties=True),
    "ministral": _llama(decoders.ministral),
    "ministral3": _llama(decoders.ministral3),
    "olmo": _llama(decoders.olmo, "olmo"),
    "olmo2": _llama(gemma.olmo2, "branch_norms"),
    "olmo3": _llama(gemma.olmo3, "branch_norms"),
    "exaone4": _llama(gemma.exaone4, "branch_norms"),
    "starcoder2": _llama(decoders.starcoder2, "starcoder2", ties=True),
    "nemotron": _llama(decoders.nemotron, "nemotron"),
    "arcee": _llama(decoders.arcee, "nemotron"),
    "seed_oss": _llama(decoders.seed_oss),
    "vaultgemma": _llama(gemma.vaultgemma, "vaultgemma", ties=True),
    "jais2": _llama(decoders.jais2, "nemotron"),
    "internlm3": _llama(decoders.internlm3),
    "iquestcoder": _llama(decoders.iquestcoder),
    "cwm": _llama(decoders.cwm),
    "mixtral": _llama(experts.mixtral, "mixtral", _in_memory),
    "granitemoe": _llama(experts.granitemoe, "granitemoe", _in_memory),
    "granitemoeshared": _llama(experts.granitemoeshared, "granitemoe", _in_memory),
    "qwen2_moe": _llama(experts.qwen2_moe, "qwen_moe"),
    "qwen3_moe": _llama(experts.qwen3_moe, "qwen_moe"),
    "olmoe": _llama(experts.olmoe, "qwen_moe"),
    "glm4_moe": _llama(experts.glm4_moe, "biased_moe"),
    "deepseek_v2": _latent(latent.deepseek_v2),
    "deepseek_v3": _latent(latent.deepseek_v3),
    "glm4_moe_lite": _latent(latent.glm4_moe_lite),
    "youtu": _latent(latent.youtu, ties=True),
    "minicpm3": _llama(latent.minicpm3, "deepseek", ties=True, may_be=latent.is_latent),
    "dots1": _llama(experts.dots1, "biased_moe"),
    "solar_open": _llama(experts.solar_open, "biased_moe"),
    "exaone_moe": _llama(gemma.exaone_moe, "exaone_moe"),
    "mellum": _llama(experts.mellum, "qwen_moe"),
    "ernie4_5_moe": _interleaved(experts.ernie4_5_moe, "ernie4_5_moe", ties=True),
    "gpt_oss": _llama(
        experts.gpt_oss, "gpt_oss", may_be=lambda config: bool(config.attention_sinks)
    ),
    "minimax_m2": _llama(experts.minimax_m2, "minimax_m2", _in_memory),
    "dbrx": _gpt(decoders.dbrx, "dbrx", "wte.weight", ties=False, may_be=lambda _: False),
    "nemotron_h": _hybrid(hybrids.nemotron_h, "nemotron_h", table="embeddings.weight"),
    "bamba": _hybrid(hybrids.bamba, "bamba"),
    "falcon_h1": _hybrid(hybrids.falcon_h1, "bamba"),
    "granitemoehybrid": _hybrid(
        hybrids.granitemoehybrid, "granitemoehybrid", _dense_granite, inherits=("granitemoe",)
    ),
    "qwen3_next": _hybrid(hybrids.qwen3_next, "qwen3_next", inherits=("qwen_moe",)),
    "qwen3_5_text": _hybrid(hybrids.qwen3_5, "qwen3_5"),
    "qwen3_5_moe_text": _hybrid(hybrids.qwen3_5_moe, "qwen3_5", inherits=("qwen_moe",)),
    "lfm2": _hybrid(hybrids.lfm2, "lfm2", ties=True),
    "lfm2_moe": _hybrid(hybrids.lfm2_moe, "lfm2", ties=True),
    "kimi_linear": _hybrid(
        latent.kimi_linear, "kimi_linear", latent.saved_mlps, inherits=("deepseek",)
    ),
    "apertus": _llama(decoders.apertus, "apertus"),
    "hunyuan_v1_dense": _llama(decoders.hunyuan, "hunyuan"),
    "hunyuan_v1_moe": _llama(decoders.hunyuan_moe, "hunyuan_moe"),
    "hy_v3": _llama(experts.hy_v3, "hy_v3"),
    "nanochat": _llama(decoders.nanochat, "nanochat", may_be=lambda _: False),
    "granite_swa": _llama(decoders.granite_swa, "sinks", ties=True),
    "granitemoe_swa": _llama(experts.granitemoe_swa, "granitemoe_swa", _in_memory),
    "flex_olmo": _llama(gemma.flex_olmo, "flex_olmo"),
    "afmoe": _llama(experts.afmoe, "afmoe"),
    "phimoe": _llama(experts.phimoe, "phimoe", _in_memory),
    "cohere2_moe": _cohere(experts.cohere2_moe, "cohere2_moe"),
    "mimo_v2_flash": _llama(experts.mimo_v2_flash, "mimo", may_be=lambda _: False),
    "nemotron-nas": _llama(hybrids.nemotron_nas, "nemotron_nas"),
    "llama4_text": _interleaved(experts.llama4, "llama4"),
    "gpt_neox": Architecture(
        "gpt",
        decoders.gpt_neox,
        "gpt_neox",
        {HEAD: ("embed_out.weight",), "embed_in.weight": (HEAD,)},
        ties=False,
    ),
    "gptj": _gpt(configs.gptj, "gptj", "wte.weight", ties=False),
    "codegen": _gpt(configs.codegen, "codegen", "wte.weight", inherits=("gptj",), ties=False),
    "falcon": _gpt(
        configs.falcon, "falcon", "word_embeddings.weight", _falcon_norms, inherits=("bloom",)
    ),
    **dict.fromkeys(("t5", "mt5"), Architecture("t5", configs.t5, "huggingface", _SHARED)),
    "switch_transformers": Architecture("t5", configs.switch_transformers, "switch", _SHARED),
    "umt5": Architecture("t5", configs.umt5, "huggingface", _SHARED),
    "longt5": Architecture("t5", configs.longt5, "longt5", _SHARED, inherits=("huggingface",)),
    "t5gemma": Architecture("t5", gemma.t5gemma, "t5gemma", _GEMMA_HEAD),
    "t5gemma2": Architecture("t5", gemma.t5gemma2, "t5gemma", _OF_ENCODER),
    "bart": Architecture("bart", configs.bart, "bart", _SHARED, _scaled),
    "mbart": Architecture("bart", configs.mbart, "bart", _SHARED, _scaled),
    "m2m_100": Architecture("bart", configs.m2m_100, "bart", _SHARED, _m2m_100),
    "nllb-moe": Architecture("bart", configs.nllb_moe, "bart", _SHARED, _nllb_moe),
    "pegasus": Architecture("bart", configs.pegasus, "bart", _SHARED, _sinusoidal),
    "marian": Architecture("bart", configs.marian, "bart", _SHARED, _marian),
    "agm": Architecture(
        "agm",
        configs.agm,
        "agm",
        {"shared.weight": ("decoder.embed_tokens.weight", "lm_head.decoder.weight")},
    ),
}


def architecture(raw: Mapping[str, Any], path: Path) -> Architecture:
    """The row for a raw config.json. Agm calls itself bart."""
    name = "agm" if is_agm(raw) else raw.get("model_type")
    if isinstance(name, str) and name in NOT_READ:
        raise CheckpointError(
            problem(f"{path}: model_type is not supported: {NOT_READ[name]}", got=name)
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        choices = sorted({*ARCHITECTURES, *MULTIMODAL})
        raise CheckpointError(problem(f"{path}: unknown model_type", got=name, choices=choices))
    return ARCHITECTURES[name]


def described(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json as a row of ARCHITECTURES reads it: of a model for images the decoder's part, and
    with a model_type, which the published umT5s only say by their class.
    """
    raw = class_keys(text_config(raw))
    classes = raw.get("architectures")
    if "model_type" in raw or not isinstance(classes, list):
        return raw
    umt5 = any(str(name).startswith("UMT5") for name in classes)
    return raw | {"model_type": "umt5"} if umt5 else raw


def read_sizes(path: Path) -> ModelConfig | None:
    """The hyperparameters of a folder, as far as they decide how the model can be divided: which
    tensors there are is not looked at. None where the folder is not one of transformers, or says
    what only the converter can judge.

    Raises CheckpointError for a config.json that is damaged, or of a model type that is not known.
    """
    files = (f"{name}{index}" for name in WEIGHT_FILES for index in ("", ".index.json"))
    config = path / CONFIG_NAME
    if not config.is_file() or not any((path / name).is_file() for name in files):
        return None
    try:
        raw = described(mapping(parse_json(read_plain(config))))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_NAME} of {path} is damaged: {error}") from error
    row = architecture(raw, config)
    values = RawConfig(raw, (), Problems(str(config)))
    try:
        result = row.read(values)
    except CheckpointError:
        return None
    return None if values.problems.messages else result
