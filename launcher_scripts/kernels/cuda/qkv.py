"""Queries, keys and values: projected, normalized, rotated, and written to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import NO_PDL, launcher, pdl_options, row_tile
from launcher_scripts.kernels.cuda.elementwise import kept, scales_of
from launcher_scripts.kernels.cuda.gemv import begin, linear_arguments, multiply, vector
from launcher_scripts.kernels.cuda.lora import add_delta, load_inner, load_up, lora_arguments
from launcher_scripts.kernels.cuda.norm import (
    load_row_stats,
    norm,
    norm_code,
    norm_terms,
    normalized,
)
from launcher_scripts.kernels.operands import (
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    RotaryTable,
    StepRows,
)
from launcher_scripts.kernels.reference import norm_heads

STORED_AT_ONCE = 2048  # numbers


@triton.jit
def _of_head(query_vector, key_vector, features, mask, is_query):
    """Numbers of a head's norm, where the mask is."""
    query = tl.load(query_vector + features, mask=mask & is_query, other=0.0)
    key = tl.load(key_vector + features, mask=mask, other=0.0)
    return tl.where(is_query, query, key)


@triton.jit(do_not_specialize=["pool_tokens"])
def rotate_and_store(
    qkv,
    query,
    keys,
    values,
    slots,
    positions,
    cosines,
    sines,
    query_gain,
    key_gain,
    query_bias,
    key_bias,
    query_eps,
    key_eps,
    pool_tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STEP: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program: AT_ONCE heads of one token, normalized and rotated where they are queries or
    keys, put in their places.

    NORM is the code of the norms, 0 without any. With STEP a token's position says which cosines
    and sines are its own.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    features = tl.arange(0, BLOCK)[None, :]
    mask = (features < SIZE) & (head < HEADS + 2 * KV_HEADS)
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    slot = tl.load(slots + token).to(tl.int64)
    turn = token.to(tl.int64)
    if STEP:
        turn = tl.load(positions + token)
    out = tl.load(source + features, mask=mask, other=0.0).to(tl.float32)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    mean = tl.zeros([AT_ONCE, 1], tl.float32)
    scale = tl.full([AT_ONCE, 1], 1.0, tl.float32)
    if NORM > 0:
        normed = mask & (is_query | is_key)
        if NORM == 1:
            mean = tl.sum(tl.where(normed, out, 0.0), 1)[:, None] / SIZE
        centred = tl.where(normed, out - mean, 0.0)
        eps = tl.where(is_query, query_eps, key_eps)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1)[:, None] / SIZE + eps)
        value = centred * scale * _of_head(query_gain, key_gain, features, normed, is_query)
        if NORM == 1:
            value += _of_head(query_bias, key_bias, features, normed, is_query)
        out = tl.where(normed, value, out)
    if HALF > 0:
        rotates = (features < 2 * HALF) & (is_query | is_key)
        upper = features >= HALF
        partner = tl.where(upper, features - HALF, features + HALF)
        angle = turn * HALF + tl.where(upper, features - HALF, features)
        other = tl.load(source + partner, mask=rotates, other=0.0).to(tl.float32)
        if NORM > 0:
            gain = _of_head(query_gain, key_gain, partner, rotates, is_query)
            other = (other - mean) * scale * gain
        if NORM == 1:
            other += _of_head(query_bias, key_bias, partner, rotates, is_query)
        cosine = tl.load(cosines + angle, mask=rotates, other=1.0)
        sine = tl.load(sines + angle, mask=rotates, other=0.0)
        out = tl.where(rotates, out * cosine + tl.where(upper, other, -other) * sine, out)
    target = query + token.to(tl.int64) * HEADS * SIZE + head * SIZE + features
    tl.store(target, out.to(query.dtype.element_ty), mask=mask & is_query)
    pool_head = (head - HEADS) % KV_HEADS
    offset = (pool_head * pool_tokens.to(tl.int64) + slot) * SIZE + features
    tl.store(keys + offset, kept(out, keys.dtype.element_ty), mask=mask & is_key)
    is_value = mask & (head >= HEADS + KV_HEADS)
    tl.store(values + offset, kept(out, values.dtype.element_ty), mask=is_value)


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: RotaryTable | None,
    slots: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None = None,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """See reference.store_kv. With the positions [N] of a step's tokens rotary is of all."""
    if norms is not None and norms.joint:
        qkv, norms = norm_heads(qkv, heads, norms, norm), None
    tokens = qkv.shape[0]
    query = torch.empty(
        tokens, heads.num_heads, heads.head_size, dtype=qkv.dtype, device=qkv.device
    )
    cosines, sines = (qkv, qkv) if rotary is None else rotary
    norm_pair = () if norms is None else (norms.query, norms.key)
    gains = [local.weight for local in norm_pair] or [qkv, qkv]
    biases = [qkv if local.bias is None else local.bias for local in norm_pair] or [qkv, qkv]
    block = triton.next_power_of_2(heads.head_size)
    total = heads.num_heads + 2 * heads.num_kv_heads
    at_once = min(triton.next_power_of_2(total), max(1, STORED_AT_ONCE // block))
    launcher(rotate_and_store, (tokens, triton.cdiv(total, at_once)))(
        qkv,
        query,
        cache.keys,
        cache.values,
        slots,
        slots if positions is None else positions,
        cosines,
        sines,
        *gains,
        *biases,
        *([local.eps for local in norm_pair] or [0.0, 0.0]),
        cache.keys.shape[1],
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        NORM=norm_code(None if norms is None else norms.query),
        STEP=positions is not None,
        BLOCK=block,
        AT_ONCE=at_once,
        num_warps=max(1, min(4, at_once * block // 256)),
        **(NO_PDL if positions is None else pdl_options(qkv)),
    )
    return query


@triton.jit
def _features(pairs, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Heads of the pairs, which pairs of theirs those are, and the two features of each."""
    pair = pairs % (SIZE // 2)
    lower = tl.where(pair < HALF, pair, pair + HALF)
    upper = lower + tl.where(pair < HALF, HALF, SIZE // 2 - HALF)
    return pairs // (SIZE // 2), pair, lower, upper


@triton.jit(do_not_specialize=["pool_tokens"], do_not_specialize_on_alignment=["adapters"])
def gemv_heads(
    x,
    row_stats,
    weight,
    scales,
    offsets,
    sums,
    lora_up,
    lora_inner,
    adapters,
    query,
    keys,
    values,
    slots,
    positions,
    cosines,
    sines,
    pool_tokens,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    LORA: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Query, key and value of one token: queries to `query`, the rest to its place in the cache.

    A program owns ROWS pairs of features, each of which rotary positions rotate together; they
    rotate HALF of each head's pairs. LORA: see lora_arguments.
    """
    if USE_PDL:
        gdc_launch_dependents()
    OUT: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, pair, lower, upper = _features(pairs, SIZE, HALF)
    rows = head * SIZE + lower
    other_rows = head * SIZE + upper
    even: tl.constexpr = (OUT // 2) % ROWS == 0
    mask = pairs < OUT // 2
    started = begin(weight, scales, rows, OUT, IN, even, BLOCK)
    other_started = begin(weight, scales, other_rows, OUT, IN, even, BLOCK)
    row_scale = scales_of(scales, weight, rows, OUT)
    other_scale = scales_of(scales, weight, other_rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    other_offset = vector(offsets, other_rows, OUT, OFFSET)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    other_sums = vector(sums, other_rows, OUT, NORM == 1)
    up, other_up = load_up(lora_up, adapters, rows, other_rows, mask, LORA, True)
    position = tl.load(positions)
    slot = tl.load(slots)
    if HALF > 0:
        rotates = (pair < HALF) & (head < HEADS + KV_HEADS) & mask
        cosine = tl.load(cosines + position * HALF + pair, mask=rotates, other=1.0)
        sine = tl.load(sines + position * HALF + pair, mask=rotates, other=0.0)
    if USE_PDL:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    inner, other_inner = load_inner(lora_inner, rows, other_rows, mask, LORA, True)
    low, high = multiply(x, started, other_started, OUT, IN, True, ROLLED, even, USE_PDL)
    mean, scale = norm_terms(total, squares, IN, NORM)
    low = normalized(low * row_scale, row_sums, mean, scale, NORM) + offset
    high = normalized(high * other_scale, other_sums, mean, scale, NORM) + other_offset
    low = add_delta(low, up, inner, LORA)
    high = add_delta(high, other_up, other_inner, LORA)
    if HALF > 0:
        low, high = low * cosine - high * sine, high * cosine + low * sine
    is_key = mask & (head >= HEADS) & (head < HEADS + KV_HEADS)
    index = (((head - HEADS) % KV_HEADS).to(tl.int64) * pool_tokens + slot) * SIZE
    _store_pair(query, head * SIZE, lower, upper, low, high, mask & (head < HEADS))
    _store_pair(keys, index, lower, upper, low, high, is_key)
    _store_pair(values, index, lower, upper, low, high, mask & (head >= HEADS + KV_HEADS))


@triton.jit
def _store_pair(target, offset, lower, upper, low, high, present):
    kind: tl.constexpr = target.dtype.element_ty
    tl.store(target + offset + lower, kept(low, kind), mask=present)
    tl.store(target + offset + upper, kept(high, kind), mask=present)


def row_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: RotaryTable | None,
    rows: StepRows,
    cache: LayerCache,
) -> Tensor:
    """reference.project_heads for one row."""
    operand = x.operand
    out_size, in_size = linear.weight.shape[0], linear.in_size
    tile = row_tile("heads", out_size, in_size, linear.quantization)
    query = operand.new_empty(1, heads.num_heads, heads.head_size)
    cosines, sines = (operand, operand) if rotary is None else rotary
    launcher(gemv_heads, (triton.cdiv(out_size // 2, tile.rows),))(
        operand,
        weight=linear.weight,
        query=query,
        keys=cache.keys,
        values=cache.values,
        slots=rows.cache_tokens,
        positions=rows.positions,
        cosines=cosines,
        sines=sines,
        pool_tokens=cache.keys.shape[1],
        IN=in_size,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **linear_arguments(x, linear),
        **lora_arguments(operand, linear, x.row_stats),
        **pdl_options(operand),
    )
    return query
