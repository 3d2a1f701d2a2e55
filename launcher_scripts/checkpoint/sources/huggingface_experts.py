"""GPTConfig from the config.json of decoders with mixtures of experts; see huggingface_decoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import (
    cohere,
    decoder,
    ernie4_5,
    granite,
    granite_attention,
    head_size_of,
    qwen_windows,
    turning_layers,
    unscaled,
    unwindowed,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import (
    Fields,
    rope,
    rope_of,
    two_ropes,
    windows,
)
from launcher_scripts.common.quantization import CLAMP, SLOPE
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig, expert_groups


def mixtral(raw: RawConfig) -> GPTConfig:
    return decoder(raw, **experts_of(raw, "num_local_experts", normalized=True), **windows(raw))


def experts_of(raw: RawConfig, *names: str, normalized: bool) -> Fields:
    """Read the number of experts, by one of these names, and the number that a token uses."""
    return {
        "num_experts": raw.size(*names),
        "experts_per_token": raw.size("num_experts_per_tok"),
        "normalized_experts": normalized,
    }


def gpt_oss(raw: RawConfig) -> GPTConfig:
    """OpenAI's gpt-oss: a score of no token for every head, biases everywhere."""
    raw.only(swiglu_alpha=SLOPE, swiglu_limit=CLAMP, hidden_act="silu")
    raw.unused("initial_context_length")  # the rope's original positions
    raw.only(experts_per_token=raw("num_experts_per_tok"))  # another name of it
    raw.defaults(rms_norm_eps=1e-5, attention_bias=True, rope_theta=150000.0)
    raw.defaults(bos_token_id=199998, eos_token_id=200002)
    return decoder(
        raw,
        activation="clamped_swiglu",
        attention_sinks=True,
        mlp_bias=True,
        router_bias=True,
        **experts_of(raw, "num_local_experts", "num_experts", normalized=True),
        **windows(raw, lambda layer: layer % 2 == 1),
    )


def granitemoe(raw: RawConfig, **fields: Any) -> GPTConfig:
    raw.only(position_embedding_type="rope")
    experts = experts_of(raw, "num_local_experts", normalized=True)
    return granite(raw, mlp_bias=False, **experts, **fields)


def granitemoeshared(raw: RawConfig, **fields: Any) -> GPTConfig:
    """A Granite whose tokens also go through one more MLP, if it has a size."""
    size = raw.size("shared_intermediate_size", default=1024, minimum=0)
    shared = {"shared_expert_size": size, "shared_expert_gate": False} if size else {}
    return granitemoe(raw, **shared, **fields)


def granitemoe_swa(raw: RawConfig) -> GPTConfig:
    raw.defaults(shared_intermediate_size=0, sliding_window=128)
    return granitemoeshared(raw, **granite_attention(raw))


def qwen2_moe(raw: RawConfig) -> GPTConfig:
    return decoder(
        raw,
        attention_bias=raw.flag("qkv_bias", True),
        attention_dense_bias=False,
        shared_expert_size=raw.size("shared_expert_intermediate_size"),
        **qwen_experts(raw),
        **qwen_windows(raw, lambda layer, first: layer % 2 == 1 or layer >= first),
    )


def qwen3_moe(raw: RawConfig) -> GPTConfig:
    """Its layers have windows all alike."""
    fields: Fields = {}
    if raw.flag("use_sliding_window", False):
        raw.only(max_window_layers=0)
        fields = windows(raw)
    raw.unused("sliding_window", "max_window_layers", "layer_types")
    return decoder(raw, qk_norm=True, **qwen_experts(raw), **fields)


def qwen_experts(raw: RawConfig) -> Fields:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers has it."""
    step, values = raw.size("decoder_sparse_step", default=1), raw("mlp_only_layers", default=[])
    if not isinstance(values, list):
        raw.problems.add("mlp_only_layers must be a list of layers", got=values)
        values = []
    return {
        "ffn_size": raw.size("moe_intermediate_size"),
        **specified_experts(raw),
        **dense_layers(raw, lambda layer: (layer + 1) % step != 0 or layer in values),
    }


def dense_layers(
    raw: RawConfig, without: Callable[[int], bool], size: str = "intermediate_size"
) -> Fields:
    """The layers without experts, whose MLP has the size of a model without them.

    without: whether a layer is one of them where `mlp_layer_types` does not say it
    size:    the key of that size
    """
    layers = range(raw.layers("num_hidden_layers"))
    kinds = raw("mlp_layer_types", default=None)
    if kinds is None:
        kinds = ["dense" if without(layer) else "sparse" for layer in layers]
    if not isinstance(kinds, list) or len(kinds) != len(layers) or {*kinds} - {"dense", "sparse"}:
        choices = ("dense", "sparse")
        raw.problems.add("mlp_layer_types must name every layer's MLP", got=kinds, choices=choices)
        return {}
    named = layer_list(layer for layer in layers if kinds[layer] == "dense")
    raw.unused(size)
    return {} if named is None else {"dense_layers": named, "dense_ffn_size": raw.size(size)}


def specified_experts(raw: RawConfig, *names: str) -> Fields:
    """Where config.json says whether a token's weights are normalized.

    names: further ones of their number
    """
    normalized = raw.flag("norm_topk_prob", False)
    return experts_of(raw, "num_experts", "num_local_experts", *names, normalized=normalized)


def olmoe(raw: RawConfig) -> GPTConfig:
    """OLMoE normalizes all heads' queries and keys together."""
    raw.defaults(rms_norm_eps=1e-5, eos_token_id=50279, pad_token_id=1)
    experts = specified_experts(raw)
    clip = raw.real("clip_qkv", 0.0) or None
    norms: Fields = {"qk_norm": True, "joint_qk_norm": True}
    return decoder(raw, attention_clip=clip, mlp_bias=False, **norms, **experts)


def glm4_moe(raw: RawConfig) -> GPTConfig:
    """GLM-4.5 to 4.7."""
    raw.defaults(rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    raw.defaults(first_k_dense_replace=1, norm_topk_prob=True)
    return decoder(
        raw,
        qk_norm=raw.flag("use_qk_norm", False) or None,
        attention_dense_bias=False,
        mlp_bias=False,
        **biased_experts(raw),
    )


def solar_open(raw: RawConfig) -> GPTConfig:
    """Solar Open, all of whose layers have experts: intermediate_size is not used."""
    raw.defaults(rms_norm_eps=1e-5, rope_theta=1e6, norm_topk_prob=True)
    raw.defaults(intermediate_size=raw.size("moe_intermediate_size"))
    experts = biased_experts(raw)
    return decoder(raw, attention_dense_bias=False, mlp_bias=False, **experts)


def mellum(raw: RawConfig) -> GPTConfig:
    """Mellum 2: a Qwen 3 whose layers with a window turn by a base of their own."""
    raw.defaults(rope_theta=500000.0, norm_topk_prob=True)
    turns, local_base = two_ropes(raw, head_size_of(raw), 10000.0)
    fields = windows(raw, lambda _: True)
    if fields:
        fields["rotary_local_base"] = local_base or 10000.0
    return decoder(
        raw,
        qk_norm=True,
        mlp_bias=False,
        ffn_size=raw.size("moe_intermediate_size"),
        **turns,
        **fields,
        **specified_experts(raw),
        **dense_layers(raw, lambda _: False),
    )


def dots1(raw: RawConfig) -> GPTConfig:
    """dots.llm1; the first max_window_layers layers have no window."""
    first = raw.size("max_window_layers", default=62, minimum=0)
    if raw.raw.get("scoring_func") == "noaux_tc":  # as published; its class always has sigmoids
        raw.unused("scoring_func")
    return decoder(
        raw,
        qk_norm=True,
        mlp_bias=False,
        **biased_experts(raw),
        **windows(raw, lambda layer: layer < first),
    )


def biased_experts(raw: RawConfig) -> Fields:
    """Experts as DeepSeek-V3's, behind layers without them."""
    raw.only(topk_method="noaux_tc")
    if "scoring_func" not in raw.read_keys:
        raw.only(scoring_func="sigmoid")
    if "moe_layer_freq" not in raw.read_keys:
        raw.only(moe_layer_freq=1)
    size = raw.size("moe_intermediate_size")
    dense = raw.size("first_k_dense_replace", default=0, minimum=0)
    shared = raw.size("n_shared_experts", "num_shared_experts", default=1, minimum=0)
    return {
        **specified_experts(raw, "n_routed_experts"),
        "ffn_size": size,
        "router_score_function": "sigmoid",
        "router_scaling_factor": raw.real("routed_scaling_factor", 1.0),
        "expert_bias": True,
        **shared_experts(size, shared),
        **expert_groups(raw.size("n_group", default=1), raw.size("topk_group", default=1), 2),
        **dense_layers(raw, lambda layer: layer < dense),
    }


def shared_experts(size: int, count: int) -> Fields:
    """One MLP, as wide as so many experts of this size, that every token goes through."""
    return {"shared_expert_size": size * count, "shared_expert_gate": False} if count else {}


def ernie4_5_moe(raw: RawConfig) -> GPTConfig:
    """ERNIE 4.5 chooses by a softmax plus a bias."""
    raw.only(moe_use_aux_free=True, moe_gate="topk", moe_gate_act="softmax")
    raw.unused("moe_norm_min", "moe_capacity")  # against a division by 0; of the training
    layers, interval = raw.layers("num_hidden_layers"), raw.size("moe_layer_interval", default=1)
    first = raw.size("moe_layer_start_index", default=1, minimum=0)
    last = raw.size("moe_layer_end_index", default=-1, minimum=-1)
    last = layers - 1 if last == -1 else last
    size = raw.size("moe_intermediate_size")
    fields = {
        "num_experts": raw.size("moe_num_experts"),
        "experts_per_token": raw.size("moe_k"),
        "normalized_experts": True,
        "ffn_size": size,
        "expert_bias": True,
    }
    fields |= shared_experts(size, raw.size("moe_num_shared_experts", default=2, minimum=0))
    return ernie4_5(
        raw,
        **fields,
        **dense_layers(raw, lambda n: (n + 1) % interval != 0 or not first <= n <= last),
    )


def minimax_m2(raw: RawConfig) -> GPTConfig:
    """MiniMax-M2 normalizes all heads' queries and keys together."""
    raw.only(
        attn_type_list=[1] * raw.layers("num_hidden_layers"),
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    head_size = head_size_of(raw)
    share = raw.size("rotary_dim", default=head_size) / head_size
    raw.defaults(rope_theta=5e6, partial_rotary_factor=share)
    raw.defaults(bos_token_id=200034, eos_token_id=200020)
    return decoder(
        raw,
        qk_norm=True,
        joint_qk_norm=True,
        attention_bias=False,
        mlp_bias=False,
        router_score_function="sigmoid",
        expert_bias=True,
        **experts_of(raw, "num_local_experts", "num_experts", normalized=True),
    )


def hy_v3(raw: RawConfig) -> GPTConfig:
    """Hunyuan 3."""
    scale = raw.real("router_scaling_factor", 2.826)
    raw.unused("enable_moe_fp32_combine", "enable_lm_head_fp32")  # of types
    raw.unused("enable_attention_fp32_softmax", "use_grouped_mm")
    raw.only(qk_norm=True, route_norm=True, first_k_dense_replace=1)
    raw.only(moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True)
    raw.only(expert_hidden_dim=raw("moe_intermediate_size", default=None))
    raw.only(norm_topk_prob=True, routed_scaling_factor=scale)  # its class reads other names
    raw.defaults(rms_norm_eps=1e-5, head_dim=128, rope_theta=11158840.0)
    raw.defaults(first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=scale)
    return decoder(raw, qk_norm=True, **biased_experts(raw))


def afmoe(raw: RawConfig) -> GPTConfig:
    """Arcee's Trinity: attention with an output gate, which turns in layers with a window alone."""
    raw.only(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1)
    raw.only(score_func="sigmoid", route_norm=True, attention_bias=False, norm_topk_prob=True)
    raw.unused("load_balance_coeff", "use_grouped_mm")  # of the training
    raw.defaults(rms_norm_eps=1e-5, head_dim=128, sliding_window=1024, norm_topk_prob=True)
    scale = raw.real("route_scale", 1.0)
    raw.only(routed_scaling_factor=scale)
    raw.defaults(routed_scaling_factor=scale, moe_intermediate_size=1408)
    raw.defaults(first_k_dense_replace=raw.size("num_dense_layers", default=1, minimum=0))
    raw.defaults(n_shared_experts=raw.size("num_shared_experts", default=2, minimum=0))
    interval = raw.size("global_attn_every_n_layers", default=4)
    fields = windows(raw, lambda layer: (layer + 1) % interval == 0)
    scale_of_embeddings = (
        math.sqrt(raw.size("hidden_size")) if raw.flag("mup_enabled", False) else None
    )
    return decoder(
        raw,
        norm_placement="sandwich",
        qk_norm=True,
        attention_output_gate=True,
        mlp_bias=False,
        embedding_scale=scale_of_embeddings,
        unrotated_layers=unwindowed(raw, fields),
        **fields,
        **biased_experts(raw),
    )


def phimoe(raw: RawConfig) -> GPTConfig:
    """Phi-3.5-MoE: layer norms, and experts chosen by SparseMixer."""
    raw.unused("input_jitter_noise", "lm_head_bias")  # of the training; the tensors say it
    raw.only(num_experts_per_tok=2)
    raw.defaults(rms_norm_eps=1e-5, rope_theta=1e6, num_experts_per_tok=2)
    section = raw.section("rope_parameters", "rope_scaling")
    scales = [section.real(f"{name}_mscale", 0.0) for name in ("short", "long")]
    turns = rope_of(raw, section, head_size_of(raw))
    if scales[0] != scales[1]:
        text = "short_mscale and long_mscale of the rotary positions must be the same"
        raw.problems.add(text, got=scales)
    if scales[0]:
        turns["rotary_attention_factor"] = scales[0]
    return decoder(
        raw,
        normalization="layernorm",
        norm_eps=raw.real("rms_norm_eps", 1e-5),
        mlp_bias=False,
        logits_bias=True if "lm_head.bias" in raw.keys else None,
        router_score_function="sparsemixer",
        router_jitter=raw.real("router_jitter_noise", 0.01),
        **turns,
        **experts_of(raw, "num_local_experts", normalized=False),
        **windows(raw),
    )


def cohere2_moe(raw: RawConfig) -> GPTConfig:
    """Command A+: a Cohere 2 with experts behind a few layers without them."""
    size, shared = (
        raw.size("intermediate_size"),
        raw.size("num_shared_experts", default=0, minimum=0),
    )
    dense = raw.size("first_k_dense_replace", default=0, minimum=0)
    raw.defaults(prefix_dense_intermediate_size=size)
    pattern = raw.size("sliding_window_pattern", default=4)
    prefix = raw.size("prefix_dense_sliding_window_pattern", default=1)
    choices = ("softmax", "sigmoid")
    function = raw.text("expert_selection_fn", "softmax")
    raw.problems.check_choice("expert_selection_fn", function, choices)
    fields = {
        "num_experts": raw.size("num_experts", "num_local_experts", default=8),
        "experts_per_token": raw.size("num_experts_per_tok", default=2),
        "router_score_function": function,
        "normalized_experts": raw.flag("norm_topk_prob", True) or function == "softmax",
        **dense_layers(raw, lambda layer: layer < dense, "prefix_dense_intermediate_size"),
    }
    strategy = raw.text("shared_expert_combination_strategy", "average")
    raw.problems.check_choice("shared_expert_combination_strategy", strategy, ("average", "sum"))
    fields |= shared_experts(size, shared)
    if shared and strategy == "average":
        fields |= {"router_scaling_factor": 0.5, "shared_expert_scale": 0.5}
    if raw("rms_norm_eps", default=None) is not None:
        fields |= {"normalization": "rmsnorm", "norm_eps": raw.real("rms_norm_eps", 1e-5)}
    raw.defaults(sliding_window=4096, head_dim=128)
    window = windows(
        raw,
        lambda layer: (
            (layer + 1) % prefix == 0 if layer < dense else (layer - dense + 1) % pattern == 0
        ),
    )
    turned = str(fields.get("dense_layers", "")).split(",") if prefix == 1 else []
    full = (unwindowed(raw, window) or "").split(",")
    unrotated = ",".join(layer for layer in full if layer not in turned) or None
    return cohere(raw, unrotated_layers=unrotated, **fields, **window)


def llama4(raw: RawConfig) -> GPTConfig:
    """Llama 4, within the first chunk of positions: there the layers that attend to their own
    chunk alone, and those whose queries grow with the position, are as others.
    """
    raw.defaults(rms_norm_eps=1e-5, head_dim=128, rope_theta=500000.0)
    layers, turns = raw.layers("num_hidden_layers"), turning_layers(raw)
    positions = raw.size("max_position_embeddings")
    kinds = ["chunked_attention" if turn else "full_attention" for turn in turns]
    kinds = raw("layer_types", default=kinds)
    chunk = raw.size("attention_chunk_size", default=8192)
    if not isinstance(kinds, list) or not set(kinds) <= {"chunked_attention", "full_attention"}:
        choices = ("chunked_attention", "full_attention")
        raw.problems.add("layer_types is not supported", got=kinds, choices=choices)
    served = chunk if "chunked_attention" in kinds else positions
    floor = raw.size("floor_scale", default=8192)
    raw.unused("attn_scale")
    if raw("attn_temperature_tuning", default=True) and 0 in turns:
        served = min(served, floor - 1)
    if served < positions:
        raw.notes.append(
            f"of {positions} positions the first {served} are served: behind them attention is "
            "divided into chunks, and queries are scaled by their position"
        )
    size = raw.size("intermediate_size")
    step = raw.size("interleave_moe_layer_step", default=1)
    of_experts = raw("moe_layers", default=list(range(step - 1, layers, step)))
    if not isinstance(of_experts, list):
        raw.problems.add("moe_layers must be a list of layers", got=of_experts)
        of_experts = []
    normalized, rotation = raw.flag("use_qk_norm", True), rope(raw, head_size_of(raw))
    return decoder(
        raw,
        **(unscaled(rotation) if normalized else rotation),
        max_positions=min(served, positions),
        mlp_bias=False,
        unrotated_layers=layer_list(n for n in range(layers) if not turns[n]),
        qk_norm=normalized or None,
        qk_norm_layers=layer_list(n for n in range(layers) if turns[n]) if normalized else None,
        num_experts=raw.size("num_local_experts", default=16),
        experts_per_token=raw.size("num_experts_per_tok", default=1),
        normalized_experts=False,
        router_score_function="sigmoid",
        experts_scale_input=True,
        shared_expert_size=size,
        shared_expert_gate=False,
        **dense_layers(raw, lambda layer: layer not in of_experts, "intermediate_size_mlp"),
    )


def mimo_v2_flash(raw: RawConfig) -> GPTConfig:
    """MiMo-V2-Flash: layers with a window have sinks, and as a rule twice as many keys and values,
    which are narrower than the queries.
    """
    layers, groups = raw.layers("num_hidden_layers"), raw.size("num_key_value_heads", default=4)
    raw.defaults(rms_norm_eps=1e-5, head_dim=192, v_head_dim=128, rope_theta=5e6)
    raw.defaults(sliding_window=129)
    raw.defaults(partial_rotary_factor=0.334, first_k_dense_replace=1, norm_topk_prob=True)
    raw.only(n_shared_experts=0, num_shared_experts=0, add_full_attention_sink_bias=False)
    raw.unused("attention_chunk_size")  # of another engine's attention
    raw.defaults(n_shared_experts=0)
    values_scale = 1.0 if raw.null("attention_value_scale") else 0.707
    turns, local_base = two_ropes(raw, head_size_of(raw), 10000.0)
    local_base = local_base or 10000.0
    fields = windows(raw, lambda layer: layer == 0 or (layer + 1) % 6 == 0)
    full = (fields.get("full_attention_layers") or "").split(",") if fields else None
    windowed = [] if full is None else [n for n in range(layers) if str(n) not in full]
    size, narrow = head_size_of(raw), raw.size("v_head_dim")
    raw.only(swa_head_dim=size, swa_v_head_dim=narrow, add_swa_attention_sink_bias=True)
    raw.only(swa_num_attention_heads=raw.size("num_attention_heads"))
    windowed_groups = raw.size("swa_num_key_value_heads", default=groups * 2)
    if narrow > size:
        raw.problems.add("v_head_dim must be at most head_dim", got=narrow)
    return decoder(
        raw,
        attention_dense_bias=False,
        attention_output_scale=raw.real("attention_value_scale", values_scale),
        attention_sinks=bool(windowed) or None,
        sink_layers=layer_list(windowed),
        layer_num_kv_heads=layer_list(
            windowed_groups if layer in windowed else groups for layer in range(layers)
        ),
        mlp_bias=False,
        rotary_local_base=local_base if fields else None,
        **turns,
        **fields,
        **biased_experts(raw),
    )
