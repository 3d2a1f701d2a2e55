"""The operations of a transformer in plain torch: their definition, and the CPU implementation.

N is the number of tokens of a step, B of rows. The residual stream x is float32 [N, hidden];
everything else has the type of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels import window_attention as windows
from launcher_scripts.kernels.operands import Heads, LayerCache, Linear, Norm, RelativeBias

QUERIES_AT_ONCE = 512

window_attention = windows.window_attention

ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "squared_relu": lambda x: functional.relu(x).square(),
}


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of `table` for ids [N]: float32 [N, hidden].

    `table` holds the ids from `first_id` on; other ids give zeros, so that the sum over the
    ranks that share a vocabulary is the whole lookup.
    """
    local = ids - first_id
    held = (local >= 0) & (local < table.shape[0])
    rows = functional.embedding(local.clamp(0, table.shape[0] - 1), table)
    return torch.where(held[:, None], rows.float(), 0.0)


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """Layer or RMS norm of x [N, hidden], statistics in float32."""
    x = x.float()
    if weights.kind == "layernorm":
        out = functional.layer_norm(x, x.shape[-1:], weights.weight, weights.bias, weights.eps)
    else:
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + weights.eps) * weights.weight
    return out.to(dtype)


def dense(linear: Linear) -> Linear:
    """The same projection with its weight in the compute type."""
    if linear.scale is None:
        return linear
    weight = (linear.weight.float() * linear.scale[:, None]).to(linear.dtype)
    return Linear(weight, linear.bias, linear.norm)


def project(x: Tensor, linear: Linear) -> Tensor:
    """linear(norm(x)), or linear(x) where it has no norm: [N, out]."""
    linear = dense(linear)
    return functional.linear(_normalized(x, linear), linear.weight, linear.bias)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """residual + linear(x): float32 [N, hidden]."""
    linear = dense(linear)
    return residual + functional.linear(x, linear.weight, linear.bias)


def add_residual(partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + partial + bias: float32 [N, hidden], after the sum over ranks."""
    total = residual + partial
    return total if bias is None else total + bias


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """act(up(norm(x))), times gate(norm(x)) where the MLP is gated: [N, ffn]."""
    up, gate = dense(up), gate and dense(gate)
    normalized = _normalized(x, up)
    hidden = ACTIVATIONS[activation](functional.linear(normalized, up.weight, up.bias))
    if gate is None:
        return hidden
    return hidden * functional.linear(normalized, gate.weight, gate.bias)


def rotary_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [N, rotary_size / 2], for positions [N]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """Rotate queries and keys of qkv [N, q + k + v]; put keys and values at cache tokens slots [N].

    Rotary positions turn the first dimensions of a head by halves (Su et al. 2021, in the form of
    GPT-NeoX). Returns the queries [N, heads, head_size].
    """
    tokens = qkv.shape[0]
    split = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    query, key, value = qkv.view(tokens, -1, heads.head_size).split(split, dim=1)
    if rotary is not None:
        query, key = _rotate(query, *rotary), _rotate(key, *rotary)
    cache.keys[:, slots] = key.transpose(0, 1)  # [kv_heads, N, head_size]
    cache.values[:, slots] = value.transpose(0, 1)
    return query


def context_attention(
    query: Tensor,
    cache: LayerCache,
    start: int,
    past: int,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
) -> Tensor:
    """Causal attention of one row's new tokens: [n, heads * head_size].

    query [n, heads, head_size] holds positions past..past+n-1; the row's keys and values are
    already in the cache from token `start` on. `slopes` float32 [heads]: ALiBi (Press et al.
    2022), bias slope * (k - q). `scale` multiplies q.k; None: head_size ** -0.5.
    """
    new = query.shape[0]
    whole = past + new
    key, value = (_for_heads(part[:, start : start + whole], query) for part in _parts(cache))
    mask = None
    if slopes is not None or relative is not None or past:
        distance = torch.arange(whole, device=query.device) - torch.arange(
            past, whole, device=query.device
        ).unsqueeze(1)  # [n, T], k - q
        mask = torch.zeros_like(distance, dtype=torch.float32)
        if slopes is not None:
            mask = slopes[:, None, None] * distance
        if relative is not None:
            mask = mask + _relative_scores(relative, past, new, whole)
        mask = mask.masked_fill(distance > 0, float("-inf")).to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=None if mask is None else mask.expand(1, query.shape[1], new, whole),
        is_causal=mask is None,
        scale=scale,
    )
    return out[0].transpose(0, 1).reshape(new, -1)


def source_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    relative: RelativeBias | None = None,
    first: int = 0,
) -> Tensor:
    """Attention of rows of one length to all of their keys: [B, n, heads * head_size].

    query [B, n, heads, head_size] holds positions first..first+n-1; key and value are
    [B, heads, T, head_size]. Queries go in pieces where there is a bias, which takes
    heads * n * T numbers.
    """
    outputs = []
    at_once = query.shape[1] if relative is None else QUERIES_AT_ONCE
    for start, part in enumerate(query.split(at_once, dim=1)):
        bias = None
        if relative is not None:
            position = first + start * at_once
            bias = _relative_scores(relative, position, part.shape[1], key.shape[2])
        out = functional.scaled_dot_product_attention(
            part.transpose(1, 2),
            key,
            value,
            attn_mask=None if bias is None else bias.to(query.dtype)[None],
            scale=scale,
        )
        outputs.append(out.transpose(1, 2).flatten(2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def source_attention_weights(
    query: Tensor, key: Tensor, *, scale: float, relative: RelativeBias | None = None
) -> Tensor:
    """How source_attention weighs the keys: float32 [B, heads, n, T]."""
    scores = query.transpose(1, 2).float() @ key.transpose(-1, -2).float() * scale
    if relative is not None:
        scores = scores + _relative_scores(relative, 0, query.shape[1], key.shape[2])
    return scores.softmax(-1)


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per row: [B, heads * head_size].

    query [B, heads, head_size]; row b attends to the lengths[b] cache tokens from starts[b] on,
    its own included where they are its own. `longest` bounds the lengths. `scale` as in
    context_attention; `relative` counts from the row's positions [B].
    """
    rows, num_heads, head_size = query.shape
    offsets = torch.arange(longest, device=query.device)
    tokens = torch.where(offsets < lengths[:, None], starts[:, None] + offsets, starts[:, None])
    group = num_heads // cache.keys.shape[0]
    key = cache.keys[:, tokens].float()  # [kv_heads, B, T, head_size]
    value = cache.values[:, tokens].float()
    grouped = query.float().view(rows, -1, group, head_size).transpose(0, 1)  # [kv, B, g, D]
    scores = grouped @ key.transpose(-1, -2) * _scale(scale, head_size)  # [kv, B, g, T]
    if slopes is not None:
        distance = offsets - (lengths[:, None] - 1)  # [B, T]
        scores = scores + slopes.view(-1, 1, group, 1) * distance[None, :, None]
    if relative is not None:
        distance = (offsets - positions[:, None]).clamp(-relative.reach, relative.reach)
        bias = relative.table[:, distance + relative.reach]  # [heads, B, T]
        scores = scores + bias.unflatten(0, (-1, group)).transpose(1, 2)
    scores = scores.masked_fill((offsets >= lengths[:, None])[None, :, None], float("-inf"))
    out = scores.softmax(-1) @ value  # [kv, B, g, D]
    return out.transpose(0, 1).reshape(rows, -1).to(query.dtype)


def logits(x: Tensor, head: Linear) -> Tensor:
    """Next-token logits, float32 [N, vocab of this rank], accumulated in float32."""
    bias = None if head.bias is None else head.bias.float()
    return functional.linear(_normalized(x, head).float(), head.weight.float(), bias)


def _relative_scores(relative: RelativeBias, first: int, queries: int, keys: int) -> Tensor:
    """The bias of queries first..first+queries-1 on keys 0..keys-1: [heads, queries, keys].

    A score depends on k - q alone, so each query's row is a window of one line of distances.
    """
    nearest, farthest = keys - first, first + queries - 1
    distances = torch.arange(-farthest, nearest, device=relative.table.device)
    places = distances.clamp(-relative.reach, relative.reach) + relative.reach
    return relative.table[:, places].unfold(-1, keys, 1).flip(1)


def _scale(scale: float | None, head_size: int) -> float:
    return head_size**-0.5 if scale is None else scale


def argmax(logits: Tensor) -> Tensor:
    """The largest logit's id of every row, int64 [N]; the lowest id of equal ones."""
    return logits.argmax(-1)


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.weight.dtype)
    return norm(x, linear.norm, linear.weight.dtype)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _parts(cache: LayerCache) -> tuple[Tensor, Tensor]:
    return cache.keys, cache.values


def _for_heads(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values [kv_heads, T, head_size], repeated so that every query head has its own."""
    return part.repeat_interleave(query.shape[1] // part.shape[0], dim=0)
