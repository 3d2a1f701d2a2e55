"""What config.json says of hybrids, as a GPTConfig; see huggingface_decoders.

Their layers have Mamba-2, a gated delta net or a short convolution instead of attention, or beside
it; layer_branches says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import decoder, granite, head_size_of
from launcher_scripts.checkpoint.sources.huggingface_experts import biased_experts, qwen_experts
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import Fields, rope
from launcher_scripts.common.errors import Problems
from launcher_scripts.models.family import branches_text, layer_list
from launcher_scripts.models.gpt import GPTConfig, expert_groups

# A layer's kind in config.json, in every spelling -> the branch.
_KINDS = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
}
_INITIAL_STEPS = ("time_step_min", "time_step_max", "time_step_floor")
_LETTERS = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def kinds_of(
    raw: RawConfig, layers: int, result: Any, names: str, supported: Mapping[str, str]
) -> list[str]:
    """The branches that a list of the layers' kinds names."""
    if isinstance(result, str):
        result = list(result)
    if not isinstance(result, list) or len(result) != layers or not {*result} <= supported.keys():
        raw.problems.add(
            f"{names} must name the kind of every layer", got=result, choices=tuple(supported)
        )
        return ["attention"] * layers
    return [supported[kind] for kind in result]


def _branches(mixers: Sequence[str], then: str) -> str:
    """layer_branches of layers that have one of these and then another branch."""
    return ",".join(f"{mixer}/{then}" for mixer in mixers)


def _limits(raw: RawConfig, *more: str) -> Fields:
    """The range of time steps, of which the ends may be infinite."""
    result = raw("time_step_limit", *more, default=None)
    if result is None:
        return {}
    ends = [_number(end) for end in result] if isinstance(result, list) else []
    minimum, maximum = ends if len(ends) == 2 else (None, None)
    if minimum is None or maximum is None or not minimum <= maximum:
        raw.problems.add("time_step_limit must be two numbers, the smaller first", got=result)
        return {}
    return {
        "mamba_min_step": minimum if minimum > 0 else None,
        "mamba_max_step": None if math.isinf(maximum) else maximum,
    }


def _number(value: Any) -> float | None:
    """A number as JSON or transformers writes it, which has no infinity of its own."""
    if isinstance(value, Mapping):
        value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value.get("__float__")))
    return float(value) if type(value) in (int, float) else None


def _mamba(raw: RawConfig, inner: int) -> Fields:
    """Mamba-2's sizes by the names that Bamba has, where all heads together have `inner`."""
    heads = raw.size("mamba_n_heads", default=128)
    size = raw("mamba_d_head", default="auto")
    raw.unused("mamba_chunk_size")  # a way to compute the same
    if size == "auto":
        size = max(inner // heads, 1)
    if type(size) is not int or size * heads != inner:
        raw.problems.add(
            "mamba_d_head times mamba_n_heads must be the inner size", got=size, choices=(inner,)
        )
        size = 1
    raw.only(hidden_act="silu")  # of the convolution, too
    raw.unused(*_INITIAL_STEPS, "time_step_rank", "use_mamba_kernels")
    return {
        "conv_kernel": raw.size("mamba_d_conv", default=4),
        "conv_bias": raw.flag("mamba_conv_bias", True),
        "mamba_num_heads": heads,
        "mamba_head_size": size,
        "mamba_state_size": raw.size("mamba_d_state", default=256),
        "mamba_num_groups": raw.size("mamba_n_groups", default=1),
        "mamba_bias": raw.flag("mamba_proj_bias", False),
        **_limits(raw),
    }


def nemotron_h(raw: RawConfig) -> GPTConfig:
    """Nemotron-H, Nano 2 and Nemotron 3: one branch a layer; attention does not turn."""
    kinds = _nemotronkinds_of(raw)
    _nemotron_unused(raw)
    raw.defaults(pad_token_id=0, head_dim=128, num_hidden_layers=len(kinds))
    epsilon = raw.real("layer_norm_epsilon", 1e-5)
    raw.only(norm_eps=epsilon, rms_norm_eps=epsilon)  # other names of it
    return decoder(
        raw,
        num_layers=len(kinds),
        head_size=raw.size("head_dim", "attention_head_dim"),
        position_embedding="none",
        norm_eps=epsilon,
        activation=raw.activation("mlp_hidden_act", "relu2"),
        gated=False,
        attention_bias=False,
        layer_branches=",".join(kinds),
        conv_kernel=raw.size("conv_kernel", "mamba_d_conv", default=4),
        conv_bias=raw.flag("use_conv_bias", raw.flag("mamba_conv_bias", True)),
        mamba_num_heads=raw.size("mamba_num_heads", default=128),
        mamba_head_size=raw.size("mamba_head_dim", default=64),
        mamba_state_size=raw.size("ssm_state_size", default=128),
        mamba_num_groups=raw.size("n_groups", "mamba_n_groups", default=8),
        mamba_bias=raw.flag("use_bias", False),
        **_limits(raw, "mamba_dt_limit"),
        **_nemotron_widths(raw, kinds),
    )


def _nemotronkinds_of(raw: RawConfig) -> list[str]:
    """The layers' branches, as words or as letters."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    result, pattern = raw(*names[:2], default=None), raw(names[2], default=None)
    values = pattern if result is None else result
    layers = len(values) if isinstance(values, (list, str)) and values else 1
    raw.only(num_hidden_layers=layers)
    supported = _KINDS if result is not None else _LETTERS
    return kinds_of(raw, layers, values, " or ".join(names), supported)


def _nemotron_unused(raw: RawConfig) -> None:
    """Refuse what is not computed here, and name the keys that change nothing."""
    raw.only(mamba_hidden_act="silu", attention_bias=False, sliding_window=None)
    raw.only(mamba_ssm_cache_dtype="float32")
    raw.unused("n_shared_experts")  # moe_shared_expert_intermediate_size is all of them
    raw.unused("expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "mamba_proj_bias")
    raw.unused(*_INITIAL_STEPS, "mamba_dt_min", "mamba_dt_max")
    raw.unused("mamba_dt_init_floor", "rescale_prenorm_residual", "residual_in_fp32")
    raw.unused("num_logits_to_keep", "use_mamba_kernels", "moe_shared_expert_overlap")
    raw.unused("mtp_layers_block_type", "mtp_hybrid_override_pattern", "partial_rotary_factor")
    raw.unused("rope_theta", "rope_parameters", "rope_scaling")


def _nemotron_widths(raw: RawConfig, kinds: list[str]) -> Fields:
    """The MLPs' sizes, and the experts."""
    size = raw.size("intermediate_size", default=21504)
    width = raw.size("moe_intermediate_size", default=7688)
    fields: Fields = {
        "num_experts": raw.size("n_routed_experts", default=8),
        "experts_per_token": raw.size("num_experts_per_tok", default=2),
        "normalized_experts": raw.flag("norm_topk_prob", True),
        "router_score_function": "sigmoid",
        "router_scaling_factor": raw.real("routed_scaling_factor", 1.0),
        "expert_bias": True,
        "shared_expert_size": raw.size("moe_shared_expert_intermediate_size", default=7688),
        "shared_expert_gate": False,
        "moe_latent_size": raw("moe_latent_size", default=None),
        "ffn_size": width,
        **expert_groups(raw.size("n_group", default=1), raw.size("topk_group", default=1), 2),
    }
    if "moe" not in kinds:
        return {"ffn_size": size}
    return {**fields, "dense_ffn_size": size} if "mlp" in kinds else fields


def bamba(raw: RawConfig) -> GPTConfig:
    """Bamba: half of each head turns."""
    layers = raw.layers("num_hidden_layers")
    full = raw("attn_layer_indices", default=[])
    if not isinstance(full, list):
        raw.problems.add("attn_layer_indices must be a list of layers", got=full)
        full = []
    mixers = ["attention" if layer in full else "mamba2" for layer in range(layers)]
    raw.unused("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types")
    raw.unused("partial_rotary_factor")
    raw.only(attn_rotary_emb=head_size_of(raw) // 2)
    raw.defaults(partial_rotary_factor=0.5, pad_token_id=0, rms_norm_eps=1e-5)
    inner = raw.size("mamba_expand", default=2) * raw.size("hidden_size")
    return decoder(
        raw, layer_branches=_branches(mixers, "mlp"), **_halves(raw), **_mamba(raw, inner)
    )


def _halves(raw: RawConfig) -> Fields:
    """Bamba's positions, which turn half of a head whatever config.json says."""
    return {**rope(raw, head_size_of(raw)), "rotary_percentage": 0.5}


def falcon_h1(raw: RawConfig) -> GPTConfig:
    """Falcon-H1: attention and Mamba-2 side by side; multipliers all over."""
    layers = raw.layers("num_hidden_layers")
    raw.only(attention_bias=False, mamba_proj_bias=False, projectors_bias=False, mlp_bias=False)
    raw.unused("num_logits_to_keep", "mamba_use_mlp", "layers_block_type", "layer_types")
    raw.unused("mlp_expansion_factor")
    raw.defaults(pad_token_id=0, rms_norm_eps=1e-5)
    inner = raw("mamba_d_ssm", default=None)
    expanded = raw.size("mamba_expand", default=2) * raw.size("hidden_size")
    norm = "none"
    before = raw.flag("mamba_norm_before_gate", True)
    if raw.flag("mamba_rms_norm", False):
        norm = "before_gate" if before else "gated"
    values = raw("mlp_multipliers", default=None) is not None
    gate, down = raw.numbers("mlp_multipliers", 2) if values else (1.0, 1.0)
    values = raw("ssm_multipliers", default=None) is not None
    parts = raw.numbers("ssm_multipliers", 5) if values else [1.0] * 5
    ssm, attention = raw.real("ssm_in_multiplier", 1.0), raw.real("attention_in_multiplier", 1.0)
    keys = attention * raw.real("key_multiplier", 1.0)
    return decoder(
        raw,
        layer_branches=_branches(["attention+mamba2"] * layers, "mlp"),
        mamba_norm=norm,
        embedding_scale=raw.real("embedding_multiplier", 1.0),
        logits_scale=raw.real("lm_head_multiplier", 1.0),
        query_key_value_scales=_text([attention, keys, attention]),
        attention_output_scale=raw.real("attention_out_multiplier", 1.0),
        mamba_input_scales=_text([ssm * part for part in parts]),
        mamba_output_scale=raw.real("ssm_out_multiplier", 1.0),
        mlp_gate_scale=gate,
        mlp_output_scale=down,
        **_mamba(raw, inner if type(inner) is int else expanded),
    )


def _text(numbers: Sequence[float]) -> str:
    return ",".join(map(repr, numbers))


def granitemoehybrid(raw: RawConfig) -> GPTConfig:
    """Granite 4: experts and a shared MLP behind Mamba-2 or attention, or that MLP alone."""
    layers = raw.layers("num_hidden_layers")
    values = raw("layer_types", "layers_block_type", default=["mamba"] * layers)
    mixers = kinds_of(raw, layers, values, "layer_types", _KINDS)
    turns = raw("position_embedding_type", default=None)
    fields: Fields = {}
    if turns != "rope":
        raw.unused("rope_theta", "rope_scaling", "rope_parameters")
        fields["position_embedding"] = "none"
    if turns not in (None, "rope", "nope"):
        raw.problems.add("unknown position_embedding_type", got=turns, choices=("rope", "nope"))
    raw.unused("normalization_function", "init_method")
    count = raw.size("num_local_experts", default=8, minimum=0)
    selected = raw.size("num_experts_per_tok", default=2, minimum=0)
    size = raw.size("shared_intermediate_size", default=1024)
    if count:
        fields |= {
            "num_experts": count,
            "experts_per_token": selected,
            "normalized_experts": True,
            "shared_expert_size": size,
            "shared_expert_gate": False,
        }
    else:
        raw.unused("intermediate_size")
        fields["ffn_size"] = size
    inner = raw.size("mamba_expand", default=2) * raw.size("hidden_size")
    return granite(
        raw,
        mlp_bias=False,
        mixer_norm_eps=raw.real("rms_norm_eps", 1e-6),
        layer_branches=_branches(mixers, "moe" if count else "mlp"),
        **_mamba(raw, inner),
        **fields,
    )


def _qwen(raw: RawConfig, then: Sequence[str], **fields: Any) -> GPTConfig:
    """Gated delta nets, and every so many layers attention with a gate.

    then: the second branch of each layer
    """
    layers = len(then)
    interval = raw.size("full_attention_interval", default=4)
    default = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(layers)
    ]
    supported = {"full_attention": "attention", "linear_attention": "gated_delta"}
    mixers = kinds_of(raw, layers, raw("layer_types", default=default), "layer_types", supported)
    raw.only(hidden_act="silu")  # of the convolution, too
    raw.defaults(partial_rotary_factor=0.25, head_dim=256)
    raw.unused("partial_rotary_factor", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    raw.unused("attn_output_gate", "mamba_ssm_dtype")
    section = raw.section("rope_parameters", "rope_scaling")
    section.unused("mrope_section", "mrope_interleaved")  # three equal positions of a text
    return decoder(
        raw,
        zero_centered_norm=True,
        qk_norm=True,
        attention_output_gate=True,
        mlp_bias=False,
        layer_branches=",".join(
            f"{mixer}/{other}" for mixer, other in zip(mixers, then, strict=True)
        ),
        conv_kernel=raw.size("linear_conv_kernel_dim", default=4),
        delta_num_heads=raw.size("linear_num_value_heads", default=32),
        delta_num_key_heads=raw.size("linear_num_key_heads", default=16),
        delta_key_head_size=raw.size("linear_key_head_dim", default=128),
        delta_value_head_size=raw.size("linear_value_head_dim", default=128),
        **fields,
    )


def qwen3_next(raw: RawConfig) -> GPTConfig:
    raw.defaults(norm_topk_prob=True)
    fields = qwen_experts(raw)
    dense = (fields.pop("dense_layers", None) or "").split(",")
    then = ["mlp" if str(n) in dense else "moe" for n in range(raw.layers("num_hidden_layers"))]
    shared = raw.size("shared_expert_intermediate_size", default=512)
    if "moe" not in then:
        return _qwen(raw, then)
    return _qwen(raw, then, shared_expert_size=shared, **fields)


def qwen3_5(raw: RawConfig) -> GPTConfig:
    """The text part of a dense Qwen 3.5."""
    return _qwen(raw, ["mlp"] * raw.layers("num_hidden_layers"))


def qwen3_5_moe(raw: RawConfig) -> GPTConfig:
    raw.only(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return qwen3_next(raw)


def lfm2(raw: RawConfig, then: Sequence[str] = (), **fields: Any) -> GPTConfig:
    """LFM2: gated short convolutions, and attention.

    then: the second branch of each layer, if it is not an MLP everywhere;  fields: as in `decoder`
    """
    layers = raw.layers("num_hidden_layers")
    full = raw("full_attn_idxs", default=list(range(layers)))
    default = [
        "full_attention" if isinstance(full, list) and layer in full else "conv"
        for layer in range(layers)
    ]
    supported = {"full_attention": "attention", "conv": "short_conv"}
    mixers = kinds_of(raw, layers, raw("layer_types", default=default), "layer_types", supported)
    raw.unused("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_dim")
    raw.unused("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out")
    raw.unused("conv_use_xavier_init", "num_heads", "use_pos_enc", "tie_embedding", "conv_L_cache")
    raw.defaults(rope_theta=1e6, pad_token_id=0)
    return decoder(
        raw,
        qk_norm=True,
        norm_eps=raw.real("norm_eps", 1e-5),
        activation="silu",
        attention_bias=False,
        mlp_bias=False,
        layer_branches=",".join(map("/".join, zip(mixers, then or ["mlp"] * layers, strict=True))),
        conv_kernel=raw.size("conv_L_cache", default=3),
        conv_bias=raw.flag("conv_bias", False),
        **(fields or {"ffn_size": _lfm2_size(raw)}),
    )


def lfm2_moe(raw: RawConfig) -> GPTConfig:
    """LFM2 with experts behind the first layers; not every model has a bias for choosing them."""
    layers, dense = (
        raw.layers("num_hidden_layers"),
        raw.size("num_dense_layers", default=2, minimum=0),
    )
    raw.defaults(n_shared_experts=0, norm_topk_prob=True, first_k_dense_replace=dense)
    fields = biased_experts(raw) | {"expert_bias": raw.flag("use_expert_bias", True) or None}
    fields.pop("dense_layers", None)
    if dense >= layers:
        fields = {"ffn_size": raw.size("intermediate_size")}
    return lfm2(raw, ["mlp" if n < dense else "moe" for n in range(layers)], **fields)


def _lfm2_size(raw: RawConfig) -> int:
    """The MLP's, which is adjusted as Llama's was once."""
    size = raw.size("block_ff_dim", "intermediate_size", default=12288)
    multiple = raw.size("block_multiple_of", default=256)
    factor = raw.real("block_ffn_dim_multiplier", 1.0)
    if not raw.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(factor * int(2 * size / 3))
    return -(-size // multiple) * multiple


# Keys of a layer's parts in block_configs; of these, sizes of the part (the core's own, last).
_NAS_SIZES = {
    "attention": ("n_heads_in_group", "num_query_groups"),
    "ffn": ("ffn_mult", "ffn_hidden_size"),
}
_NAS_SWITCHES = ("no_op", "replace_with_linear")
_NAS_MULTIPLE = 256


def nemotron_nas(raw: RawConfig) -> GPTConfig:
    """Llama-Nemotron: a Llama whose layers lack attention or the MLP, have a linear layer in place
    of either, or groups and widths of their own.
    """
    heads, hidden = raw.size("num_attention_heads"), raw.size("hidden_size")
    layers, blocks = raw.layers("num_hidden_layers"), raw("block_configs", default=[])
    fields = heterogeneous_layers(raw.problems, blocks, layers, heads, hidden)
    raw.defaults(num_key_value_heads=fields.pop("num_kv_heads"))
    raw.defaults(intermediate_size=fields.pop("ffn_size"))
    return decoder(raw, ffn_size=raw.size("intermediate_size"), **fields)


def heterogeneous_layers(
    problems: Problems, blocks: Any, layers: int, heads: int, hidden: int
) -> Fields:
    """Fields of layers as block_configs of a Llama-Nemotron has them; num_kv_heads and ffn_size are
    the largest."""
    if not isinstance(blocks, list) or len(blocks) != layers:
        problems.add("block_configs must have an entry for each layer", got=blocks)
        blocks = []
    branches: list[list[tuple[str, ...]]] = []
    groups: list[int] = []
    widths: list[int] = []
    for block in blocks:
        kinds: list[tuple[str, ...]] = []
        for part, kind, linear, sizes in (
            ("attention", "attention", "linear", groups),
            ("ffn", "mlp", "linear_mlp", widths),
        ):
            entry = _nas_entry(problems, block, part)
            replaced = bool(entry.get("replace_with_linear"))
            absent = bool(entry.get("no_op"))
            kinds += [] if absent else [(linear if replaced else kind,)]
            size = 0
            if not (absent or replaced):
                size = (
                    _nas_groups(entry, heads) if part == "attention" else _nas_width(entry, hidden)
                )
                if size <= 0:
                    text = f"block_configs: {_NAS_SIZES[part][0]} is not a size"
                    problems.add(text, got=entry)
            sizes.append(size)
        branches.append(kinds)
    return {
        "num_kv_heads": max(groups, default=0) or heads,
        "ffn_size": max(widths, default=0) or 1,
        "layer_branches": branches_text(branches),
        "layer_num_kv_heads": layer_list(groups),
        "layer_ffn_sizes": layer_list(widths),
    }


def _nas_groups(entry: Mapping[str, Any], heads: int) -> int:
    """The heads of keys and values."""
    count, in_group = entry.get("num_query_groups"), entry.get("n_heads_in_group")
    if type(count) is int:
        return count
    return heads // in_group if type(in_group) is int and in_group > 0 else 0


def _nas_width(entry: Mapping[str, Any], hidden: int) -> int:
    """The width of an MLP."""
    size, factor = entry.get("ffn_hidden_size"), entry.get("ffn_mult")
    if type(size) is int:
        return size
    exact = int(2 * (factor or 0) * hidden / 3) if isinstance(factor, (int, float)) else 0
    return -(-exact // _NAS_MULTIPLE) * _NAS_MULTIPLE


def _nas_entry(problems: Problems, block: Any, part: str) -> dict[str, Any]:
    """A part of an entry of block_configs; what else it says must be off."""
    names = ("ffn", "mlp") if part == "ffn" else (part,)
    entries = [block.get(name) for name in names] if isinstance(block, dict) else []
    entry = next((entry for entry in entries if entry), None)
    if not isinstance(entry, dict):
        problems.add(f"block_configs: an entry has no {part}", got=block)
        return {"no_op": True}
    for key, value in entry.items():
        supported = (*_NAS_SIZES[part], *_NAS_SWITCHES)
        if key not in supported and value not in (None, False, [], {}):
            problems.add(f"block_configs: {key} is not supported", got=value, choices=(None,))
    return entry
