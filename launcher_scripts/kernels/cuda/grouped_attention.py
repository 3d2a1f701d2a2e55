"""Attention of one new token per row, with matrix products; for steps of many rows.

The query heads that share keys and values are one side of a product, so these are read once, and
the arithmetic units are left to the softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.attention_tile import (
    add_sink,
    apply_rotary,
    capped,
    load_keys_values,
    merge_if_last,
    newest_token,
    part_of,
    reached,
)
from launcher_scripts.kernels.cuda.e4m3 import for_products, in_halves
from launcher_scripts.kernels.cuda.norm import store_expected
from launcher_scripts.kernels.cuda.prefetch import prefetch_both


@triton.jit
def _gains(
    tokens,
    slope,
    length,
    bias,
    pos,
    reach,
    last,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """What scores [M, T] gain by the distance of the tokens [T]; -inf from `last` on."""
    gains = tl.where(tokens < last, 0.0, -float("inf"))[None, :]
    if ALIBI:
        gains = gains + slope[:, None] * (tokens - (length - 1)).to(tl.float32)[None, :]
    if RELATIVE:
        place = reached(tokens - pos, reach)
        gains = gains + tl.load(bias[:, None] + place[None, :])
    return gains


@triton.jit
def _add_tokens(
    m,
    total,
    acc,
    key,
    value,
    query,
    scale,
    gains,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    key, value = in_halves(key, PTX).to(query.dtype), in_halves(value, PTX).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    scores = capped(scores, SOFTCAP) + gains
    m_new = tl.maximum(m, tl.max(scores, 1))
    alpha = tl.exp(m - m_new)
    p = tl.exp(scores - m_new[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit(do_not_specialize=["pool_tokens"])
def attend_grouped(
    query,
    keys,
    values,
    starts,
    lengths,
    slopes,
    sinks,
    positions,
    bias,
    out,
    partial,
    weights,
    arrivals,
    cosines,
    sines,
    row_stats,
    pool_tokens,
    scale,
    reach,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    RELATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    USE_PDL: tl.constexpr,
    FRESH: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program: one row, GROUP query heads (padded to MEMBERS), one of SPLITS parts.

    See decode_attention.attend; the query is rounded to the compute type, or as e4m3.py says, and
    so are the weights of the values.
    """
    if USE_PDL:
        gdc_launch_dependents()
    if NORM > 0 and tl.program_id(2) == SPLITS:
        store_expected(row_stats, tl.program_id(1) == 0, STATE, NORM, STATE_PARTS, USE_PDL)
        return
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    old, first, last, parts = part_of(length - (1 if FRESH else 0), split, SPLITS, TILE)
    if first > 0 and first >= old:
        return
    pool = (group * pool_tokens.to(tl.int64) + tl.load(starts + row)) * SIZE
    pos = tl.load(positions + row).to(tl.int32) if RELATIVE or HALF > 0 else 0
    members, features = tl.arange(0, MEMBERS), tl.arange(0, BLOCK)
    heads = group * GROUP + tl.minimum(members, GROUP - 1)
    slope = tl.load(slopes + heads) if ALIBI else 0.0
    own_bias = bias + heads * (2 * reach + 1) if RELATIVE else 0
    if USE_PDL:
        prefetch_both(keys, values, pool + first * SIZE, (last - first) * SIZE, PREFETCH * BLOCK)
        gdc_wait()
    width: tl.constexpr = (HEADS + (2 * (HEADS // GROUP) if STORE else 0)) * SIZE
    asked, stride = query + row * width, tl.num_programs(0) * width
    held = (features < SIZE)[None, :] & (members < GROUP)[:, None]
    source, rotary = asked + heads[:, None] * SIZE, (cosines, sines, pos)
    exact = apply_rotary(source, features[None, :], held, stride, rotary, PARTS, HALF)
    rounded = for_products(exact, keys.dtype.element_ty, out.dtype.element_ty)
    total = tl.zeros([MEMBERS], tl.float32)
    m, acc = total - 1e30, tl.zeros([MEMBERS, BLOCK], tl.float32)
    if FRESH and split == 0:
        place = pool + old.to(tl.int64) * SIZE + features
        new = asked + (HEADS + group) * SIZE, asked + (HEADS + HEADS // GROUP + group) * SIZE
        key, value = newest_token(
            (keys, values), place, new, stride, rotary, STORE, PARTS, SIZE, HALF
        )
        m = capped(tl.sum(exact * key[None, :], 1) * scale, SOFTCAP)
        if RELATIVE:
            m += tl.load(own_bias + reached(old - pos, reach))
        total += 1.0
        acc += value[None, :]
    if SINKS and split == 0:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + heads))
    for tile in range(first, last, TILE):
        tokens = tile + tl.arange(0, TILE)
        gains = _gains(tokens, slope, length, own_bias, pos, reach, last, ALIBI, RELATIVE)
        key, value = load_keys_values(keys, values, pool, tokens, last, SIZE, BLOCK)
        m, total, acc = _add_tokens(
            m, total, acc, key, value, rounded, scale, gains, SOFTCAP, PRECISION, PTX
        )
    place = row * HEADS + heads
    if SPLITS == 1:
        target = out + place[:, None] * SIZE + features[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=held)
    else:
        part = place * SPLITS + split
        tl.store(partial + part[:, None] * SIZE + features[None, :], acc, mask=held)
        tl.store(weights + part * 2, m, mask=members < GROUP)
        tl.store(weights + part * 2 + 1, total, mask=members < GROUP)
        merge_if_last(
            *(partial, weights, arrivals, out, row * (HEADS // GROUP) + group, parts),
            *(GROUP, SIZE, BLOCK, SPLITS, SPLIT_BLOCK),
        )
