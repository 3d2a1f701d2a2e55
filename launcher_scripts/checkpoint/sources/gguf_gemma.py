"""Google's Gemmas in GGUF files in terms of Hugging Face's; see gguf_architectures."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Any

from numpy import ones

from launcher_scripts.checkpoint.sources import gguf_parameters as tensors
from launcher_scripts.checkpoint.sources.gguf_parameters import (
    LLAMA_NAMES,
    GGUFArchitecture,
    Model,
    common,
    count,
    experts,
    has_any,
    head_size,
    llama_config,
    silu_and_rms_norms,
)

GEMMA2_NAMES = {
    **LLAMA_NAMES,
    "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "layers.*.post_feedforward_layernorm",
}
_LAYER_INPUT_NAMES = {
    **GEMMA2_NAMES,
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "blk.*.inp_gate": "layers.*.per_layer_input_gate",
    "blk.*.proj": "layers.*.per_layer_projection",
    "blk.*.post_norm": "layers.*.post_per_layer_input_norm",
}
GEMMA3N_NAMES = {
    **_LAYER_INPUT_NAMES,
    "altup_proj": "altup_projections.#",
    "altup_unembd_proj": "altup_unembed_projections.#",
    "blk.*.altup_correct_scale.weight": "layers.*.altup.correct_output_scale",
    "blk.*.altup_correct_coef": "layers.*.altup.correction_coefs",
    "blk.*.altup_predict_coef": "layers.*.altup.prediction_coefs",
    "blk.*.altup_router": "layers.*.altup.modality_router",
    "blk.*.altup_router_norm": "layers.*.altup.router_norm",
    "blk.*.laurel_l": "layers.*.laurel.linear_left",
    "blk.*.laurel_r": "layers.*.laurel.linear_right",
    "blk.*.laurel_post_norm": "layers.*.laurel.post_laurel_norm",
}
GEMMA4_NAMES = {
    **_LAYER_INPUT_NAMES,
    "blk.*.layer_output_scale.weight": "layers.*.layer_scalar",
    "blk.*.ffn_gate_inp": "layers.*.router.proj",
    "blk.*.ffn_gate_inp.scale": "layers.*.router.scale",
    "blk.*.ffn_down_exps.scale": "layers.*.router.per_expert_scale",
    "blk.*.ffn_gate_up_exps": "layers.*.experts.#.gate_up_proj",
    "blk.*.ffn_down_exps": "layers.*.experts.#.down_proj",
    "blk.*.pre_ffw_norm_2": "layers.*.pre_feedforward_layernorm_2",
    "blk.*.post_ffw_norm_1": "layers.*.post_feedforward_layernorm_1",
    "blk.*.post_ffw_norm_2": "layers.*.post_feedforward_layernorm_2",
}


def _gemma(model: Model) -> dict[str, Any]:
    return {**llama_config(model), "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(model: Model) -> dict[str, Any]:
    fields = model.fields
    gemma = _gemma(model)
    return {
        **gemma,
        "query_pre_attn_scalar": _attention_size(gemma, layers_of_27b=46),
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.real("final_logit_softcapping", 30.0),
    }


def _gemma3(model: Model) -> dict[str, Any]:
    """Layers with a window rotate by a base of their own, unscaled."""
    fields = model.fields
    gemma = _gemma(model)
    pattern = fields.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        layers: dict[str, Any] = {"layer_types": kinds}
    else:
        layers = {"sliding_window_pattern": pattern}
    local = {"rope_theta": fields.real("rope.freq_base_swa", 10000.0)}
    return {
        **gemma,
        **layers,
        "query_pre_attn_scalar": _attention_size(gemma, layers_of_27b=62),
        "sliding_window": fields.get("attention.sliding_window", 0) or None,
        "final_logit_softcapping": fields.real("final_logit_softcapping", 0.0),
        "rope_parameters": {
            "full_attention": gemma["rope_parameters"],
            "sliding_attention": local,
        },
    }


def _attention_size(gemma: dict[str, Any], layers_of_27b: int) -> int:
    """Return the number whose root divides scores; llama.cpp recognizes the largest model by its
    depth."""
    if gemma["num_hidden_layers"] == layers_of_27b:
        return max(int(gemma["hidden_size"] // gemma["num_attention_heads"]), 1)
    return int(gemma["head_dim"])


def _layer_inputs(model: Model) -> dict[str, Any]:
    """Return the fields of a Gemma 3n or 4, whose layers have inputs or keys besides their own."""
    fields = model.fields
    shared = common(model, mixed=True)
    windowed = fields.get("attention.sliding_window_pattern")
    if not isinstance(windowed, list) or len(windowed) != shared["num_hidden_layers"]:
        text = "attention.sliding_window_pattern must say of each layer whether it has a window"
        fields.problems.add(text, got=windowed)
        windowed = [False] * shared["num_hidden_layers"]
    size = head_size(fields)
    if fields.size("rope.dimension_count", size) != size:
        fields.problems.add("rope.dimension_count must be attention.key_length", got=size)
    return {
        **shared,
        **silu_and_rms_norms(fields),
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        "sliding_window": fields.size("attention.sliding_window"),
        "final_logit_softcapping": fields.real("final_logit_softcapping", 0.0),
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": model.shapes.get("per_layer_token_embd.weight", (1,))[0],
        "num_kv_shared_layers": fields.get("attention.shared_kv_layers", 0),
    }


def _gemma3n(model: Model) -> dict[str, Any]:
    """A scale is how far above the mean an activation begins, not the share that it drops."""
    fields, raw = model.fields, _layer_inputs(model)
    scales = fields.get("activation_sparsity_scale", [-inf] * raw["num_hidden_layers"])
    local = {"rope_theta": fields.real("rope.freq_base_swa", 10000.0)}
    return {
        **raw,
        "intermediate_size": fields.get("feed_forward_length"),
        "activation_sparsity_pattern": [
            round(NormalDist().cdf(float(scale)), 7) for scale in scales
        ],
        "altup_num_inputs": fields.size("altup.num_inputs"),
        "altup_active_idx": fields.get("altup.active_idx", 0),
        "laurel_rank": model.shapes.get("blk.0.laurel_l.weight", (1,))[0],
        "rope_parameters": {
            "full_attention": tensors.rope_parameters(fields, raw["head_dim"], model.factors),
            "sliding_attention": local,
        },
    }


def _gemma4(model: Model) -> dict[str, Any]:
    """Pairs of a head that do not turn in layers without a window are divided by 1e30."""
    fields, raw = model.fields, _layer_inputs(model)
    size, local = raw["head_dim"], fields.size("attention.key_length_swa", raw["head_dim"])
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.size(name, local) != local:
            fields.problems.add(f"{name} must be attention.key_length_swa", got=local)
    full = [n for n, kind in enumerate(raw["layer_types"]) if kind == "full_attention"]
    groups = [
        fields.of_layer("attention.head_count_kv", n, raw["num_attention_heads"])
        for n in range(raw["num_hidden_layers"])
    ]
    factors = model.factors.get(tensors.ALWAYS, ones(size // 2))
    turning = int((factors == 1).sum())
    if len(factors) != size // 2 or not ((factors == 1) | (factors > 1e20)).all():
        fields.problems.add(f"{tensors.ALWAYS} must be 1, or 1e30 of pairs that do not turn")
    width = min(fields.of_layer("feed_forward_length", n, 1) for n in range(len(groups)))
    base = {"rope_theta": fields.real("rope.freq_base", 10000.0)}
    turns = {"rope_type": "proportional", "partial_rotary_factor": turning * 2 / size, **base}
    return {
        **raw,
        **({**experts(model), "num_experts": count(model)} if _has_router(model) else {}),
        "enable_moe_block": _has_router(model),
        "top_k_experts": fields.size("expert_used_count") if _has_router(model) else None,
        "head_dim": local,
        "global_head_dim": size,
        "num_key_value_heads": next((g for n, g in enumerate(groups) if n not in full), groups[0]),
        "num_global_key_value_heads": groups[full[0]] if full else None,
        "attention_k_eq_v": any(f"blk.{n}.attn_v.weight" not in model.shapes for n in full),
        "intermediate_size": width,
        "use_double_wide_mlp": width < raw["intermediate_size"],
        "rope_parameters": {
            "full_attention": turns,
            "sliding_attention": {"rope_theta": fields.real("rope.freq_base_swa", 10000.0)},
        },
    }


def _has_router(model: Model) -> bool:
    return has_any(model, "ffn_gate_inp.weight")


ARCHITECTURES = {
    "gemma": GGUFArchitecture("gemma", _gemma, LLAMA_NAMES, tensors.CENTRED),
    "gemma2": GGUFArchitecture("gemma2", _gemma2, GEMMA2_NAMES, tensors.CENTRED),
    "gemma3": GGUFArchitecture("gemma3_text", _gemma3, GEMMA2_NAMES, tensors.CENTRED),
    "gemma3n": GGUFArchitecture("gemma3n_text", _gemma3n, GEMMA3N_NAMES),
    "gemma4": GGUFArchitecture("gemma4_text", _gemma4, GEMMA4_NAMES),
}
