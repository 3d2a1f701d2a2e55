"""Where the tensors of hybrids lie in Hugging Face's checkpoints; see gpt_dialects.py.

Layers of these have Mamba-2, a gated delta net or a short convolution instead of attention, or
beside it.
"""

from __future__ import annotations

from launcher_scripts.models.family import Source

_EXPERT_BIAS = "layers.*.mlp.router.expert_bias"


def _attention(stem: str, out: str) -> dict[str, Source]:
    """Queries, keys and values, and the output projection."""
    return {
        "layers.*.attention.query_key_value": Source(
            tuple(f"{stem}.{part}_proj" for part in "qkv"), "heads_side_by_side"
        ),
        "layers.*.attention.dense": Source((f"{stem}.{out}",), "transposed"),
    }


def _mamba(stem: str) -> dict[str, Source]:
    """A branch of Mamba-2."""
    vectors = {
        f"layers.*.mamba.{name}": Source((f"{stem}.{name}",), "summands")
        for name in ("A_log", "dt_bias", "D")
    }
    return vectors | {
        "layers.*.mamba.in_proj": Source((f"{stem}.in_proj",), "transposed"),
        "layers.*.mamba.conv": Source((f"{stem}.conv1d",), "conv_taps"),
        "layers.*.mamba.norm": Source((f"{stem}.norm",)),
        "layers.*.mamba.out_proj": Source((f"{stem}.out_proj",), "transposed"),
    }


def _delta(stem: str, in_projs: tuple[str, ...], layout: str) -> dict[str, Source]:
    """A gated delta net."""
    return {
        "layers.*.delta.in_proj": Source(tuple(f"{stem}.{name}" for name in in_projs), layout),
        "layers.*.delta.conv": Source((f"{stem}.conv1d",), "conv_taps"),
        "layers.*.delta.A_log": Source((f"{stem}.A_log",), "summands"),
        "layers.*.delta.dt_bias": Source((f"{stem}.dt_bias",), "summands"),
        "layers.*.delta.norm": Source((f"{stem}.norm",)),
        "layers.*.delta.out_proj": Source((f"{stem}.out_proj",), "transposed"),
    }


def _mlp(served: str, reference: str, **names: str) -> dict[str, Source]:
    return {
        f"layers.*.mlp.{served}{name}": Source((f"{reference}.{key}",), "transposed")
        for name, key in names.items()
    }


_GATED = {
    "dense_h_to_4h": "gate_proj",
    "dense_h_to_4h_2": "up_proj",
    "dense_4h_to_h": "down_proj",
}
_PLAIN = {"dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_MIXER = "layers.*.mixer"
NEMOTRON_H = {
    "wte": Source(("embeddings.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "final_layernorm": Source(("norm_f",)),
    "layers.*.input_layernorm": Source(("layers.*.norm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.norm",)),
    **_attention(_MIXER, "o_proj"),
    **_mamba(_MIXER),
    **_mlp("", _MIXER, **_PLAIN),
    **_mlp("shared_expert.", f"{_MIXER}.shared_experts", **_PLAIN),
    **_mlp("experts.#.", f"{_MIXER}.experts.#", **_PLAIN),
    "layers.*.mlp.router": Source((f"{_MIXER}.gate",), "transposed"),
    _EXPERT_BIAS: Source((f"{_MIXER}.gate.e_score_correction_bias",), "summands"),
    "layers.*.mlp.latent_in": Source((f"{_MIXER}.fc1_latent_proj",), "transposed"),
    "layers.*.mlp.latent_out": Source((f"{_MIXER}.fc2_latent_proj",), "transposed"),
}
_MAMBA = _mamba("layers.*.mamba")
BAMBA = {
    **_MAMBA,
    "final_layernorm": Source(("final_layernorm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.pre_ff_layernorm",)),
    **_mlp("", "layers.*.feed_forward", **_GATED),
}
# Of a Granite without experts, what would be a shared one is the MLP.
GRANITE_DENSE = {
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.shared_mlp.input_linear",), "first_half"),
    "layers.*.mlp.dense_h_to_4h_2": Source(("layers.*.shared_mlp.input_linear",), "second_half"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.shared_mlp.output_linear",), "transposed"),
}
_LINEAR = "layers.*.linear_attn"
_QUERY = "layers.*.self_attn.q_proj"
GATED_ATTENTION = {
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "gated_heads_side_by_side"
    ),
    "layers.*.attention.gate": Source((_QUERY,), "second_of_two_heads"),
}
QWEN3_NEXT = {
    **GATED_ATTENTION,
    **_delta(_LINEAR, ("in_proj_qkvz", "in_proj_ba"), "delta_of_key_heads"),
}
QWEN3_5 = {
    **GATED_ATTENTION,
    **_delta(_LINEAR, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "delta_side_by_side"),
}
_FEED_FORWARD = {"dense_h_to_4h": "w1", "dense_h_to_4h_2": "w3", "dense_4h_to_h": "w2"}
LFM2 = {
    "final_layernorm": Source(("embedding_norm",)),
    "layers.*.input_layernorm": Source(("layers.*.operator_norm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.ffn_norm",)),
    **_attention("layers.*.self_attn", "out_proj"),
    "layers.*.attention.query_norm": Source(("layers.*.self_attn.q_layernorm",)),
    "layers.*.attention.key_norm": Source(("layers.*.self_attn.k_layernorm",)),
    **_mlp("", "layers.*.feed_forward", **_FEED_FORWARD),
    "layers.*.short_conv.in_proj": Source(("layers.*.conv.in_proj",), "transposed"),
    "layers.*.short_conv.conv": Source(("layers.*.conv.conv",), "conv_taps"),
    "layers.*.short_conv.out_proj": Source(("layers.*.conv.out_proj",), "transposed"),
}
_KIMI = "layers.*.self_attn"
_SPARSE = "layers.*.block_sparse_moe"
_EXPERT = {"dense_h_to_4h": "w1", "dense_h_to_4h_2": "w3", "dense_4h_to_h": "w2"}
KIMI_LINEAR = {
    "layers.*.kimi_delta.in_proj": Source(
        tuple(f"{_KIMI}.{part}_proj" for part in "qkvb"), "transposed_columns"
    ),
    "layers.*.kimi_delta.conv": Source(
        tuple(f"{_KIMI}.{part}_conv1d" for part in "qkv"), "conv_taps_side_by_side"
    ),
    **{
        f"layers.*.kimi_delta.{name}_{side}": Source((f"{_KIMI}.{key}_proj",), "transposed")
        for name, letter in (("decay", "f"), ("gate", "g"))
        for side, key in (("down", f"{letter}_a"), ("up", f"{letter}_b"))
    },
    "layers.*.kimi_delta.dt_bias": Source((f"{_KIMI}.dt_bias",), "summands"),
    "layers.*.kimi_delta.A_log": Source((f"{_KIMI}.A_log",), "summands"),
    "layers.*.kimi_delta.norm": Source((f"{_KIMI}.o_norm",)),
    "layers.*.kimi_delta.out_proj": Source((f"{_KIMI}.o_proj",), "transposed"),
    "layers.*.mlp.router": Source((f"{_SPARSE}.gate",), "transposed"),
    _EXPERT_BIAS: Source((f"{_SPARSE}.gate.e_score_correction_bias",), "summands"),
    **_mlp("shared_expert.", f"{_SPARSE}.shared_experts", **_GATED),
    **_mlp("experts.#.", f"{_SPARSE}.experts.#", **_EXPERT),
}
# transformers saves the MLPs of layers without experts by the name of the others.
KIMI_LINEAR_SAVED = _mlp("", _SPARSE, **_GATED)
DIALECTS: dict[str, dict[str, Source]] = {
    "nemotron_h": NEMOTRON_H,
    "bamba": BAMBA,
    "granitemoehybrid": _MAMBA,
    "granitemoehybrid_dense": GRANITE_DENSE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "lfm2": LFM2,
    "gemma4": {"layers.*.scale": Source(("layers.*.layer_scalar",))},
    "kimi_linear": KIMI_LINEAR,
    "kimi_linear_saved": KIMI_LINEAR_SAVED,
}
