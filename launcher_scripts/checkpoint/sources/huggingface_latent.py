"""What config.json says of decoders with latent attention, as a GPTConfig; see
huggingface_decoders."""

from __future__ import annotations

from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import decoder
from launcher_scripts.checkpoint.sources.huggingface_experts import (
    biased_experts,
    dense_layers,
    experts_of,
    shared_experts,
)
from launcher_scripts.checkpoint.sources.huggingface_hybrids import kinds_of
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.rotary_scaling import Fields, mscale_of, rope_of
from launcher_scripts.models.gpt import GPTConfig, expert_groups


def is_latent(config: Any) -> bool:
    """True if attention is latent, which a checkpoint of another maker shows by its sizes."""
    return bool(config.kv_lora_rank)


def latent(raw: RawConfig, **fields: Any) -> GPTConfig:
    """A decoder with latent attention.  fields: as in `decoder`

    The norms of latent vectors have transformers' fixed epsilon, not the model's.
    """
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    still, turning = raw.size("qk_nope_head_dim"), raw.size("qk_rope_head_dim")
    raw.only(num_key_value_heads=heads, qk_head_dim=still + turning)
    if raw.raw["model_type"] != "kimi_linear":  # which has it of neither
        raw.only(head_dim=turning)
    section = raw.section("rope_parameters", "rope_scaling")
    values: Fields = {
        **rope_of(raw, section, turning),
        "head_size": still + turning,
        "num_kv_heads": heads,
        "kv_lora_rank": raw.size("kv_lora_rank"),
        "q_lora_rank": None,
        "rope_head_size": turning,
        "value_head_size": raw.size("v_head_dim", default=max(hidden // heads, 1)),
        "latent_norm_eps": 1e-6,
    }
    if raw("q_lora_rank", default=None) is not None:
        values["q_lora_rank"] = raw.size("q_lora_rank")
    if values.get("rotary_scaling") == "factors" and section("mscale_all_dim", default=None):
        factor = section.real("factor", 1.0)
        scale = mscale_of(factor, section.real("mscale_all_dim", 1.0))
        values["softmax_scale"] = scale**2 / (still + turning) ** 0.5
    return decoder(raw, **{**values, **fields})


def deepseek_v2(raw: RawConfig) -> GPTConfig:
    """DeepSeek-V2, whose classes do not divide the weights of the experts by their sum."""
    raw.only(scoring_func="softmax", moe_layer_freq=1, mlp_bias=False, rope_interleave=True)
    if raw.flag("norm_topk_prob", False):
        raw.notes.append(
            "norm_topk_prob is not obeyed: transformers' class of deepseek_v2 does not read it"
        )
    methods = ("greedy", "group_limited_greedy")
    method = raw.text("topk_method", methods[0])
    if method not in methods:
        raw.problems.add("topk_method is not supported", got=method, choices=methods)
    groups: Fields = {}
    if method == methods[0]:
        raw.unused("n_group", "topk_group")
    else:
        groups = expert_groups(raw.size("n_group"), raw.size("topk_group"), 1)
    size = raw.size("moe_intermediate_size", default=1407)
    dense = raw.size("first_k_dense_replace", default=0, minimum=0)
    return latent(
        raw,
        ffn_size=size,
        **experts_of(raw, "n_routed_experts", normalized=False),
        router_scaling_factor=raw.real("routed_scaling_factor", 1.0),
        **shared_experts(size, raw.size("n_shared_experts", default=2, minimum=0)),
        **groups,
        **dense_layers(raw, lambda layer: layer < dense),
    )


def deepseek_v3(raw: RawConfig) -> GPTConfig:
    """DeepSeek-V3 and R1, Kimi K2."""
    raw.defaults(n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5)
    raw.defaults(norm_topk_prob=True, bos_token_id=0, eos_token_id=1)
    return latent(raw, mlp_bias=False, **biased_experts(raw))


def glm4_moe_lite(raw: RawConfig) -> GPTConfig:
    """GLM-4.7 Flash; its class knows layers without experts by mlp_layer_types alone."""
    raw.defaults(rms_norm_eps=1e-5, norm_topk_prob=True, routed_scaling_factor=1.8)
    raw.defaults(first_k_dense_replace=1, bos_token_id=0, eos_token_id=1)
    if raw("mlp_layer_types", default=None) is None:
        raw.only(first_k_dense_replace=1)
    return latent(raw, mlp_bias=False, **biased_experts(raw))


def youtu(raw: RawConfig) -> GPTConfig:
    """Youtu-LLM. A smaller model made by its class says the same ids of tokens: it has none."""
    fields: Fields = {"mlp_bias": False}
    for field, key, token in (
        ("start_id", "bos_token_id", 128000),
        ("end_id", "eos_token_id", 128001),
    ):
        raw.defaults(**{key: token})
        if raw.token(key, token) == token >= raw.size("vocab_size"):
            raw.notes.append(f"{key} {token} is not of the vocabulary: left out")
            fields[field] = getattr(GPTConfig, field)
    return latent(raw, **fields)


def minicpm3(raw: RawConfig) -> GPTConfig:
    """MiniCPM3 multiplies what its branches add, as Granite does; see there. Scales that are null
    change nothing.
    """
    hidden, layers = raw.size("hidden_size"), raw.layers("num_hidden_layers")
    depth = raw.real("scale_depth", layers**0.5 if raw.null("scale_depth") else 1.4)
    residual = depth / layers**0.5
    base = hidden if raw.null("dim_model_base") else 256
    return latent(
        raw,
        embedding_scale=raw.real("scale_emb", 12.0) / residual,
        norm_eps=raw.real("rms_norm_eps", 1e-5) / residual**2,
        logits_scale=raw.size("dim_model_base", default=base) / hidden,
    )


def kimi_linear(raw: RawConfig) -> GPTConfig:
    """Kimi Linear: delta nets whose keys decay each at a rate of its own, and latent attention that
    does not turn.
    """
    layers = raw.layers("num_hidden_layers")
    section = raw.section("linear_attn_config")
    full, delta = (section(f"{name}_layers", default=None) for name in ("full_attn", "kda"))
    default: Any = [
        "full_attention" if n and n % 4 == 0 else "linear_attention" for n in range(layers)
    ]
    if isinstance(full, list) and isinstance(delta, list):  # which count from 1
        named = {
            **dict.fromkeys(delta, "linear_attention"),
            **dict.fromkeys(full, "full_attention"),
        }
        default = [named.get(layer + 1) for layer in range(layers)]
    supported = {"full_attention": "attention", "linear_attention": "kimi_delta"}
    mixers = kinds_of(raw, layers, raw("layer_types", default=default), "layer_types", supported)
    raw.only(hidden_act="silu", mla_use_nope=True, moe_router_activation_func="sigmoid")
    raw.only(use_grouped_topk=True)
    raw.unused("rope_theta", "rope_scaling", "rope_parameters", "head_dim")
    raw.defaults(rms_norm_eps=1e-5, first_k_dense_replace=1, routed_scaling_factor=2.446)
    for name, other, value in (
        ("max_position_embeddings", "model_max_length", 1048576),
        ("norm_topk_prob", "moe_renormalize", True),
        ("n_group", "num_expert_group", 1),
        ("num_experts_per_tok", "num_experts_per_token", 8),
    ):
        raw.defaults(**{name: raw(name, other, default=value)})
    fields = biased_experts(raw)
    dense = (fields.pop("dense_layers", None) or "").split(",")
    then = ["mlp" if str(layer) in dense else "moe" for layer in range(layers)]
    if "moe" not in then:
        fields = {}
    heads = raw.size("linear_num_heads", default=section.size("num_heads", default=32))
    size = raw.size("linear_head_dim", default=section.size("head_dim", default=128))
    taps = section.size("short_conv_kernel_size", default=4)
    return latent(
        raw,
        position_embedding="none",
        mlp_bias=False,
        layer_branches=",".join(
            f"{mixer}/{other}" for mixer, other in zip(mixers, then, strict=True)
        ),
        conv_kernel=raw.size("linear_conv_kernel_dim", default=taps),
        delta_num_heads=heads,
        delta_num_key_heads=heads,
        delta_key_head_size=size,
        delta_value_head_size=size,
        **fields,
    )


def saved_mlps(raw: RawConfig) -> list[str]:
    """The variant of names by which transformers saves the MLPs of layers without experts."""
    ending = "block_sparse_moe.gate_proj.weight"
    return ["_saved"] if any(name.endswith(ending) for name in raw.keys) else []


def rope_pairs(raw: RawConfig) -> list[str]:
    """The variant of names: neighbours turn together unless config.json says otherwise."""
    return ["_interleaved"] if raw.flag("rope_interleave", True) else []
