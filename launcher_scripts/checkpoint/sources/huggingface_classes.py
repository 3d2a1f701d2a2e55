"""Classes of transformers: the keys that they read or ignore, and their names.

Keys that some classes follow and other programs follow for all, and classes that a config.json may
name. Neither numpy nor torch is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_raw import MULTIMODAL, RawConfig


def is_agm(raw: Mapping[str, Any]) -> bool:
    """True for a config.json of an Agm, a model of a fork of transformers."""
    return "mup_scale" in raw or "position_bias_per_layer" in raw


@dataclass(frozen=True)
class Obeyed:
    """A row of OBEYED.

    neutral: the value that changes nothing
    by:      the model types whose classes in transformers read the key
    """

    neutral: Any
    by: tuple[str, ...]


# Model types of published files whose class is another one's.
ALIASES = {"kimi_k2": "deepseek_v3"}
# MiMo-V2's published lists of a mark for each layer -> the class's key, and what 0 and 1 mean.
_MARKS = {
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}


def class_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys that transformers' class has for a maker's own, where these
    do not contradict each other: what is left is judged as any other key."""
    name = raw.get("model_type")
    result = dict(raw)
    if isinstance(name, str) and name in ALIASES:
        result["model_type"] = ALIASES[name]
    if name != "mimo_v2_flash":
        return result
    for key, (own, words) in _MARKS.items():
        marks = raw.get(key)
        if isinstance(marks, list) and all(mark in (0, 1) for mark in marks):
            kinds = [words[mark] for mark in marks]
            if raw.get(own) in (None, kinds):
                result[own] = kinds
                del result[key]
    if type(raw.get("sliding_window_size")) is int:  # which does not count the token's own
        result["sliding_window"] = result.pop("sliding_window_size") + 1
    if "layernorm_epsilon" in raw:
        result.setdefault("rms_norm_eps", result.pop("layernorm_epsilon"))
    if "swa_rope_theta" in raw and raw.get("rope_parameters") is None:
        share = {"partial_rotary_factor": result.pop("partial_rotary_factor", 0.334)}
        full = {"rope_theta": result.pop("rope_theta", 5e6), **share}
        local = {"rope_theta": result.pop("swa_rope_theta"), **share}
        result["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return result


_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_MIXED = ("cohere2_moe", "exaone_moe", "glm4_moe_lite", "kimi_linear")  # layers with and without
# Keys that classes of transformers read, their relatives do not, and other programs read for all.
OBEYED = {
    "partial_rotary_factor": Obeyed(
        1.0,
        (
            *("glm", "glm4", "glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "phi", "phi3"),
            *("solar_open", "stablelm", "bamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            *("laguna", "mimo_v2_flash", "gemma4_text"),
        ),
    ),
    "attention_bias": Obeyed(
        False,
        (
            *("arcee", "cohere", "cohere2", "dots1", "gemma", "gemma2", "gemma3_text", "glm"),
            *("glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe"),
            *("granitemoeshared", "helium", "internlm3", "iquestcoder", "jais2", "llama", "mellum"),
            *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe", "seed_oss"),
            *("smollm3", "solar_open", "t5gemma", "t5gemma2", "vaultgemma", "bamba", "falcon_h1"),
            *("granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            *("afmoe", "apertus", "cohere2_moe", "flex_olmo", "granite_swa", "granitemoe_swa"),
            *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "llama4_text", "mimo_v2_flash"),
            *("nanochat", "phimoe", "gemma3n_text", "gemma4_text", "kimi_linear", *_LATENT),
        ),
    ),
    "mlp_bias": Obeyed(
        False,
        (
            *("arcee", "cwm", "granite", "helium", "internlm3", "iquestcoder", "jais2", "llama"),
            *("deepseek_v2", "minicpm3", "nemotron", "seed_oss", "smollm3", "bamba", "falcon_h1"),
            *("nemotron_h", "granite_swa", "hy_v3"),
        ),
    ),
    "attn_logit_softcapping": Obeyed(None, ("gemma2", "t5gemma", "vaultgemma")),
    "first_k_dense_replace": Obeyed(0, (*_LATENT[:2], *_MIXED, "dots1", "glm4_moe", "hy_v3")),
    "mlp_layer_types": Obeyed(None, (*_MIXED, "hy_v3", "mellum", "mimo_v2_flash")),
}


def reject_disobeyed(raw: RawConfig) -> None:
    """Note values of OBEYED that transformers' class of the model does not read."""
    model_type = raw.raw["model_type"]
    sections: list[Any] = [raw.raw]
    for section in sections:
        sections += [
            value
            for key, value in section.items()
            if isinstance(value, Mapping) and (section is not raw.raw or key.startswith("rope_"))
        ]
    for key, row in OBEYED.items():
        for value in {str(section.get(key)): section.get(key) for section in sections}.values():
            if model_type not in row.by and value not in (None, row.neutral):
                raw.unused(key)
                raw.problems.add(
                    f"{key}: transformers' class of {model_type} ignores it, and other programs "
                    "obey it: logits differ",
                    got=value,
                    choices=[row.neutral],
                    change="config.json: remove the key if the model was trained without it",
                )


# The ends of a class's name, after the model type without underscores, in small letters.
_CLASSES = {
    "gpt": ("forcausallm", "lmheadmodel"),
    "t5": ("forconditionalgeneration", "withlmheadmodel", "encodermodel"),
    "bart": ("forconditionalgeneration", "mtmodel"),
}
_BASES = ("model", "textmodel")
# Of models that read images, too; the last one is Nemotron Omni's.
_OF_IMAGES = ("forconditionalgeneration", "reasoningv3")
# Those of auto_map that load a language model; others are heads for other tasks, and tokenizers.
_AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# Model types whose own class transformers 5 has replaced by Llama's.
_LLAMAS = ("internlm3", "iquestcoder")
# Model types whose class is not called like them.
_STEMS = {
    "hunyuan_v1_dense": "hunyuandensev1",
    "hunyuan_v1_moe": "hunyuanmoev1",
    "nemotron-nas": "decilm",
    "kimi_k2": "deepseekv3",
    "nllb-moe": "nllbmoe",
}
_ALLOW = "export.model.allow_custom_code_config=True"


def check_classes(raw: RawConfig, config: Mapping[str, Any], family: str, allowed: bool) -> None:
    """Note classes of `architectures` and `auto_map` that are not transformers' language model of
    the model type, and code beside the weights.

    config:  config.json, also of a model that reads images
    allowed: they are taken for that model all the same
    """
    model_type = str(config.get("model_type", raw.raw["model_type"]))
    if model_type == "agm" or is_agm(config):
        return
    ends = (*_CLASSES[family], *_OF_IMAGES) if model_type in MULTIMODAL else ()
    supported = (*(ends or _CLASSES[family]), *_BASES)
    stem = _STEMS.get(model_type, _letters(model_type.removesuffix("_text")))
    stems = (stem, "llama") if model_type in _LLAMAS else (stem,)

    def is_one(name: str, ends: Sequence[str]) -> bool:
        return _letters(name).removeprefix("fsdp") in {s + end for s in stems for end in ends}

    architectures, auto_map = config.get("architectures") or [], config.get("auto_map") or {}
    if isinstance(auto_map, str):  # the class of a configuration alone
        auto_map = {"AutoConfig": auto_map}
    if not isinstance(architectures, list) or not isinstance(auto_map, Mapping):
        raw.problems.add("architectures must be a list, auto_map a mapping")
        return
    code = {str(name): str(value) for name, value in auto_map.items()}
    models = [value for name, value in code.items() if name in _AUTO_CLASSES]
    strange = [str(name) for name in architectures if not is_one(str(name), supported)]
    strange += [value for value in models if not is_one(value.rpartition(".")[2], supported)]
    if strange and not allowed:
        raw.problems.add(
            f"architectures, or auto_map, names a class that is not transformers' language model "
            f"of {model_type}: it may compute something else",
            got=strange,
            choices=[f"{model_type}'s own class"],
            change=f"{_ALLOW} to export it as {model_type} all the same",
        )
    elif strange:
        raw.notes.append(f"exported as {model_type}, although config.json names {strange}")
    elif models:
        raw.notes.append(f"auto_map: the code {models} is not read; exported as {model_type}")
    bases = [name for name in map(str, architectures) if is_one(name, _BASES)]
    if bases:
        raw.notes.append(f"{bases[0]} has no output layer: exported with {model_type}'s own")


def _letters(name: str) -> str:
    """A name in small letters without underscores."""
    return name.replace("_", "").lower()


# Model types of transformers that are not read, although their relatives are -> why.
NOT_READ = {
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "its attention reads the tokens that a sparse indexer chooses",
    ),
    **dict.fromkeys(("jamba", "zamba"), "its layers have Mamba-1"),
    "zamba2": "its layers share attention that LoRA of each one changes",
    "diffllama": "its attention is the difference of two",
    "doge": "its attention masks values by a dynamic mask",
    "laguna": "its attention is gated by a softplus",
    "minimax": "its layers have lightning attention",
    "led": "its encoder's attention is local, with global tokens",
}
