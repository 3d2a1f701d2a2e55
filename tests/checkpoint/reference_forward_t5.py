"""The forward pass of a T5, written plainly from the papers, over rebuilt tensors (float32)."""

from __future__ import annotations

import math

import torch

from launcher_scripts.models.t5 import T5Config
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


def encode(
    w: StoredWeights,
    config: T5Config,
    ids: torch.Tensor,
    *,
    prompt: str | None = None,
    ia3: int | None = None,
) -> torch.Tensor:
    """Encoder states [B, S, d] of ids [B, S] without padding.

    prompt, ia3: the tasks whose adapters are used
    """
    x = embedded(w, config, "shared.weight_T", ids, prompt)
    if config.position_embedding == "learned":
        x = x + w["shared.ape"][: ids.shape[1]]
    sizes = ids.shape[1], ids.shape[1]
    for i in range(config.num_layers):
        stem = f"encoder.block.{i}.layer"
        bias = _bias(w, config, "encoder", i, "layer.0.SelfAttention", *sizes, True)
        attention = f"{stem}.0.SelfAttention"
        normed = norm(w, config, f"{stem}.0.layer_norm", x)
        q, k, v = (linear(w, f"{attention}.{part}", normed) for part in "qkv")
        k, v = scaled(w, f"{attention}.k", k, ia3), scaled(w, f"{attention}.v", v, ia3)
        out = _attend(w, config, attention, (q, k, v), bias, layer=i)
        block = f"encoder.block.{i}"
        x = adapted(w, config, f"{block}.after_attention_adapter", x, *out)
        out = _mlp(w, config, f"{stem}.1", x, ia3)
        x = adapted(w, config, f"{block}.after_ffn_adapter", x, *out)
    return norm(w, config, "encoder.final_layer_norm", x)


def logits(
    w: StoredWeights,
    config: T5Config,
    ids: torch.Tensor,
    targets: torch.Tensor,
    *,
    prompt: str | None = None,
    ia3: int | None = None,
) -> torch.Tensor:
    """Logits [B, T, V] after each of the decoder's input ids `targets` [B, T]."""
    return decode(w, config, encode(w, config, ids, prompt=prompt, ia3=ia3), targets, ia3=ia3)


def decode(
    w: StoredWeights,
    config: T5Config,
    memory: torch.Tensor,
    targets: torch.Tensor,
    *,
    ia3: int | None = None,
) -> torch.Tensor:
    name = "shared.weight_T" if config.shared_embeddings else "decoder.embed_tokens.weight"
    x = w[name][targets]
    steps, length = targets.shape[1], memory.shape[1]
    if config.position_embedding == "learned":
        name = "shared.ape" if config.shared_embeddings else "decoder.embed_positions.weight"
        x = x + w[name][:steps]
    cross = torch.zeros(())
    causal = torch.full((steps, steps), -torch.inf).triu(1)
    for i in range(config.num_decoder_layers):
        stem = f"decoder.block.{i}.layer"
        normed = norm(w, config, f"{stem}.0.layer_norm", x)
        attention, block = f"{stem}.0.SelfAttention", f"decoder.block.{i}"
        own = _bias(w, config, "decoder", i, "layer.0.SelfAttention", steps, steps, False)
        if config.cross_attention_relative_bias:
            cross = _bias(w, config, "decoder", i, "layer.1.EncDecAttention", steps, length, True)
        q, k, v = linear(w, f"{attention}.qkv", normed).chunk(3, dim=-1)
        k, v = scaled(w, f"{attention}.k", k, ia3), scaled(w, f"{attention}.v", v, ia3)
        out = _attend(w, config, attention, (q, k, v), own, causal, layer=i)
        x = adapted(w, config, f"{block}.after_attention_adapter", x, *out)
        attention = f"{stem}.1.EncDecAttention"
        q = linear(w, f"{attention}.q", norm(w, config, f"{stem}.1.layer_norm", x))
        k, v = (linear(w, f"{attention}.{part}", memory) for part in "kv")
        k, v = scaled(w, f"{attention}.k", k, ia3), scaled(w, f"{attention}.v", v, ia3)
        x = x + sum(_attend(w, config, attention, (q, k, v), cross, layer=i))
        out = _mlp(w, config, f"{stem}.2", x, ia3)
        x = adapted(w, config, f"{block}.after_ffn_adapter", x, *out)
    x = norm(w, config, "decoder.final_layer_norm", x)
    out = x @ w["lm_head.weight"].T * config.logits_scale
    return out + w["shared.bias"] if config.logits_bias else out


def greedy(w: StoredWeights, config: T5Config, ids: list[int], max_tokens: int) -> list[int]:
    """Greedy answer to one input, ending with end_id when it comes."""
    memory = encode(w, config, torch.tensor([ids]))
    out = [config.start_id]
    while len(out) <= max_tokens and (len(out) == 1 or out[-1] != config.end_id):
        out.append(int(decode(w, config, memory, torch.tensor([out]))[0, -1].argmax()))
    return out[1:]


def _attend(w, config, name, qkv, bias, mask=0.0, *, layer: int):
    """The output without its bias, and the bias."""
    # [B, S, h*d] -> [B, h, S, d]
    q, k, v = (x.unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for x in qkv)
    factor = layer + 1 if config.relative_bias_layer_scaling else 1
    scores = q @ k.transpose(-1, -2) * config.attention_scale + bias * factor + mask
    return without_bias(w, f"{name}.o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def _mlp(w, config, stem, x, ia3):
    """The output without its bias, and the bias."""
    x = norm(w, config, f"{stem}.layer_norm", x)
    inner = ACTIVATIONS[config.activation](linear(w, f"{stem}.DenseReluDense.wi", x))
    if config.gated:
        inner = inner * linear(w, f"{stem}.DenseReluDense.wi2", x)
    inner = scaled(w, f"{stem}.DenseReluDense", inner, ia3)
    return without_bias(w, f"{stem}.DenseReluDense.wo", inner)


def _bias(w, config, side, layer, attention, rows, columns, both):
    """Relative bias [h, rows, columns]."""
    if config.position_embedding != "relative":
        return torch.zeros(())
    block = layer if config.relative_bias_per_layer else 0
    table = w[f"{side}.block.{block}.{attention}.relative_attention_bias.weight"]  # [h, buckets]
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None]
    return table[:, bucket(distance, config.num_buckets, config.max_distance, both)]


def bucket(distance: torch.Tensor, buckets: int, max_distance: int, both: bool) -> torch.Tensor:
    """T5's buckets: half exact, half logarithmic; with `both`, half of all for each direction."""
    offset = torch.zeros_like(distance)
    if both:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    far = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
