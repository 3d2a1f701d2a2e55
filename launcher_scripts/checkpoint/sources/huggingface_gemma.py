"""What the config.json of a Gemma says, as a GPTConfig; see huggingface_decoders.py."""

from __future__ import annotations

import math
from typing import Any

from launcher_scripts.checkpoint.sources.huggingface_decoders import decoder
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.huggingface_rope import Fields, two_ropes, windows
from launcher_scripts.models.gpt import GPTConfig


def gemma(raw: RawConfig, **fields: Any) -> GPTConfig:
    """Gemma 1; its MLP is the tanh form of GELU whatever the older key `hidden_act` says."""
    raw.only(use_bidirectional_attention=False)
    old = raw.text("hidden_act", "gelu_pytorch_tanh")
    activation = raw.activation("hidden_activation", "gelu_pytorch_tanh" if old == "gelu" else old)
    return decoder(
        raw,
        zero_centered_norm=True,
        embedding_scale=math.sqrt(raw.size("hidden_size")),
        activation=activation,
        **fields,
    )


def gemma2(raw: RawConfig) -> GPTConfig:
    return gemma(raw, **_gemma2(raw), **windows(raw, lambda layer: layer % 2 == 1))


def gemma3(raw: RawConfig) -> GPTConfig:
    """Gemma 3's text model: layers with a window turn by a base of their own."""
    head_size = raw.size("head_dim", default=256)
    raw.defaults(rope_theta=1e6)
    turns, local_base = two_ropes(raw, head_size, 10000.0)
    if local_base is None:
        local_base = raw.real("rope_local_base_freq", 10000.0)
    pattern = raw.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return gemma(
        raw,
        qk_norm=True,
        rotary_local_base=local_base,
        **turns,
        **_gemma2(raw),
        **windows(raw, lambda layer: (layer + 1) % pattern == 0),
    )


def vaultgemma(raw: RawConfig) -> GPTConfig:
    """A Gemma 2 without the norms of what its branches add."""
    fields = {**_gemma2(raw), "norm_placement": "pre"}
    return gemma(raw, **fields, **windows(raw, lambda layer: layer % 2 == 1))


def _gemma2(raw: RawConfig) -> Fields:
    """What Gemma 2 and 3 have beyond Gemma 1."""
    raw.unused("sliding_window_size")  # the first name of sliding_window, which transformers reads
    return {
        "norm_placement": "sandwich",
        "softmax_scale": raw.size("query_pre_attn_scalar", default=256) ** -0.5,
        "attention_softcap": raw.real("attn_logit_softcapping", 0.0) or None,
        "logits_softcap": raw.real("final_logit_softcapping", 0.0) or None,
    }
