"""Attention of one new token per row over the key/value cache, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def attention_shape(longest: int) -> tuple[int, int, int]:
    """(splits, tokens per piece, warps) for contexts up to `longest`: measured on an H200.

    A short context is over sooner in one piece than with parts to merge.
    """
    if longest <= 256:
        return 1, 128, 8
    return min(32, -(-longest // 64)), 64, 4


@triton.jit
def _tile(keys, values, pool, tokens, last, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of some tokens; zeros from `last` on."""
    features = tl.arange(0, BLOCK)
    where = pool + tokens[:, None].to(tl.int64) * SIZE + features[None, :]
    mask = (tokens < last)[:, None] & (features < SIZE)[None, :]
    key = tl.load(keys + where, mask=mask, other=0.0)
    return key, tl.load(values + where, mask=mask, other=0.0)


@triton.jit
def _scores(
    keys,
    tokens,
    inside,
    scaled,
    slope,
    length,
    bias,
    position,
    reach,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """q . k of a tile of keys, with what their distance adds; -inf outside."""
    scores = tl.sum(keys.to(tl.float32) * scaled[None, :], 1)
    if ALIBI:
        scores += slope * (tokens - (length - 1)).to(tl.float32)
    if RELATIVE:
        place = tl.minimum(tl.maximum(tokens - position, -reach), reach) + reach
        scores += tl.load(bias + place, mask=inside, other=0.0)
    return tl.where(inside, scores, -float("inf"))


@triton.jit
def _add_tile(largest, total, mixed, scores, value):
    top = tl.maximum(largest, tl.max(scores, 0))
    shrink = tl.exp(largest - top)
    chances = tl.exp(scores - top)
    total = total * shrink + tl.sum(chances, 0)
    mixed = mixed * shrink + tl.sum(chances[:, None] * value.to(tl.float32), 0)
    return top, total, mixed


@triton.jit
def _newest_first(
    keys,
    values,
    place,
    held,
    scaled,
    bias,
    distance,
    reach,
    present,
    RELATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) of the newest token, if it is here."""
    largest = -1e30
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    if present:
        key = tl.load(keys + place, mask=held, other=0.0).to(tl.float32)
        mixed = tl.load(values + place, mask=held, other=0.0).to(tl.float32)
        largest = tl.sum(key * scaled, 0)
        if RELATIVE:
            largest += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach) + reach)
        total = 1.0
    return largest, total, mixed


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
    TILE: tl.constexpr,
):
    """One program: one row, one query head, one of SPLITS parts of the context.

    The softmax runs along with the sum (Milakov and Gimelshein 2018), in float32. The program of a
    row and head that ends last merges the parts; it leaves its count in `arrivals` at zero.

    EARLY: starts, lengths and all tokens are there before the kernel this one waits for ends,
    except that with FRESH that one stores the last token.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts + row).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    old = length - 1 if FRESH else length
    share = tl.cdiv(tl.cdiv(old, SPLITS), TILE) * TILE
    first = split * share
    last = tl.minimum(first + share, old)
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    pool = ((head // GROUP) * pool_tokens.to(tl.int64) + start) * SIZE
    tokens = first + tl.arange(0, TILE)
    key, value = _tile(keys, values, pool, tokens, last, SIZE, BLOCK)
    slope = 0.0
    position = 0
    if ALIBI:
        slope = tl.load(slopes + head)
    if RELATIVE:
        position = tl.load(positions + row).to(tl.int32)
        bias += head * (2 * reach + 1)
    if EARLY:
        gdc_wait()
    asked = tl.load(query + (row * HEADS + head) * SIZE + features, mask=held, other=0.0)
    scaled = asked.to(tl.float32) * scale
    present = FRESH and split == 0
    newest = pool + old.to(tl.int64) * SIZE + features
    largest, total, mixed = _newest_first(
        keys, values, newest, held, scaled, bias, old - position, reach, present, RELATIVE, BLOCK
    )
    for tile in range(first, last, TILE):
        scores = _scores(
            key,
            tokens,
            tokens < last,
            scaled,
            slope,
            length,
            bias,
            position,
            reach,
            ALIBI,
            RELATIVE,
        )
        largest, total, mixed = _add_tile(largest, total, mixed, scores, value)
        tokens = tile + TILE + tl.arange(0, TILE)
        key, value = _tile(keys, values, pool, tokens, last, SIZE, BLOCK)
    group = row * HEADS + head
    if SPLITS == 1:
        place = out + group * SIZE + features
        tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=held)
    else:
        part = group * SPLITS + split
        tl.store(partial + part * SIZE + features, mixed, mask=held)
        tl.store(weights + part * 2, largest)
        tl.store(weights + part * 2 + 1, total)
        _merge_if_last(partial, weights, arrivals, out, group, SIZE, BLOCK, SPLITS, SPLIT_BLOCK)


@triton.jit
def _merge_if_last(
    partial,
    weights,
    arrivals,
    out,
    group,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + group, 1, sem="acq_rel")
    if before == SPLITS - 1:
        _merge(partial, weights, out, group, SIZE, BLOCK, SPLITS, SPLIT_BLOCK)
        tl.store(arrivals + group, 0)


@triton.jit
def _merge(
    partial,
    weights,
    out,
    group,
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
    present = splits < SPLITS
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
    tl.store(out + group * SIZE + features, value.to(out.dtype.element_ty), mask=held)
