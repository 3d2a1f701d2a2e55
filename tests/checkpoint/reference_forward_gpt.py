"""The forward pass of a GPT, written plainly, over rebuilt tensors (float32)."""

from __future__ import annotations

import math

import torch

from launcher_scripts.models.gpt import GPTConfig
from tests.checkpoint.reference_forward_parts import (
    ACTIVATIONS,
    adapted,
    embedded,
    linear,
    norm,
    scaled,
    without_bias,
)
from tests.checkpoint.reference_weights import StoredWeights


def logits(
    w: StoredWeights,
    config: GPTConfig,
    ids: torch.Tensor,
    *,
    prompt: str | None = None,
    ia3: int | None = None,
) -> torch.Tensor:
    """Logits [B, S, V] of ids [B, S]. prompt, ia3: the tasks whose adapters are used."""
    x = embedded(w, config, "wte", ids, prompt)
    if config.position_embedding == "learned":
        x = x + w["wpe"][: ids.shape[1]]
    if config.embedding_norm:
        x = norm(w, config, "pre_decoder_layernorm", x)
    for i in range(config.num_layers):
        x = _layer(w, config, f"layers.{i}", x, ia3)
    if config.final_norm:
        x = norm(w, config, "final_layernorm", x)
    return x @ w["wte" if config.tied_embeddings else "lm_head.weight"].T


def _layer(w, config, stem, x, ia3):
    before, after = f"{stem}.input_layernorm", f"{stem}.post_attention_layernorm"
    if config.norm_placement == "pre":
        out, bias = _attention(w, config, stem, norm(w, config, before, x), ia3)
        x = adapted(w, config, f"{stem}.after_attention_adapter", x, out, bias)
        out, bias = _mlp(w, config, stem, norm(w, config, after, x), ia3)
        return adapted(w, config, f"{stem}.after_ffn_adapter", x, out, bias)
    x = norm(w, config, before, x + sum(_attention(w, config, stem, x, ia3)))
    return norm(w, config, after, x + sum(_mlp(w, config, stem, x, ia3)))


def _attention(w, config, stem, x, ia3):
    """The output without its bias, and the bias."""
    qkv = linear(w, f"{stem}.attention.query_key_value", x)
    # [B, S, heads * head_size] -> [B, heads, S, head_size]; a shard set may hold kv copies.
    heads = qkv.unflatten(-1, (-1, config.head_size)).transpose(1, 2)
    kv_heads = (heads.shape[1] - config.num_heads) // 2
    q, k, v = heads.split((config.num_heads, kv_heads, kv_heads), dim=1)
    # [B, kv heads, S, head_size] -> [B, S, kv_size] and back
    k, v = (
        scaled(w, f"{stem}.attention.{name}", part.transpose(1, 2).flatten(-2), ia3)
        .unflatten(-1, (-1, config.head_size))
        .transpose(1, 2)
        for name, part in (("k", k), ("v", v))
    )
    k, v = (part.repeat_interleave(config.num_heads // kv_heads, dim=1) for part in (k, v))
    if config.qk_norm:
        q = norm(w, config, f"{stem}.attention.query_norm", q)
        k = norm(w, config, f"{stem}.attention.key_norm", k)
    if config.position_embedding == "rope":
        q, k = _rotate(config, q), _rotate(config, k)
    scores = q @ k.transpose(-1, -2) / math.sqrt(config.head_size)
    length = x.shape[1]
    if config.position_embedding == "alibi":
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        scores = scores + _slopes(config.num_heads)[:, None, None] * distance
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return without_bias(w, f"{stem}.attention.dense", out)


def _mlp(w, config, stem, x, ia3):
    """The output without its bias, and the bias."""
    inner = ACTIVATIONS[config.activation](linear(w, f"{stem}.mlp.dense_h_to_4h", x))
    if config.gated:
        inner = inner * linear(w, f"{stem}.mlp.dense_h_to_4h_2", x)
    return without_bias(w, f"{stem}.mlp.dense_4h_to_h", scaled(w, f"{stem}.mlp", inner, ia3))


def _rotate(config, x):
    """Rotary positions by halves over the first rotary_size dimensions."""
    size = config.rotary_size
    turning, still = x[..., :size], x[..., size:]
    frequency = config.rotary_base ** (-torch.arange(0, size, 2) / size)
    if config.rotary_scaling == "llama3":
        frequency = torch.tensor([_llama3(config, each) for each in frequency.tolist()])
    position = torch.arange(x.shape[-2]) / config.rotary_interpolation_factor
    angle = (position[:, None] * frequency).repeat(1, 2)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
    return torch.cat((turned, still), dim=-1)


def _llama3(config, frequency: float) -> float:
    """Llama 3.1's rule by wavelengths: long ones grow, short ones stay, others are in between."""
    length = 2 * math.pi / frequency
    longest = config.rotary_original_positions / config.rotary_low_frequency_factor
    shortest = config.rotary_original_positions / config.rotary_high_frequency_factor
    if length < shortest:
        return frequency
    slow = frequency / config.rotary_scaling_factor
    if length > longest:
        return slow
    low, high = config.rotary_low_frequency_factor, config.rotary_high_frequency_factor
    part = (config.rotary_original_positions / length - low) / (high - low)
    return (1 - part) * slow + part * frequency


def _slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes: powers of 2^(-8/p), p the largest power of two, then the odd ones between."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    slopes += [2 ** (-4 / power * (2 * i + 1)) for i in range(heads - power)]
    return torch.tensor(slopes)
