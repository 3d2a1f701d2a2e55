"""Names of a GPT's tensors in NeMo's checkpoints, classic and Megatron-LM core.

Keys are as in the state dict, without the common prefix ("model.language_model." or "model.").
Variants of a dialect hold only the rows in which they differ. T5's table has "nemo" and some of its
variants, too.
"""

from __future__ import annotations

from launcher_scripts.models.family import Source

_LAYER = "encoder.layers.*"
_CORE = "decoder.layers.*"

NEMO = {
    "wte": Source(("embedding.word_embeddings.weight",)),
    "wpe": Source(("embedding.position_embeddings.weight",)),
    "lm_head.weight": Source(("output_layer.weight",)),
    "final_layernorm": Source(("encoder.final_layernorm",)),
    "layers.*.input_layernorm": Source((f"{_LAYER}.input_layernorm",)),
    "layers.*.attention.query_key_value": Source(
        (f"{_LAYER}.self_attention.query_key_value",), "qkv_of_heads"
    ),
    "layers.*.attention.dense": Source((f"{_LAYER}.self_attention.dense",), "transposed"),
    "layers.*.post_attention_layernorm": Source((f"{_LAYER}.post_attention_layernorm",)),
    "layers.*.mlp.dense_h_to_4h": Source((f"{_LAYER}.mlp.dense_h_to_4h",), "transposed"),
    "layers.*.mlp.dense_h_to_4h_2": Source((f"{_LAYER}.mlp.dense_h_to_4h_2",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source((f"{_LAYER}.mlp.dense_4h_to_h",), "transposed"),
}

# activation fast-geglu, fast-swiglu, fast-reglu: one matrix holds both halves.
NEMO_FUSED_GATE = {
    "layers.*.mlp.dense_h_to_4h": Source((f"{_LAYER}.mlp.dense_h_to_4h",), "first_half"),
    "layers.*.mlp.dense_h_to_4h_2": Source((f"{_LAYER}.mlp.dense_h_to_4h",), "second_half"),
}

# megatron_legacy
NEMO_LEGACY = {
    "layers.*.attention.query_key_value": Source(
        (f"{_LAYER}.self_attention.query_key_value",), "qkv_in_blocks"
    ),
}

# Megatron-LM's checkpoint version 1
MEGATRON_INNERMOST = {
    "layers.*.attention.query_key_value": Source(
        (f"{_LAYER}.self_attention.query_key_value",), "qkv_innermost"
    ),
}

# Megatron-LM's heads that share keys and values
MEGATRON_GROUPS = {
    "layers.*.attention.query_key_value": Source(
        (f"{_LAYER}.self_attention.query_key_value",), "qkv_of_groups"
    ),
}

# MLPs: a layer's own, and with experts (# is an expert's number) each of these.
_MLPS = {
    "mlp": "mlp",
    "mlp.experts.#": "mlp.experts.experts.#",
    "mlp.shared_expert": "mlp.shared_experts",
}

# Norms inside of Transformer Engine's linears.
MCORE = {
    "wte": Source(("embedding.word_embeddings.weight",)),
    "wpe": Source(("embedding.position_embeddings.weight",)),
    "lm_head.weight": Source(("output_layer.weight",)),
    "final_layernorm": Source(("decoder.final_layernorm",)),
    "layers.*.input_layernorm.weight": Source(
        (f"{_CORE}.self_attention.linear_qkv.layer_norm_weight",)
    ),
    "layers.*.input_layernorm.bias": Source(
        (f"{_CORE}.self_attention.linear_qkv.layer_norm_bias",)
    ),
    "layers.*.attention.query_key_value": Source(
        (f"{_CORE}.self_attention.linear_qkv",), "qkv_of_groups"
    ),
    "layers.*.attention.sinks": Source(
        (f"{_CORE}.self_attention.core_attention.softmax_offset",), "flattened"
    ),
    "layers.*.attention.query_norm": Source((f"{_CORE}.self_attention.q_layernorm",)),
    "layers.*.attention.key_norm": Source((f"{_CORE}.self_attention.k_layernorm",)),
    "layers.*.attention.gate": Source((f"{_CORE}.self_attention.linear_qkv",), "gates_of_groups"),
    "layers.*.attention.dense": Source((f"{_CORE}.self_attention.linear_proj",), "transposed"),
    "layers.*.post_attention_layernorm.weight": Source(
        (f"{_CORE}.mlp.linear_fc1.layer_norm_weight",)
    ),
    "layers.*.post_attention_layernorm.bias": Source((f"{_CORE}.mlp.linear_fc1.layer_norm_bias",)),
    "layers.*.mlp.router": Source((f"{_CORE}.mlp.router",), "transposed"),
    "layers.*.mlp.latent_in": Source((f"{_CORE}.mlp.fc1_latent_proj",), "transposed"),
    "layers.*.mlp.latent_out": Source((f"{_CORE}.mlp.fc2_latent_proj",), "transposed"),
    "layers.*.mlp.router.expert_bias": Source((f"{_CORE}.mlp.router.expert_bias",), "summands"),
    "layers.*.mlp.shared_expert_gate.weight": Source(
        (f"{_CORE}.mlp.shared_experts.gate_weight",), "transposed"
    ),
} | {
    f"layers.*.{mlp}.{name}": Source((f"{_CORE}.{core}.{key}",), "transposed")
    for mlp, core in _MLPS.items()
    for name, key in (("dense_h_to_4h", "linear_fc1"), ("dense_4h_to_h", "linear_fc2"))
}

MCORE_FUSED_GATE = {
    f"layers.*.{mlp}.{name}": Source((f"{_CORE}.{core}.linear_fc1",), layout)
    for mlp, core in _MLPS.items()
    for name, layout in (("dense_h_to_4h", "first_half"), ("dense_h_to_4h_2", "second_half"))
}

# The parts of fused layers that the core's canonical LoRA names.
MCORE_SPLIT_ATTENTION = {
    "layers.*.attention.query_key_value": Source(
        tuple(f"{_CORE}.self_attention.linear_{part}" for part in "qkv"), "heads_side_by_side"
    ),
}
MCORE_SPLIT_GATE = {
    "layers.*.mlp.dense_h_to_4h": Source((f"{_CORE}.mlp.linear_fc1_gate",), "transposed"),
    "layers.*.mlp.dense_h_to_4h_2": Source((f"{_CORE}.mlp.linear_fc1_up",), "transposed"),
}

# Norms as modules of their own (the core's local layer specification).
MCORE_LOCAL = {
    f"layers.*.{name}.{part}": Source((f"{_CORE}.{key}.{part}",))
    for name, key in (
        ("input_layernorm", "input_layernorm"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
    )
    for part in ("weight", "bias")
}

# Latent attention; its linears behind norms have these inside, as Transformer Engine's do.
MCORE_LATENT = {
    "layers.*.input_layernorm.weight": Source((f"{_CORE}.input_layernorm.weight",)),
    "layers.*.attention.query": Source(
        (f"{_CORE}.self_attention.linear_q_proj",), "interleaved_rope_of_heads"
    ),
    "layers.*.attention.query_down": Source(
        (f"{_CORE}.self_attention.linear_q_down_proj",), "transposed"
    ),
    "layers.*.attention.query_latent_norm.weight": Source(
        (f"{_CORE}.self_attention.linear_q_up_proj.layer_norm_weight",)
    ),
    "layers.*.attention.query_up": Source(
        (f"{_CORE}.self_attention.linear_q_up_proj",), "interleaved_rope_of_heads"
    ),
    "layers.*.attention.kv_down": Source(
        (f"{_CORE}.self_attention.linear_kv_down_proj",), "interleaved_rope_of_latent"
    ),
    "layers.*.attention.kv_latent_norm.weight": Source(
        (f"{_CORE}.self_attention.linear_kv_up_proj.layer_norm_weight",)
    ),
    "layers.*.attention.kv_up": Source(
        (f"{_CORE}.self_attention.linear_kv_up_proj",), "transposed"
    ),
}
# The same with norms as modules of their own.
MCORE_LATENT_LOCAL = {
    f"layers.*.attention.{name}_latent_norm.weight": Source(
        (f"{_CORE}.self_attention.{key}_layernorm.weight",)
    )
    for name, key in (("query", "q"), ("kv", "kv"))
}

_MIXER, _ATTENTION = f"{_CORE}.mixer", f"{_CORE}.self_attention"
# Layers of several kinds, under the names that core_layers.py gives them.
MCORE_BRANCHES = {
    **MCORE_LOCAL,
    "layers.*.mamba.in_proj": Source((f"{_MIXER}.in_proj",), "transposed"),
    "layers.*.mamba.conv": Source((f"{_MIXER}.conv1d",), "conv_taps"),
    "layers.*.mamba.norm": Source((f"{_MIXER}.norm",)),
    "layers.*.mamba.out_proj": Source((f"{_MIXER}.out_proj",), "transposed"),
    "layers.*.delta.in_proj": Source((f"{_ATTENTION}.in_proj",), "transposed"),
    "layers.*.delta.conv": Source((f"{_ATTENTION}.conv1d",), "conv_taps"),
    "layers.*.delta.norm": Source((f"{_ATTENTION}.out_norm",)),
    "layers.*.delta.out_proj": Source((f"{_ATTENTION}.out_proj",), "transposed"),
    "layers.*.attention.linear": Source((_ATTENTION,), "transposed"),
    "layers.*.mlp.linear": Source((f"{_CORE}.mlp",), "transposed"),
} | {
    f"layers.*.{branch}.{name}": Source((f"{module}.{name}",), "summands")
    for branch, module, names in (
        ("mamba", _MIXER, ("A_log", "dt_bias", "D")),
        ("delta", _ATTENTION, ("A_log", "dt_bias")),
    )
    for name in names
}

# With experts Transformer Engine has no linear for the norm before them to be inside of.
MCORE_EXPERTS = {
    name: source for name, source in MCORE_LOCAL.items() if ".post_attention_layernorm." in name
}

# The dialects of layers with experts alone.
OF_EXPERTS = ("mcore_experts", "mcore_experts_plus_one")

_SCALES = (
    "final_layernorm.weight",
    "layers.*.input_layernorm.weight",
    "layers.*.post_attention_layernorm.weight",
    "layers.*.attention.query_norm.weight",
    "layers.*.attention.key_norm.weight",
    "layers.*.delta.norm.weight",
)


def _plus_one(table: dict[str, Source]) -> dict[str, Source]:
    """The norms' scales of a dialect, stored as their distance from one (layernorm1p)."""
    result = {}
    for name in _SCALES:
        stem, part = name.rsplit(".", 1)
        if name not in table and stem not in table:
            continue
        keys = table[name].keys if name in table else (f"{table[stem].keys[0]}.{part}",)
        result[name] = Source(keys, "plus_one")
    return result


DIALECTS: dict[str, dict[str, Source]] = {
    "nemo": NEMO,
    "nemo_fused_gate": NEMO_FUSED_GATE,
    "nemo_legacy": NEMO_LEGACY,
    "nemo_plus_one": _plus_one(NEMO),
    "megatron_innermost": MEGATRON_INNERMOST,
    "megatron_groups": MEGATRON_GROUPS,
    "mcore": MCORE,
    "mcore_fused_gate": MCORE_FUSED_GATE,
    "mcore_split_attention": MCORE_SPLIT_ATTENTION,
    "mcore_split_gate": MCORE_SPLIT_GATE,
    "mcore_local": MCORE_LOCAL,
    "mcore_latent": MCORE_LATENT,
    "mcore_latent_local": MCORE_LATENT_LOCAL,
    "mcore_experts": MCORE_EXPERTS,
    "mcore_branches": MCORE_BRANCHES,
    "mcore_branches_plus_one": _plus_one({**MCORE, **MCORE_BRANCHES}),
    "mcore_plus_one": _plus_one(MCORE),
    "mcore_local_plus_one": _plus_one({**MCORE, **MCORE_LOCAL}),
    "mcore_experts_plus_one": _plus_one({**MCORE, **MCORE_EXPERTS}),
}


def nemo_dialects(*, fused: bool, plus_one: bool, legacy: bool = False) -> tuple[str, ...]:
    """Dialects of the weight table for tensors under NeMo's classic names.

    Variants come first: a row of theirs goes before the plain dialect's.
    fused:    a gate lies in one matrix with what it gates
    plus_one: norms' scales are stored as their distance from one
    legacy:   query, key and value lie in Megatron-LM's older order
    """
    variants = {"nemo_fused_gate": fused, "nemo_legacy": legacy, "nemo_plus_one": plus_one}
    return (*(name for name, is_present in variants.items() if is_present), "nemo")


def core_dialects(gated: bool, norms: str, plus_one: bool) -> tuple[str, ...]:
    """Dialects of the weight table for tensors of Megatron-LM core, first choice first.

    gated:    a gate lies in one matrix with what it gates
    norms:    the dialect that says where these are
    plus_one: as of nemo_dialects
    """
    dialects = ["mcore_fused_gate"] if gated else []
    if plus_one:
        dialects.append(f"{norms}_plus_one")
    if plus_one and norms in OF_EXPERTS:  # layers without experts have theirs at another place
        dialects.append("mcore_plus_one")
    if norms != "mcore":
        dialects.append(norms)
    return (*dialects, "mcore")
