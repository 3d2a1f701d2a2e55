"""Queries, keys and values: rotated by their positions, put in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.e4m3 import kept
from launcher_scripts.kernels.operands import Heads, LayerCache

STORED_AT_ONCE = 2048  # numbers


@triton.jit(do_not_specialize=["pool_tokens"])
def rotate_and_store(
    qkv,
    query,
    keys,
    values,
    slots,
    cosines,
    sines,
    pool_tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program: AT_ONCE heads of one token, rotated where they are queries or keys, put in their
    places."""
    token = tl.program_id(0)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    features = tl.arange(0, BLOCK)[None, :]
    held = (features < SIZE) & (head < HEADS + 2 * KV_HEADS)
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    out = tl.load(source + features, mask=held, other=0.0).to(tl.float32)
    if HALF > 0:
        rotates = (features < 2 * HALF) & (head < HEADS + KV_HEADS)
        upper = features >= HALF
        partner = tl.where(upper, features - HALF, features + HALF)
        angle = token * HALF + tl.where(upper, features - HALF, features)
        other = tl.load(source + partner, mask=rotates, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + angle, mask=rotates, other=1.0)
        sine = tl.load(sines + angle, mask=rotates, other=0.0)
        out = out * cosine + tl.where(upper, other, -other) * sine
    asks = held & (head < HEADS)
    target = query + token.to(tl.int64) * HEADS * SIZE + head * SIZE + features
    tl.store(target, out.to(query.dtype.element_ty), mask=asks)
    slot = tl.load(slots + token).to(tl.int64)
    pool_head = (head - HEADS) % KV_HEADS
    place = (pool_head * pool_tokens.to(tl.int64) + slot) * SIZE + features
    is_key = held & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(keys + place, kept(out, keys.dtype.element_ty), mask=is_key)
    is_value = held & (head >= HEADS + KV_HEADS)
    tl.store(values + place, kept(out, values.dtype.element_ty), mask=is_value)


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """See reference.store_kv."""
    tokens = qkv.shape[0]
    query = torch.empty(
        tokens, heads.num_heads, heads.head_size, dtype=qkv.dtype, device=qkv.device
    )
    cosines, sines = (qkv, qkv) if rotary is None else rotary
    block = triton.next_power_of_2(heads.head_size)
    total = heads.num_heads + 2 * heads.num_kv_heads
    at_once = min(triton.next_power_of_2(total), max(1, STORED_AT_ONCE // block))
    launcher(rotate_and_store, (tokens, triton.cdiv(total, at_once)))(
        qkv,
        query,
        cache.keys,
        cache.values,
        slots,
        cosines,
        sines,
        cache.keys.shape[1],
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        BLOCK=block,
        AT_ONCE=at_once,
        num_warps=max(1, min(4, at_once * block // 256)),
    )
    return query
