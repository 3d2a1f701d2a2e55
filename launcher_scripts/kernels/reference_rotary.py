"""Queries, keys and values of reference.py: turned by their positions, put in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import HeadNorms, Heads, LayerCache, Norm


def rotary_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [N, rotary_size / 2], for positions [N]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def norm_heads(
    qkv: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    norm: Callable[[Tensor, Norm, torch.dtype], Tensor],
) -> Tensor:
    """qkv [N, q + k + v] with every head's query and key normalized by `norm`, where there are
    norms."""
    if norms is None:
        return qkv
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    query, key, value = qkv.unflatten(1, (-1, heads.head_size)).split(sizes, 1)
    query, key = (
        norm(part.flatten(0, 1), weights, qkv.dtype).view_as(part)
        for part, weights in ((query, norms.query), (key, norms.key))
    )
    return torch.cat((query, key, value), 1).flatten(1)


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


def turned(qkv: Tensor, heads: Heads, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """qkv [N, (heads + 2 * kv_heads) * head_size] with its queries and keys turned, as store_kv
    does.
    """
    parts = qkv.unflatten(1, (-1, heads.head_size))
    count = heads.num_heads + heads.num_kv_heads
    return torch.cat((_rotate(parts[:, :count], *rotary), parts[:, count:]), 1).flatten(1)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, dim=-1).to(x.dtype)
