"""Attention of one new token per row over the key/value cache, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.attention_tile import (
    add_tile,
    bonus_of,
    load_keys_values,
    summed,
    turned,
)


def attention_shape(longest: int) -> tuple[int, int, int]:
    """(splits, tokens per piece, warps) for contexts up to `longest`: measured on an H200.

    A short context is over sooner in one piece than with parts to merge.
    """
    if longest <= 256:
        return 1, 128, 8
    return min(32, -(-longest // 64)), 64, 4


@triton.jit
def _newest_first(
    keys,
    values,
    place,
    new_key,
    new_value,
    stride,
    cosines,
    sines,
    turn,
    scaled,
    bias,
    distance,
    reach,
    present,
    stores,
    RELATIVE: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) of the newest token, if it is here.

    With STORE it comes from new_key and new_value, and goes to its place in the cache.
    """
    largest = -1e30
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    if present:
        if STORE:
            kind = keys.dtype.element_ty
            fresh = turned(new_key, stride, cosines, sines, turn, PARTS, SIZE, HALF, BLOCK)
            rounded = fresh.to(kind)
            value = summed(new_value + features, stride, held, PARTS).to(kind)
            tl.store(keys + place, rounded, mask=held & stores)
            tl.store(values + place, value, mask=held & stores)
            key = rounded.to(tl.float32)
            mixed = value.to(tl.float32)
        else:
            key = tl.load(keys + place, mask=held, other=0.0).to(tl.float32)
            mixed = tl.load(values + place, mask=held, other=0.0).to(tl.float32)
        largest = tl.sum(key * scaled, 0)
        if RELATIVE:
            largest += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach) + reach)
        total = 1.0
    return largest, total, mixed


@triton.jit
def _part(old, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """(old, first and last + 1 of this part of that many tokens, how many parts have any)"""
    share = tl.cdiv(tl.maximum(1, tl.cdiv(old, SPLITS)), TILE) * TILE
    first = split * share
    return old, first, tl.minimum(first + share, old), tl.maximum(1, tl.cdiv(old, share))


@triton.jit
def attend(
    query,
    keys,
    values,
    starts,
    lengths,
    slopes,
    positions,
    bias,
    out,
    partial,
    weights,
    arrivals,
    cosines,
    sines,
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
    RELATIVE: tl.constexpr,
    EARLY: tl.constexpr,
    FRESH: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row, one query head, one of SPLITS parts of the context.

    The softmax runs along with the sum (Milakov and Gimelshein 2018), in float32. The program of a
    row and head that ends last merges the parts; it leaves its count in `arrivals` at zero.

    EARLY: starts, lengths and all tokens are there before the kernel this one waits for ends,
    except that with FRESH that one stores the last token. STORE: `query` holds keys and values
    beside the queries, not yet turned; the last token is taken from there, turned and stored.
    PARTS: `query` is that many tensors, whose sum it is.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    old, first, last, parts = _part(length - (1 if FRESH else 0), split, SPLITS, TILE)
    if first > 0 and first >= old:
        return
    group = head // GROUP  # the head's keys and values
    pool = (group * pool_tokens.to(tl.int64) + tl.load(starts + row)) * SIZE
    tokens = first + tl.arange(0, TILE)
    key, value = load_keys_values(keys, values, pool, tokens, last, SIZE, BLOCK)
    slope = tl.load(slopes + head) if ALIBI else 0.0
    position = tl.load(positions + row).to(tl.int32) if RELATIVE or HALF > 0 else 0
    bias += head * (2 * reach + 1) if RELATIVE else 0
    if EARLY:
        gdc_wait()
    beside: tl.constexpr = 2 * (HEADS // GROUP) if STORE else 0
    asked = query + (row * (HEADS + beside)) * SIZE
    stride = tl.num_programs(0) * (HEADS + beside) * SIZE
    mine = asked + head * SIZE
    scaled = turned(mine, stride, cosines, sines, position, PARTS, SIZE, HALF, BLOCK) * scale
    largest, total, mixed = _newest_first(
        keys,
        values,
        pool + old.to(tl.int64) * SIZE + tl.arange(0, BLOCK),
        asked + (HEADS + group) * SIZE,
        asked + (HEADS + HEADS // GROUP + group) * SIZE,
        stride,
        cosines,
        sines,
        position,
        scaled,
        bias,
        old - position,
        reach,
        FRESH and split == 0,
        head % GROUP == 0,
        RELATIVE,
        STORE,
        PARTS,
        SIZE,
        HALF,
        BLOCK,
    )
    for tile in range(first, last, TILE):
        bonus = bonus_of(tokens, slope, length, bias, position, reach, last, ALIBI, RELATIVE)
        largest, total, mixed = add_tile(largest, total, mixed, key, value, scaled, bonus)
        tokens = tile + TILE + tl.arange(0, TILE)
        key, value = load_keys_values(keys, values, pool, tokens, last, SIZE, BLOCK)
    place = row * HEADS + head
    if SPLITS == 1:
        _store_head(out, place, mixed / total, SIZE, BLOCK)
    else:
        part = place * SPLITS + split
        _store_part(partial, weights, part, mixed, largest, total, SIZE, BLOCK)
        _merge_if_last(
            partial, weights, arrivals, out, place, parts, SIZE, BLOCK, SPLITS, SPLIT_BLOCK
        )


@triton.jit
def _store_part(
    partial, weights, part, mixed, largest, total, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    _store_head(partial, part, mixed, SIZE, BLOCK)
    tl.store(weights + part * 2, largest)
    tl.store(weights + part * 2 + 1, total)


@triton.jit
def _store_head(target, place, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    features = tl.arange(0, BLOCK)
    where = target + place * SIZE + features
    tl.store(where, values.to(target.dtype.element_ty), mask=features < SIZE)


@triton.jit
def _merge_if_last(
    partial,
    weights,
    arrivals,
    out,
    group,
    parts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + group, 1, sem="acq_rel")
    if before == parts - 1:
        _merge(partial, weights, out, group, parts, SIZE, BLOCK, SPLITS, SPLIT_BLOCK)
        tl.store(arrivals + group, 0)


@triton.jit
def _merge(
    partial,
    weights,
    out,
    group,
    parts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Weigh the parts of one row and head by their softmax sums; empty parts weigh nothing.

    Read past the first cache, where other programs' parts may not have arrived.
    """
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    splits = tl.arange(0, SPLIT_BLOCK)
    present = splits < parts
    part = group * SPLITS + splits
    largest = tl.load(weights + part * 2, mask=present, other=-1e30, cache_modifier=".cg")
    total = tl.load(weights + part * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
    share = tl.exp(largest - tl.max(largest, 0))
    mixed = tl.load(
        partial + part[:, None] * SIZE + features[None, :],
        mask=present[:, None] & held[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    value = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    _store_head(out, group, value, SIZE, BLOCK)
