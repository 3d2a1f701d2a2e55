"""What config.json says of decoders with mixtures of experts, as a GPTConfig; see
huggingface_decoders."""

from __future__ import annotations

from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import decoder, granite, qwen_windows
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.huggingface_rope import Fields, windows
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


def granitemoe(raw: RawConfig, **fields: Any) -> GPTConfig:
    raw.only("position_embedding_type", "rope")
    experts = _experts(raw, "num_local_experts", normalized=True)
    return granite(raw, mlp_bias=False, **experts, **fields)


def granitemoeshared(raw: RawConfig) -> GPTConfig:
    """A Granite whose tokens also go through one more MLP, if it has a size."""
    size = raw.size("shared_intermediate_size", default=0)
    shared = {"shared_expert_size": size, "shared_expert_gate": False} if size else {}
    return granitemoe(raw, **shared)


def qwen2_moe(raw: RawConfig) -> GPTConfig:
    return decoder(
        raw,
        attention_bias=raw.flag("qkv_bias", True),
        attention_dense_bias=False,
        shared_expert_size=raw.size("shared_expert_intermediate_size"),
        **_qwen_experts(raw),
        **qwen_windows(raw),
    )


def qwen3_moe(raw: RawConfig) -> GPTConfig:
    return decoder(raw, qk_norm=True, **_qwen_experts(raw), **qwen_windows(raw))


def _qwen_experts(raw: RawConfig) -> Fields:
    """Layers without experts among those with them are not supported."""
    raw.only("decoder_sparse_step", 1)
    if raw("mlp_only_layers", default=[]):
        raw.only("mlp_only_layers", [])
    return {"ffn_size": raw.size("moe_intermediate_size"), **_said_experts(raw)}


def _said_experts(raw: RawConfig) -> Fields:
    """Where config.json says whether a token's weights are normalized."""
    normalized = raw.flag("norm_topk_prob", False)
    return _experts(raw, "num_experts", "num_local_experts", normalized=normalized)


def olmoe(raw: RawConfig) -> GPTConfig:
    """OLMoE normalizes all heads' queries and keys together."""
    raw.only("clip_qkv", None)
    return decoder(
        raw,
        norm_eps=raw.real("rms_norm_eps", 1e-5),
        qk_norm=True,
        joint_qk_norm=True,
        mlp_bias=False,
        end_id=raw.token("eos_token_id", 50279),
        pad_id=raw.token("pad_token_id", 1),
        **_said_experts(raw),
    )
