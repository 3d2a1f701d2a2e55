"""GGUF's architectures with latent attention, and with layers of several kinds.

The kinds of a hybrid's layers are those of their tensors. Each row is as in gguf_architectures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.sources import gguf_parameters as tensors
from launcher_scripts.checkpoint.sources.gguf_parameters import (
    GGUFArchitecture,
    Heads,
    Joined,
    Model,
    Restored,
    common,
    has_any,
    head_size,
    rotary,
    silu_and_rms_norms,
)

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of the functions of routers


def _has(model: Model, layer: int, part: str) -> bool:
    return f"blk.{layer}.{part}" in model.shapes


def _rows(model: Model, part: str) -> int:
    """Rows of such a tensor in the first layer that has one."""
    shapes = (shape for name, shape in model.shapes.items() if name.endswith(f".{part}.weight"))
    return int(next(shapes, (1,))[0])


def _kinds(
    model: Model, raw: Mapping[str, Any], signs: Mapping[str, str], otherwise: str
) -> list[str]:
    """The kind of each layer, by the first of the tensors that it has."""
    return [
        next((kind for part, kind in signs.items() if _has(model, layer, part)), otherwise)
        for layer in range(raw["num_hidden_layers"])
    ]


def _ssm(model: Model) -> tuple[int, int]:
    """Heads of Mamba-2, and the size of each."""
    heads, inner = model.fields.size("ssm.time_step_rank"), model.fields.size("ssm.inner_size")
    if inner % heads:
        model.fields.problems.add("ssm.inner_size is not a number of heads", got=(inner, heads))
    return heads, max(inner // heads, 1)


def _nemotron_h(model: Model) -> dict[str, Any]:
    fields = model.fields
    raw = common(model, mixed=True)
    for name in ("rope.dimension_count", "rope.freq_base"):
        fields.get(name, None)  # attention does not turn
    signs = {
        "ssm_in.weight": "linear_attention",
        "attn_q.weight": "full_attention",
        "ffn_gate_inp.weight": "moe",
    }
    heads, size = _ssm(model)
    kinds = _kinds(model, raw, signs, "mlp")
    result = {
        **raw,
        "layers_block_type": kinds,
        "head_dim": head_size(fields),
        "layer_norm_epsilon": fields.real("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "ssm_state_size": fields.size("ssm.state_size"),
        "n_groups": fields.size("ssm.group_count"),
        "conv_kernel": fields.size("ssm.conv_kernel"),
        "use_conv_bias": has_any(model, "ssm_conv1d.bias"),
        "use_bias": has_any(model, "ssm_in.bias"),
    }
    if "moe" not in kinds:
        return result
    if "mlp" in kinds:
        result["intermediate_size"] = _rows(model, "ffn_up")
    return result | {
        **_routing(model, (_SIGMOID,)),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.size("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.get("moe_latent_size", None),
    }


def _routing(model: Model, functions: Sequence[int]) -> dict[str, Any]:
    """Fields of routers as DeepSeek has them.  functions: those that the model type has"""
    fields = model.fields
    function = fields.get("expert_gating_func", functions[0])
    if function not in functions:
        text = "expert_gating_func is not supported"
        fields.problems.add(text, got=function, choices=functions)
    groups = fields.get("expert_group_count", 0) or 1
    return {
        "n_routed_experts": fields.size("expert_count"),
        "n_shared_experts": fields.get("expert_shared_count", 0) or None,
        "num_experts_per_tok": fields.size("expert_used_count"),
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "routed_scaling_factor": fields.real("expert_weights_scale", 1.0) or 1.0,
        "n_group": groups,
        "topk_group": fields.get("expert_group_used_count", 0) or groups,
    }


def _mamba(model: Model) -> dict[str, Any]:
    """Mamba-2's sizes by the names of Bamba."""
    fields = model.fields
    heads, size = _ssm(model)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_n_groups": fields.size("ssm.group_count"),
        "mamba_conv_bias": has_any(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_any(model, "ssm_in.bias"),
    }


def _expanded(model: Model, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Mamba-2 whose inner size is a multiple of the model's width."""
    mamba, hidden = _mamba(model), raw["hidden_size"]
    if (inner := mamba["mamba_n_heads"] * mamba["mamba_d_head"]) % hidden:
        model.fields.problems.add("ssm.inner_size is not a multiple of embedding_length", got=inner)
    return {**mamba, "mamba_expand": max(inner // hidden, 1)}


def _granite_hybrid(model: Model) -> dict[str, Any]:
    fields = model.fields
    raw = rotary(model, mixed=True)
    turns = fields.get("rope.scaling.finetuned", True)
    experts = has_any(model, "ffn_gate_inp.weight")
    result = {
        **raw,
        **_expanded(model, raw),
        "layer_types": _kinds(model, raw, {"ssm_in.weight": "mamba"}, "attention"),
        "position_embedding_type": "rope" if turns else "nope",
        **silu_and_rms_norms(fields),
        "attention_multiplier": fields.real("attention.scale", 0.0) or 1 / sqrt(raw["head_dim"]),
        "embedding_multiplier": fields.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.real("logit_scale", 0.0) or 1.0,
        "shared_intermediate_size": _rows(model, "ffn_up_shexp" if experts else "ffn_up"),
        "num_local_experts": fields.size("expert_count") if experts else 0,
    }
    fields.get("expert_shared_feed_forward_length", None)
    if experts:
        result["num_experts_per_tok"] = fields.size("expert_used_count")
    else:
        for name in ("expert_count", "expert_used_count"):
            fields.get(name, 0)
    return result


def _bamba(model: Model) -> dict[str, Any]:
    """Bamba, whose classes turn half of a head."""
    fields = model.fields
    raw = rotary(model, mixed=True)
    rope = raw["rope_parameters"]
    if rope["partial_rotary_factor"] != 0.5:
        fields.problems.add(
            "rope.dimension_count of a Bamba is half of a head",
            got=rope["partial_rotary_factor"] * raw["head_dim"],
            choices=(raw["head_dim"] // 2,),
        )
    attention = _kinds(model, raw, {"ssm_in.weight": ""}, "attention")
    return {
        **raw,
        **_expanded(model, raw),
        "attn_layer_indices": [layer for layer, kind in enumerate(attention) if kind],
        **silu_and_rms_norms(fields),
    }


def _falcon_h1(model: Model) -> dict[str, Any]:
    """Falcon-H1: its multipliers are in the weights; a norm of Mamba's comes after its gate."""
    fields = model.fields
    raw = rotary(model)
    mamba = _mamba(model)
    return {
        **raw,
        **mamba,
        "mamba_d_ssm": mamba["mamba_n_heads"] * mamba["mamba_d_head"],
        "mamba_rms_norm": has_any(model, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **silu_and_rms_norms(fields),
    }


def _falcon_names(model: Model) -> dict[str, str]:
    """The converter writes a name without its end."""
    return {
        f"blk.{layer}.ffn_norm": f"layers.{layer}.pre_ff_layernorm.weight"
        for layer in range(model.fields.size("block_count"))
    }


def _lfm2(model: Model) -> dict[str, Any]:
    fields = model.fields
    raw = rotary(model, mixed=True)
    return {
        **raw,
        "layer_types": _kinds(model, raw, {"shortconv.conv.weight": "conv"}, "full_attention"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": fields.size("shortconv.l_cache"),
        "conv_bias": has_any(model, "shortconv.in_proj.bias"),
        "norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
    }


_LFM2_MOE_NAMES = {
    **tensors.LFM2_NAMES,
    "blk.*.ffn_gate_inp": "layers.*.feed_forward.gate",
    "blk.*.exp_probs_b.bias": "layers.*.feed_forward.expert_bias",
    **{
        f"blk.*.ffn_{part}_exps": f"layers.*.feed_forward.experts.#.{name}"
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}


def _lfm2_moe(model: Model) -> dict[str, Any]:
    fields = model.fields
    if fields.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        fields.problems.add("expert_gating_func must be a sigmoid's", choices=(_SIGMOID,))
    return {
        **_lfm2(model),
        "num_dense_layers": fields.get("leading_dense_block_count", 0),
        "num_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "norm_topk_prob": fields.get("expert_weights_norm", True),
        "routed_scaling_factor": fields.real("expert_weights_scale", 1.0) or 1.0,
        "use_expert_bias": has_any(model, "exp_probs_b.bias"),
    }


def _qwen3next(model: Model) -> dict[str, Any]:
    """Qwen3-Next and Qwen 3.5, of whose rotary sections a text has three equal positions."""
    fields = model.fields
    fields.get("rope.dimension_sections", None)
    raw = rotary(model, mixed=True)
    heads, size = _ssm(model)
    fields.get("full_attention_interval", None)  # the tensors show it
    experts: dict[str, Any] = {}
    if has_any(model, "ffn_gate_inp.weight"):
        experts = {
            "num_experts": fields.size("expert_count"),
            "num_experts_per_tok": fields.size("expert_used_count"),
            "moe_intermediate_size": fields.size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": fields.size(
                "expert_shared_feed_forward_length", _rows(model, "ffn_up_shexp")
            ),
        }
    return {
        **raw,
        **experts,
        "layer_types": _kinds(
            model, raw, {"ssm_conv1d.weight": "linear_attention"}, "full_attention"
        ),
        **silu_and_rms_norms(fields),
        "linear_conv_kernel_dim": fields.size("ssm.conv_kernel"),
        "linear_key_head_dim": fields.size("ssm.state_size"),
        "linear_num_key_heads": fields.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size,
    }


def _deepseek2(model: Model) -> dict[str, Any]:
    """Latent attention; files of before 2025 say the heads' sizes, later ones the latent's, too.

    The sigmoid's routers have the bias of DeepSeek-V3; a file without experts is a Youtu.
    """
    fields = model.fields
    raw = common(model)
    heads, latent = raw["num_attention_heads"], fields.size("attention.kv_lora_rank")
    later = fields.get("attention.key_length_mla", None) is not None
    key, value = (
        fields.size(f"attention.{part}_length{'_mla' if later else ''}")
        for part in ("key", "value")
    )
    turns = fields.size("rope.dimension_count")
    if later:
        sizes = fields.get("attention.key_length", None), fields.get("attention.value_length", None)
        if sizes not in ((None, None), (latent + turns, latent)):
            text = "attention.key_length and value_length are not of the latent vector"
            fields.problems.add(text, got=sizes, choices=[(latent + turns, latent)])
    rope = tensors.rope_parameters(fields, turns, model.factors)
    growth = 10 * fields.real("rope.scaling.yarn_log_multiplier", 0.0)
    if growth and rope.get("rope_type") == "yarn":
        rope |= {"mscale": growth, "mscale_all_dim": growth}
    result = {
        **raw,
        "num_key_value_heads": heads,
        "kv_lora_rank": latent,
        "q_lora_rank": fields.get("attention.q_lora_rank", None),
        "qk_nope_head_dim": max(key - turns, 1),
        "qk_rope_head_dim": turns,
        "v_head_dim": value,
        "rope_parameters": rope,
        **silu_and_rms_norms(fields),
        "attention_bias": has_any(model, "attn_kv_a_mqa.bias"),
    }
    if _is_dense(model):
        for name in (
            *("leading_dense_block_count", "expert_feed_forward_length"),
            *("expert_shared_count", "expert_weights_scale", "expert_weights_norm"),
        ):
            fields.get(name, None)
        return result
    routing = _routing(model, (_SIGMOID,) if _is_biased(model) else (_SOFTMAX,))
    if routing["norm_topk_prob"] and not _is_biased(model):
        fields.problems.add("expert_weights_norm of a router with softmax is not supported")
    if not _is_biased(model):
        routing["topk_method"] = "group_limited_greedy" if routing["n_group"] > 1 else "greedy"
    return result | {
        **routing,
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
    }


def _is_dense(model: Model) -> bool:
    return not has_any(model, "ffn_gate_inp.weight")


def _is_biased(model: Model) -> bool:
    return has_any(model, "exp_probs_b.bias")


def _deepseek_row(model: Model) -> GGUFArchitecture | None:
    return _YOUTU if _is_dense(model) else _DEEPSEEK3 if _is_biased(model) else None


# The converter stores -exp(A_log) and vectors as columns, rows of groups, or taps without an axis.
_LOG = Restored(lambda values, _: np.log(-values.reshape(-1)), lambda shape: (int(np.prod(shape)),))
_VECTOR = Restored(lambda values, _: values.reshape(-1), lambda shape: (int(np.prod(shape)),))
_TAPS = Restored(lambda values, _: values[:, None], lambda shape: (shape[0], 1, *shape[1:]))
_CONV = {"blk.*.shortconv.conv.weight": _TAPS}
_SSM = {
    "blk.*.ssm_a": _LOG,
    "blk.*.ssm_d": _VECTOR,
    "blk.*.ssm_norm": _VECTOR,
    "blk.*.ssm_conv1d.weight": _TAPS,
}


def _untiled(
    values: NDArray[Any], heads: Heads, axis: int = 0, mixed: bool = False
) -> NDArray[Any]:
    """Value heads in the order (key head, its value heads), of which the converter swaps both.

    mixed: queries and keys come before them
    """
    keys, count, size = heads.delta
    rows = np.moveaxis(values, axis, 0)
    first = len(rows) - size if mixed else 0
    tiled = rows[first:].reshape(count // keys, keys, -1, *rows.shape[1:]).swapaxes(0, 1)
    full = np.concatenate((rows[:first], tiled.reshape(-1, *rows.shape[1:])))
    result: NDArray[Any] = np.moveaxis(full, 0, axis)
    return result


def _keys_and_values(values: Sequence[NDArray[Any]], _raw: Mapping[str, Any]) -> NDArray[Any]:
    """[heads, latent, key] and [heads, value, latent] as rows (head, [key, value])."""
    keys, others = values
    heads = np.concatenate((keys.swapaxes(1, 2), others), axis=1)
    rows: NDArray[Any] = heads.reshape(-1, heads.shape[2])
    return rows


def _by_key_head(values: Sequence[NDArray[Any]], raw: Mapping[str, Any]) -> NDArray[Any]:
    """Rows [queries, keys, values] and z of all heads as rows (key head, [those of each])."""
    mixed, gate = values
    heads, columns = raw["linear_num_key_heads"], mixed.shape[1]
    size = heads * raw["linear_key_head_dim"]
    parts = (*np.split(mixed, [size, 2 * size]), gate)
    rows = np.concatenate([part.reshape(heads, -1, columns) for part in parts], axis=1)
    result: NDArray[Any] = rows.reshape(-1, columns)
    return result


def _sum_of_rows(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(shape[0] for shape in shapes)


_KV_UP = Joined(
    ("blk.*.attn_k_b.weight", "blk.*.attn_v_b.weight"),
    _keys_and_values,
    lambda shapes: shapes[0][0] * (shapes[0][-1] + shapes[1][1]),
)
_DELTA_IN = Joined(("blk.*.attn_qkv.weight", "blk.*.attn_gate.weight"), _by_key_head, _sum_of_rows)
_GATE_UP = {
    f"layers.*.shared_mlp.input_linear.weight{mark}": Joined(
        (f"blk.*.ffn_gate{end}.weight", f"blk.*.ffn_up{end}.weight"),
        lambda values, _: np.concatenate(values),
        _sum_of_rows,
    )
    for mark, end in (("", ""), ("#", "_shexp"))
}
_LATENT = {"layers.*.self_attn.kv_b_proj.weight": _KV_UP}
_YOUTU = GGUFArchitecture("youtu", _deepseek2, tensors.DEEPSEEK2_NAMES, joined=_LATENT)
_DEEPSEEK3 = GGUFArchitecture("deepseek_v3", _deepseek2, tensors.DEEPSEEK2_NAMES, joined=_LATENT)
_BAMBA = GGUFArchitecture("bamba", _bamba, tensors.BAMBA_NAMES, {**_SSM, **tensors.HALVES})
_NEMOTRON = GGUFArchitecture("nemotron_h", _nemotron_h, tensors.NEMOTRON_H_NAMES, _SSM)
_QWEN = {
    "blk.*.ffn_gate_inp_shexp": tensors.ONE_ROW,
    **{
        f"{name}.weight": tensors.LESS_ONE
        for name in (
            *("output_norm", "blk.*.attn_norm", "blk.*.post_attention_norm"),
            *("blk.*.attn_q_norm", "blk.*.attn_k_norm"),
        )
    },
}
_QWEN35 = {
    **_QWEN,
    "blk.*.ssm_a": Restored(lambda values, heads: _untiled(np.log(-values), heads)),
    "blk.*.ssm_conv1d.weight": Restored(
        lambda values, heads: _untiled(values, heads, mixed=True)[:, None], _TAPS.shape
    ),
    "blk.*.attn_qkv": Restored(lambda values, heads: _untiled(values, heads, mixed=True)),
    "blk.*.ssm_out": Restored(lambda values, heads: _untiled(values, heads, axis=1)),
    **dict.fromkeys(
        ("blk.*.ssm_dt.bias", "blk.*.attn_gate", "blk.*.ssm_beta", "blk.*.ssm_alpha"),
        Restored(_untiled),
    ),
}

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "deepseek2": GGUFArchitecture(
        "deepseek_v2", _deepseek2, tensors.DEEPSEEK2_NAMES, variant=_deepseek_row, joined=_LATENT
    ),
    "qwen3next": GGUFArchitecture(
        "qwen3_next",
        _qwen3next,
        tensors.QWEN3_NEXT_NAMES,
        {**_QWEN, "blk.*.ssm_a": _LOG, "blk.*.ssm_conv1d.weight": _TAPS},
        joined={"layers.*.linear_attn.in_proj_qkvz.weight": _DELTA_IN},
    ),
    **{
        name: GGUFArchitecture(model_type, _qwen3next, tensors.QWEN3_5_NAMES, _QWEN35)
        for name, model_type in (("qwen35", "qwen3_5_text"), ("qwen35moe", "qwen3_5_moe_text"))
    },
    "granitehybrid": GGUFArchitecture(
        "granitemoehybrid",
        _granite_hybrid,
        tensors.GRANITE_HYBRID_NAMES,
        {**_SSM, **tensors.HALVES},
        variant=lambda model: _BAMBA if _is_bamba(model) else None,
        joined=_GATE_UP,
    ),
    "falcon-h1": GGUFArchitecture(
        "falcon_h1", _falcon_h1, tensors.BAMBA_NAMES, _SSM, _falcon_names
    ),
    "lfm2": GGUFArchitecture("lfm2", _lfm2, tensors.LFM2_NAMES, _CONV),
    "lfm2moe": GGUFArchitecture("lfm2_moe", _lfm2_moe, _LFM2_MOE_NAMES, _CONV),
}


def _is_bamba(model: Model) -> bool:
    """Of hybrids that turn, the converter writes Bamba alone."""
    turns = model.fields.get("rope.scaling.finetuned", True)
    return bool(turns) and has_any(model, "ssm_in.weight")
