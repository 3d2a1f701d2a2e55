"""config.ini of a GPT checkpoint: section [gpt], with FasterTransformer's own keys.

It starts with the keys FasterTransformer's NeMo converter writes, in its order, and goes on with
the keys its runtime reads and that converter forgets. docs/checkpoint-format.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer import config_ini_parts
from launcher_scripts.checkpoint.fastertransformer.ini_keys import IniKeys, Sections
from launcher_scripts.models.gpt import NORM_PLACEMENTS, GPTConfig

# What [gpt] has no words for, or none that are exact.
EXTENSION_FIELDS = (
    "hidden_size",
    "num_kv_heads",
    "position_embedding",
    "rotary_percentage",
    "rotary_base",
    "rotary_interpolation_factor",
    "rotary_scaling",
    "rotary_scaling_factor",
    "rotary_low_frequency_factor",
    "rotary_high_frequency_factor",
    "rotary_original_positions",
    "rotary_factors",
    "rotary_long_factors",
    "rotary_attention_factor",
    "rotary_local_base",
    "alibi_layer_scaling",
    "alibi_scale",
    "normalization",
    "activation",
    "gated",
    "attention_bias",
    "attention_dense_bias",
    "qk_norm",
    "mlp_bias",
    "parallel_residual",
    "zero_centered_norm",
    "embedding_scale",
    "softmax_scale",
    "logits_scale",
    "logits_bias",
    "attention_softcap",
    "logits_softcap",
    "sliding_window",
    "full_attention_layers",
    "num_experts",
    "experts_per_token",
    "normalized_experts",
    "shared_expert_size",
    "shared_expert_gate",
    "tied_embeddings",
    "pad_id",
)
# GPTConfig's fields that [gpt] expresses completely, by the key that holds them.
_SIZES = {
    "head_num": "num_heads",
    "size_per_head": "head_size",
    "inter_size": "ffn_size",
    "num_layer": "num_layers",
    "max_pos_seq_len": "max_positions",
    "vocab_size": "vocab_size",
    "start_id": "start_id",
    "end_id": "end_id",
}
# FasterTransformer's names of (activation, gated); its Gelu is the tanh form.
_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "siglu": ("silu", True),
}
_ACTIVATION_NAMES = {
    ("gelu", False): "Gelu",
    ("gelu_erf", False): "Gelu",
    ("relu", False): "Relu",
    ("silu", False): "Silu",
    ("gelu", True): "GeGLU",
    ("gelu_erf", True): "GeGLU",
    ("relu", True): "ReGLU",
    ("silu", True): "SiGLU",
}


def sections(config: GPTConfig, tp_size: int, weight_data_type: str, name: str) -> Sections:
    """The sections of config.ini but [extension]."""
    return {
        "gpt": {
            "model_name": name,
            "tensor_para_size": str(tp_size),
            "head_num": str(config.num_heads),
            "size_per_head": str(config.head_size),
            "inter_size": str(config.ffn_size),
            "num_layer": str(config.num_layers),
            "max_pos_seq_len": str(config.max_positions),
            "weight_data_type": weight_data_type,
            "vocab_size": str(config.vocab_size),
            "start_id": str(config.start_id),
            "end_id": str(config.end_id),
            "layernorm_eps": repr(config.norm_eps),
            "layernorm_type": f"{config.norm_placement}_layernorm",
            "activation_type": _ACTIVATION_NAMES.get(
                (config.activation, config.gated), config.activation
            ),
            "has_positional_encoding": str(config.position_embedding == "learned"),
            "has_pre_decoder_layernorm": str(config.embedding_norm),
            "has_post_decoder_layernorm": str(config.final_norm),
            "use_attention_linear_bias": str(config.position_embedding == "alibi"),
        }
        | config_ini_parts.prompt_keys(config.parts)
        | config_ini_parts.ia3_keys(config.parts)
        | config_ini_parts.adapter_keys(config.parts),
        **config_ini_parts.task_sections(config.parts),
    }


def values(sections: Mapping[str, IniKeys], folder: Path) -> dict[str, Any]:
    """GPTConfig's fields from [gpt] alone, with the defaults of FasterTransformer's runtime.

    What the original's file does not say at all, a separate output layer, is read from the names
    in the folder.
    """
    keys = sections["gpt"]
    values: dict[str, Any] = {}
    for key, field in _SIZES.items():
        default = {"start_id": 50256, "end_id": 50256, "max_pos_seq_len": 2048}.get(key)
        values[field] = keys.number(key, default)
    values["hidden_size"] = values["num_heads"] * values["head_size"]
    values["num_kv_heads"] = values["num_heads"]
    values["norm_eps"] = keys.real("layernorm_eps", 1e-6)
    placements = tuple(f"{placement}_layernorm" for placement in NORM_PLACEMENTS)
    placement = keys.text("layernorm_type", "pre_layernorm", placements)
    values["norm_placement"] = placement.removesuffix("_layernorm")
    values["embedding_norm"] = keys.boolean("has_pre_decoder_layernorm", False)
    values["final_norm"] = keys.boolean("has_post_decoder_layernorm", True)
    activation = keys.values.get("activation_type", "Gelu").lower()
    values["activation"], values["gated"] = _ACTIVATIONS.get(activation, (activation, False))
    learned = keys.boolean("has_positional_encoding", True)
    alibi = keys.boolean("use_attention_linear_bias", False)
    values["position_embedding"] = "alibi" if alibi else "learned" if learned else "none"
    values["tied_embeddings"] = not (folder / "model.lm_head.weight.bin").exists()
    if keys.values.get("model_variant", "").endswith("-post") and placement == "pre_layernorm":
        keys.problems.add(
            "residuals taken after the norm are not supported", got=keys.values["model_variant"]
        )
    if keys.boolean("has_adapters", False):
        keys.problems.add("adapter layers are not supported", got="has_adapters = True")
    return values | config_ini_parts.read_parts(sections, keys, keys)
