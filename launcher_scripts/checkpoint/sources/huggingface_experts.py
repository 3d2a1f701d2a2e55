"""What config.json says of decoders with mixtures of experts, as a GPTConfig; see
huggingface_decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import (
    decoder,
    ernie4_5,
    exaone4_attention,
    granite,
    head_size_of,
    qwen_windows,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import Fields, two_ropes, windows
from launcher_scripts.common.quantization import CLAMP, SLOPE
from launcher_scripts.models.family import layer_list
from launcher_scripts.models.gpt import GPTConfig


def mixtral(raw: RawConfig) -> GPTConfig:
    return decoder(raw, **_experts(raw, "num_local_experts", normalized=True), **windows(raw))


def _experts(raw: RawConfig, *names: str, normalized: bool) -> Fields:
    """How many experts there are, by one of these names, and how many a token goes through."""
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
        **_experts(raw, "num_local_experts", "num_experts", normalized=True),
        **windows(raw, lambda layer: layer % 2 == 1),
    )


def granitemoe(raw: RawConfig, **fields: Any) -> GPTConfig:
    raw.only(position_embedding_type="rope")
    experts = _experts(raw, "num_local_experts", normalized=True)
    return granite(raw, mlp_bias=False, **experts, **fields)


def granitemoeshared(raw: RawConfig) -> GPTConfig:
    """A Granite whose tokens also go through one more MLP, if it has a size."""
    size = raw.size("shared_intermediate_size", default=1024, least=0)
    shared = {"shared_expert_size": size, "shared_expert_gate": False} if size else {}
    return granitemoe(raw, **shared)


def qwen2_moe(raw: RawConfig) -> GPTConfig:
    return decoder(
        raw,
        attention_bias=raw.flag("qkv_bias", True),
        attention_dense_bias=False,
        shared_expert_size=raw.size("shared_expert_intermediate_size"),
        **qwen_experts(raw),
        **qwen_windows(raw),
    )


def qwen3_moe(raw: RawConfig) -> GPTConfig:
    return decoder(raw, qk_norm=True, **qwen_experts(raw), **qwen_windows(raw))


def qwen_experts(raw: RawConfig) -> Fields:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers has it."""
    step, said = raw.size("decoder_sparse_step", default=1), raw("mlp_only_layers", default=[])
    if not isinstance(said, list):
        raw.problems.add("mlp_only_layers must be a list of layers", got=said)
        said = []
    return {
        "ffn_size": raw.size("moe_intermediate_size"),
        **_said_experts(raw),
        **_dense(raw, lambda layer: (layer + 1) % step != 0 or layer in said),
    }


def _dense(raw: RawConfig, without: Callable[[int], bool]) -> Fields:
    """The layers without experts, whose MLP has the size of a model without them.

    without: whether a layer is one of them where `mlp_layer_types` does not say it
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
    size = raw.size("intermediate_size")
    return {} if named is None else {"dense_layers": named, "dense_ffn_size": size}


def _said_experts(raw: RawConfig, *names: str) -> Fields:
    """Where config.json says whether a token's weights are normalized.

    names: further ones of their number
    """
    said = raw.flag("norm_topk_prob", False)
    return _experts(raw, "num_experts", "num_local_experts", *names, normalized=said)


def olmoe(raw: RawConfig) -> GPTConfig:
    """OLMoE normalizes all heads' queries and keys together."""
    raw.only(clip_qkv=None)
    raw.defaults(rms_norm_eps=1e-5, eos_token_id=50279, pad_token_id=1)
    experts = _said_experts(raw)
    return decoder(raw, qk_norm=True, joint_qk_norm=True, mlp_bias=False, **experts)


def glm4_moe(raw: RawConfig) -> GPTConfig:
    """GLM-4.5 to 4.7."""
    raw.defaults(rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    raw.defaults(first_k_dense_replace=1, norm_topk_prob=True)
    return decoder(
        raw,
        qk_norm=raw.flag("use_qk_norm", False) or None,
        attention_dense_bias=False,
        mlp_bias=False,
        **_biased_experts(raw),
    )


def solar_open(raw: RawConfig) -> GPTConfig:
    """Solar Open, all of whose layers have experts: intermediate_size is not used."""
    raw.defaults(rms_norm_eps=1e-5, rope_theta=1e6, norm_topk_prob=True)
    raw.defaults(intermediate_size=raw.size("moe_intermediate_size"))
    experts = _biased_experts(raw)
    return decoder(raw, attention_dense_bias=False, mlp_bias=False, **experts)


def exaone_moe(raw: RawConfig) -> GPTConfig:
    """K-EXAONE: EXAONE 4's attention, behind norms of what it reads."""
    raw.defaults(rms_norm_eps=1e-5, eos_token_id=53, pad_token_id=0)
    raw.defaults(first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5)
    return decoder(
        raw,
        qk_norm=True,
        attention_bias=False,
        mlp_bias=False,
        **exaone4_attention(raw),
        **_biased_experts(raw),
    )


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
        **_said_experts(raw),
        **_dense(raw, lambda _: False),
    )


def dots1(raw: RawConfig) -> GPTConfig:
    """dots.llm1; the first max_window_layers layers have no window."""
    first = raw.size("max_window_layers", default=62)
    return decoder(
        raw,
        qk_norm=True,
        mlp_bias=False,
        **_biased_experts(raw),
        **windows(raw, lambda layer: layer < first),
    )


def _biased_experts(raw: RawConfig) -> Fields:
    """Experts as DeepSeek-V3's, without its groups, behind layers without them."""
    raw.only(n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc")
    size = raw.size("moe_intermediate_size")
    dense = raw.size("first_k_dense_replace", default=0, least=0)
    return {
        **_said_experts(raw, "n_routed_experts"),
        "ffn_size": size,
        "router_score_function": "sigmoid",
        "router_scaling_factor": raw.real("routed_scaling_factor", 1.0),
        "expert_bias": True,
        "shared_expert_size": size * raw.size("n_shared_experts", "num_shared_experts", default=1),
        "shared_expert_gate": False,
        **_dense(raw, lambda layer: layer < dense),
    }


def ernie4_5_moe(raw: RawConfig) -> GPTConfig:
    """ERNIE 4.5 chooses by a softmax plus a bias."""
    raw.only(moe_use_aux_free=True, moe_gate="topk", moe_gate_act="softmax")
    raw.unused("moe_norm_min", "moe_capacity")  # against a division by 0; of the training
    layers, interval = raw.layers("num_hidden_layers"), raw.size("moe_layer_interval", default=1)
    first = raw.size("moe_layer_start_index", default=1, least=0)
    last = raw.size("moe_layer_end_index", default=-1, least=-1) % layers
    size = raw.size("moe_intermediate_size")
    fields = {
        "num_experts": raw.size("moe_num_experts"),
        "experts_per_token": raw.size("moe_k"),
        "normalized_experts": True,
        "ffn_size": size,
        "expert_bias": True,
    }
    shared = raw.size("moe_num_shared_experts", default=2, least=0)
    if shared:
        fields |= {"shared_expert_size": size * shared, "shared_expert_gate": False}
    return ernie4_5(
        raw,
        **fields,
        **_dense(raw, lambda n: (n + 1) % interval != 0 or not first <= n <= last),
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
        **_experts(raw, "num_local_experts", "num_experts", normalized=True),
    )
