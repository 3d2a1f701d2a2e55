"""Attention of new tokens over the last tokens before each of them, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels.operands import LayerCache

QUERIES_AT_ONCE = 512


def window_attention(
    query: Tensor,
    cache: LayerCache,
    start: int,
    past: int,
    window: int,
    slopes: Tensor | None,
) -> Tensor:
    """Causal attention of one row's new tokens, each over itself and the window - 1 before it.

    As context_attention otherwise: query [n, heads, head_size] at positions past..past+n-1 of the
    extent that begins at cache token `start`; [n, heads * head_size].
    """
    pieces = query.split(QUERIES_AT_ONCE)
    return torch.cat(
        [
            _attend(piece, cache, start, past + number * QUERIES_AT_ONCE, window, slopes)
            for number, piece in enumerate(pieces)
        ]
    )


def _attend(
    query: Tensor,
    cache: LayerCache,
    start: int,
    past: int,
    window: int,
    slopes: Tensor | None,
) -> Tensor:
    """A few queries of window_attention: their masks are as wide as the window and they."""
    new, num_heads, _ = query.shape
    first = max(0, past - window + 1)
    keys = torch.arange(first, past + new, device=query.device)
    distance = keys - torch.arange(past, past + new, device=query.device)[:, None]  # [n, T]
    mask = torch.zeros_like(distance, dtype=torch.float32)
    if slopes is not None:
        mask = slopes[:, None, None] * distance
    outside = (distance > 0) | (distance <= -window)
    mask = mask.masked_fill(outside, float("-inf")).to(query.dtype)
    key, value = (
        part[:, start + first : start + past + new].repeat_interleave(
            num_heads // part.shape[0], dim=0
        )
        for part in (cache.keys, cache.values)
    )
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=mask.expand(1, num_heads, new, keys.shape[0]),
    )
    return out[0].transpose(0, 1).reshape(new, -1)
