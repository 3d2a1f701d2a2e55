"""config.json of a model: the readers of huggingface_configs and its kin, run backwards.

A reader asks for keys and makes hyperparameters of their values. Here it asks a proposal, which
has the hyperparameters and answers with what they say; the keys that were asked for are the
config.json. The reader then reads that file, and must find the same hyperparameters: so one
definition serves both directions, and a model type whose values cannot be told is not proposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_architectures import ARCHITECTURES
from launcher_scripts.checkpoint.sources.huggingface_classes import OBEYED, reject_disobeyed
from launcher_scripts.checkpoint.sources.huggingface_raw import ACTIVATIONS, RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import yarn_section
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models import family_of

# Where config.json says special ids -> the hyperparameter.
_TOKENS = {
    "bos_token_id": "start_id",
    "decoder_start_token_id": "start_id",
    "eos_token_id": "end_id",
    "pad_token_id": "pad_id",
    "forced_bos_token_id": "forced_bos_id",
}
# Hyperparameter -> the keys that say it.
_KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "num_decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "num_heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        "encoder_attention_heads",
    ),
    "num_decoder_heads": ("decoder_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("d_kv",),
    "ffn_size": (
        *("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "moe_intermediate_size"),
        "encoder_ffn_dim",
    ),
    "decoder_ffn_size": ("decoder_ffn_dim",),
    "max_positions": (*("n_positions", "max_position_embeddings", "seq_length", "max_seq_len"),),
    "norm_eps": (
        *("layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    ),
    "attention_bias": (
        *("attention_bias", "use_bias", "bias", "enable_bias", "use_qkv_bias", "qkv_bias"),
    ),
    "mlp_bias": ("mlp_bias",),
    "dense_bias": ("attention_out_bias",),
    "rotary_base": ("rope_theta", "rotary_emb_base"),
    "rotary_percentage": ("partial_rotary_factor", "rotary_pct"),
    "rotary_local_base": ("rope_local_base_freq",),
    "sliding_window": ("sliding_window", "window_size"),
    "attention_softcap": ("attn_logit_softcapping",),
    "logits_softcap": ("final_logit_softcapping",),
    "logits_scale": ("logit_scale",),
    "attention_scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k"),
    "router_scaling_factor": ("routed_scaling_factor", "router_scaling_factor", "route_scale"),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "rope_head_size": ("qk_rope_head_dim",),
    "value_head_size": ("v_head_dim",),
    "num_buckets": ("relative_attention_num_buckets",),
    "max_distance": ("relative_attention_max_distance",),
    "tied_embeddings": ("tie_word_embeddings",),
    **{name: (key,) for key, name in _TOKENS.items() if key != "decoder_start_token_id"},
}
_NAMES = {key: name for name, keys in _KEYS.items() for key in keys} | _TOKENS


def _layers(config: Any) -> range:
    return range(config.num_layers)


def _layer_types(config: Any) -> list[str] | None:
    if not config.sliding_window:
        return None
    kinds = ("full_attention", "sliding_attention")
    return [kinds[config.window(layer) > 0] for layer in _layers(config)]


def _attention_types(config: Any) -> list[list[Any]]:
    return [[["local" if config.window(n) else "global"], 1] for n in _layers(config)]


def _dense_layers(config: Any) -> list[int] | None:
    """Layers without experts; None if all layers have them."""
    if config.dense_layers is None:
        return None
    return [layer for layer in _layers(config) if not config.has_experts(layer)]


def _mlp_layer_types(config: Any) -> list[str] | None:
    if config.dense_layers is None:
        return None
    return ["sparse" if config.has_experts(layer) else "dense" for layer in _layers(config)]


def _num_dense(config: Any) -> int:
    return len(_dense_layers(config) or ())


def _feed_forward(config: Any) -> str:
    """T5's name of the tanh form after `gated-` is gelu."""
    if config.gated and config.activation == "gelu":
        return "gated-gelu"
    return f"{'gated-' * bool(config.gated)}{_activation(config.activation, None)}"


def _shared_experts(config: Any) -> int:
    return int(config.shared_expert_size or 0) // int(config.ffn_size)


def _attention_scalar(config: Any) -> int:
    return round(float(config.attention_scale) ** -2)


def _no_rope_layers(config: Any) -> list[int]:
    return [int(config.rotates(layer)) for layer in _layers(config)]


# Key -> what the hyperparameters say; None: nothing, and the reader's default counts.
_VALUES: dict[str, Callable[[Any], Any]] = {
    "intermediate_size": lambda config: config.dense_ffn_size or config.ffn_size,
    "rotary_dim": lambda config: config.rotary_size,
    "multi_query": lambda config: config.num_kv_heads == 1,
    "new_decoder_architecture": lambda config: config.num_kv_heads not in (1, config.num_heads),
    "parallel_attn": lambda config: bool(config.parallel_residual),
    "use_parallel_residual": lambda config: bool(config.parallel_residual),
    "alibi": lambda config: config.position_embedding == "alibi",
    "do_layer_norm_before": lambda config: config.norm_placement == "pre",
    "use_sliding_window": lambda config: config.sliding_window is not None,
    "layer_types": _layer_types,
    "attention_types": _attention_types,
    "no_rope_layers": _no_rope_layers,
    "query_pre_attn_scalar": _attention_scalar,
    "logits_scaling": lambda config: 1 / (config.logits_scale or 1.0),
    "n_group": lambda config: config.num_expert_groups or 1,
    "topk_group": lambda config: config.groups_per_token or 1,
    "norm_topk_prob": lambda config: bool(config.normalized_experts),
    "mlp_only_layers": _dense_layers,
    "mlp_layer_types": _mlp_layer_types,
    "first_k_dense_replace": _num_dense,
    "moe_layer_start_index": _num_dense,
    "shared_expert_intermediate_size": lambda config: config.shared_expert_size,
    "shared_intermediate_size": lambda config: config.shared_expert_size or 0,
    "n_shared_experts": _shared_experts,
    "moe_num_shared_experts": _shared_experts,
    # Of latent attention it is the part of a head that turns.
    "head_dim": lambda config: getattr(config, "rope_head_size", None) or config.head_size,
    "qk_nope_head_dim": lambda config: config.head_size - (config.rope_head_size or 0),
    "qk_head_dim": lambda config: config.head_size if config.kv_lora_rank else None,
    "use_qk_norm": lambda config: bool(config.qk_norm),
    "clip_qkv": lambda config: config.attention_clip,
    "feed_forward_proj": _feed_forward,
    "scale_decoder_outputs": lambda config: config.logits_scale != 1.0,
}
# Of these, null and nothing say two things: the classes have sizes of their own.
_NULL = ("q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# Within rope_parameters: the name of a scaling, and its numbers.
_ROPE_TYPES = {"factors": "longrope"}
_ROPE: dict[str, Callable[[Any], Any]] = {
    "rope_type": lambda config: _rope_type(config),
    "factor": lambda config: _rope_factor(config),
    "low_freq_factor": lambda config: config.rotary_low_frequency_factor,
    "high_freq_factor": lambda config: config.rotary_high_frequency_factor,
    "original_max_position_embeddings": lambda config: (
        config.rotary_original_positions or config.max_positions
    ),
    "short_factor": lambda config: _numbers(config.rotary_factors),
    "long_factor": lambda config: _numbers(config.rotary_long_factors or config.rotary_factors),
    "attention_factor": lambda config: config.rotary_attention_factor,
}


def _rope_type(config: Any) -> str:
    if config.rotary_scaling is None:
        return "default" if config.rotary_interpolation_factor == 1.0 else "linear"
    return _ROPE_TYPES.get(config.rotary_scaling, str(config.rotary_scaling))


def _rope_factor(config: Any) -> float | None:
    """LongRoPE's is part of its factors."""
    kind = _rope_type(config)
    if kind == "linear":
        return float(config.rotary_interpolation_factor)
    return None if kind == "longrope" else config.rotary_scaling_factor


def _yarn(config: Any) -> dict[str, Any]:
    """The section of a YaRN that has the factors of the rotation; none where it is of another kind.
    Latent attention also scales its scores by it.
    """
    if config.rotary_scaling != "factors":
        return {}
    growth = math.sqrt(config.attention_scale * math.sqrt(config.head_size))
    numbers = _numbers(config.rotary_factors) or (), config.rotary_base, config.max_positions
    return yarn_section(
        *numbers, config.rotary_attention_factor, growth if config.kv_lora_rank else 1.0
    )


def _numbers(text: str | None) -> list[float] | None:
    return None if text is None else [float(number) for number in text.split(",")]


def _activation(name: str, default: Any) -> str:
    """A name in transformers of an activation, the reader's default if that is it."""
    if ACTIVATIONS.get(default) == name:
        return str(default)
    return next((key for key, value in ACTIVATIONS.items() if value == name), name)


class _Proposal(RawConfig):
    """A config.json that is made while it is read.

    config:  the hyperparameters that the values are taken from
    section: it is rope_parameters, or a part of it
    """

    def __init__(self, config: Any, raw: dict[str, Any], keys: Collection[str], section: bool):
        super().__init__(raw, keys, Problems("a proposal"))
        self.config = config
        self.model_type = raw.get("model_type")
        self.values = raw
        self.is_rope = section
        stated = (*_NULL, *_TOKENS)  # config_with_token_ids says which ids are not known
        self._defaults = {key: value for key, value in self._defaults.items() if key not in stated}

    def __call__(self, *names: str, default: Any = None) -> Any:
        self.read_keys.update(names)
        value = next((value for name in names if (value := self._value(name)) is not None), None)
        if value is None:
            defaults = next(
                (self._defaults[name] for name in names if name in self._defaults), None
            )
            if defaults is None and names[0] in _NULL:
                self.values[names[0]] = None
            return default if defaults is None else defaults
        # Classes call the number of experts differently where one reader serves them.
        aliases = [name for name in names if name in _KEYS["num_experts"]]
        self.values.update(dict.fromkeys(aliases or names[:1], value))
        return value

    def _value(self, name: str) -> Any:
        table = _ROPE if self.is_rope else _VALUES
        if name in OBEYED and not self.is_rope and self.model_type not in OBEYED[name].by:
            return None  # its class ignores the key
        if self.is_rope and (name in (yarn := _yarn(self.config)) or (yarn and name in table)):
            return yarn.get(name)
        if name in table:
            return table[name](self.config)
        value = getattr(self.config, _NAMES[name], None) if name in _NAMES else None
        outside = name in _TOKENS and not (value or 0) < self.config.vocab_size
        return None if outside else value

    def activation(self, name: str, default: Any = None) -> str:
        defaults = self._defaults.get(name, default)
        self.values[name] = _activation(self.config.activation, defaults)
        self.read_keys.add(name)
        return str(self.config.activation)

    def section(self, *names: str) -> RawConfig:
        name, local_base = names[0], getattr(self.config, "rotary_local_base", None)
        if name == "sliding_attention":
            self.values[name] = {"rope_type": "default", "rope_theta": local_base}
            self.sections[name] = RawConfig(self.values[name], self.keys, self.problems)
            return self.sections[name]
        if name == "rope_parameters" and local_base is not None:
            self.values.setdefault(name, {"full_attention": {}, "sliding_attention": {}})
        section = self.values.setdefault(names[0], {})
        is_rope = self.is_rope or names[0] == "rope_parameters"
        self.sections[names[0]] = _Proposal(self.config, section, self.keys, section=is_rope)
        return self.sections[names[0]]


def proposal(model_type: str, config: Any, keys: Collection[str]) -> dict[str, Any] | None:
    """Return config.json of a model type with these hyperparameters, as far as they can be said.

    keys: names of the tensors
    """
    row = ARCHITECTURES[model_type]
    raw = _Proposal(config, {"model_type": model_type}, keys, section=False)
    try:
        row.read(raw)
        row.dialects(raw)
    except (CheckpointError, ArithmeticError, AttributeError, TypeError, ValueError, KeyError):
        return None
    return {key: value for key, value in raw.values.items() if value != {}}


@dataclass(frozen=True)
class ReadConfig:
    """A config.json as its reader reads it: hyperparameters, dialects of its tensors, and what
    differs from the expected hyperparameters."""

    config: Any
    dialects: tuple[str, ...]
    differences: tuple[str, ...]


def reading(raw: Mapping[str, Any], keys: Collection[str], config: Any) -> ReadConfig:
    """Read a config.json and compare it with the hyperparameters it must say."""
    row = ARCHITECTURES[raw["model_type"]]
    problems = Problems("config.json")
    values = RawConfig(raw, keys, problems)
    values.unused("quantization_config")
    reject_disobeyed(values)
    try:
        result = row.read(values)
        dialects = row.dialects(values)
    except CheckpointError as error:
        return ReadConfig(None, (), (*problems.messages, *error.problems, str(error))[:1])
    values.check_keys()
    return ReadConfig(result, dialects, (*problems.messages, *config_differences(result, config)))


def config_differences(one: Any, other: Any) -> Iterator[str]:
    """The hyperparameters of two models that differ, special ids and adapters apart."""
    mine, reference = _plain(one), _plain(other)
    for name in mine:
        if not _same(mine[name], reference.get(name)):
            yield f"{name} {reference.get(name)!r} instead of {mine[name]!r}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


# Hyperparameters that are not part of what tensors are computed to, or that others follow from.
_APART = ("parts", "start_id", "end_id", "pad_id", "forced_bos_id", "softmax_scale")
_DERIVED = ("attention_scale", "dense_bias")


def _plain(config: Any) -> dict[str, Any]:
    """Hyperparameters under which equal models are equal: nothing counts as off."""
    names = [item.name for item in fields(config) if item.name not in _APART]
    values = {name: getattr(config, name) for name in names}
    values |= {name: getattr(config, name) for name in _DERIVED if hasattr(config, name)}
    values.pop("attention_dense_bias", None)
    if values.get("kv_lora_rank") is not None:
        values["latent_norm_eps"] = values["latent_norm_eps"] or values["norm_eps"]
    if values.get("rotary_scaling") == "longrope" and (
        values["rotary_factors"] == values["rotary_long_factors"]
    ):
        values |= {"rotary_scaling": "factors", "rotary_long_factors": None}
    if values.get("rotary_scaling") == "factors":
        values["rotary_original_positions"] = None
    if values.get("position_embedding") != "rope":
        values = {name: values[name] for name in values if not name.startswith("rotary_")}
    if values.get("position_embedding") == "relative":
        values.pop("max_positions", None)
    if values.get("rotary_factors"):
        values["rotary_factors"] = _numbers(values["rotary_factors"])
    neutral = {"logits_scale": 1.0, "embedding_scale": 1.0, "router_scaling_factor": 1.0}
    for name, value in values.items():
        if value is False or value == neutral.get(name):
            values[name] = None
    if values.get("num_experts") is not None:
        values["router_score_function"] = values["router_score_function"] or "softmax"
        gated = config.shared_expert_size is not None and config.shared_expert_gate is not False
        values["shared_expert_gate"] = gated
    return values


def config_with_token_ids(raw: Mapping[str, Any], read: Any, config: Any) -> dict[str, Any]:
    """Return config.json with the special ids of `config`, where it says others.

    read: its hyperparameters
    A list of end tokens that begins with the model's stays. Ids of a decoder that are not known
    are null: those that classes have by default may lie outside of the vocabulary.
    """
    encodes = hasattr(config, "num_decoder_layers")
    start = "decoder_start_token_id" if encodes else "bos_token_id"
    names = {start: "start_id", "eos_token_id": "end_id", "pad_token_id": "pad_id"}
    result = ({} if encodes else dict.fromkeys(names)) | dict(raw)
    for key, name in names.items():
        value = getattr(config, name)
        if value not in (None, getattr(read, name)) and value < config.vocab_size:
            result[key] = value
    return result


def candidates(
    config: Any, raw: Mapping[str, Any] | None
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Model types that a model may be written as, with the config.json where one is there.

    raw: that of the source
    """
    family = family_of(config).name
    if raw is not None and raw.get("model_type") in ARCHITECTURES:
        yield raw["model_type"], raw
        if raw["model_type"] not in _NOT_PROPOSED:
            yield raw["model_type"], None
    for name, row in ARCHITECTURES.items():
        if row.family == family and name not in _NOT_PROPOSED:
            yield name, None


def refuse_unwritten(config: Any, raw: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError for a model of NOT_WRITTEN.  raw: its config.json"""
    family = family_of(config).name
    name = family if family in NOT_WRITTEN else (raw or {}).get("model_type")
    if getattr(config, "encoder_expert_layers", None):
        name = "nllb-moe" if family == "bart" else "switch_transformers"
    if getattr(config, "merged_attention", None):
        name = "t5gemma2"
    if getattr(config, "encoder_sliding_window", None):
        name = "longt5"
    if name in NOT_WRITTEN:
        message = f"models of the type {name} cannot be written as a transformers folder"
        raise CheckpointError(problem(message, change="export.format=fastertransformer"))


# Names of classes that do not follow from the model type, without their ends.
_CLASS_STEMS = {
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neo": "GPTNeo",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "codegen": "CodeGen",
    "opt": "OPT",
    "xglm": "XGLM",
    "gemma3_text": "Gemma3",
    "gemma3n_text": "Gemma3n",
    "gemma4_text": "Gemma4",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "vaultgemma": "VaultGemma",
    "internlm3": "Llama",
    "iquestcoder": "Llama",
    "granitemoe": "GraniteMoe",
    "granitemoeshared": "GraniteMoeShared",
    "minimax_m2": "MiniMaxM2",
    "granite_swa": "GraniteSWA",
    "granitemoe_swa": "GraniteMoeSWA",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "hy_v3": "HYV3",
    "llama4_text": "Llama4",
    "mimo_v2_flash": "MiMoV2Flash",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "nanochat": "NanoChat",
    "minicpm3": "MiniCPM3",
    "mt5": "MT5",
    "umt5": "UMT5",
    "t5gemma": "T5Gemma",
    "mbart": "MBart",
    "m2m_100": "M2M100",
}
_CLASS_ENDS = {"gpt": "ForCausalLM", "t5": "ForConditionalGeneration"}
_CLASSES = {"gpt2": "GPT2LMHeadModel", "marian": "MarianMTModel"}
# Models that transformers has no class of, or some of whose tensors have no way back yet.
NOT_WRITTEN = (
    *("agm", "nemotron-nas", "switch_transformers", "kimi_linear", "dbrx", "t5gemma2", "nllb-moe"),
    "longt5",
)
# Model types that only a config.json of their own describes.
_NOT_PROPOSED = (
    *(*NOT_WRITTEN, "llama4_text", "mimo_v2_flash", "lfm2", "nemotron_h", "bamba"),
    *("falcon_h1", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("lfm2_moe", "gemma4_text", "gemma3n_text"),
)


def transformers_class(model_type: str, config: Any) -> str:
    """Return the class in transformers of a model type."""
    words = "".join(word.capitalize() for word in model_type.split("_"))
    stem = _CLASS_STEMS.get(model_type, words)
    if getattr(config, "encoder_only", False):
        return f"{stem}EncoderModel"
    end = _CLASS_ENDS.get(ARCHITECTURES[model_type].family, "ForConditionalGeneration")
    return _CLASSES.get(model_type, stem + end)
