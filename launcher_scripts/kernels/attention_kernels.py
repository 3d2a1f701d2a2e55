"""Attention of one new token per row over the key/value cache, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl


def attention_shape(longest: int) -> tuple[int, int, int]:
    """(splits, tokens per piece, warps) for contexts up to `longest`: measured on an H200.

    A short context is over sooner in one piece than with a second kernel to merge.
    """
    if longest <= 256:
        return 1, 128, 8
    return min(32, -(-longest // 64)), 64, 4


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
    pool_tokens,
    scale,
    reach,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row, one query head, one of SPLITS parts of the context.

    The softmax runs along with the sum (Milakov and Gimelshein 2018), in float32. With one split
    the result is final; else the parts go to `partial` and `weights` for merge_splits.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts + row).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    first = split * share
    last = tl.minimum(first + share, length)
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    pool = ((head // GROUP) * pool_tokens.to(tl.int64) + start) * SIZE
    asked = tl.load(query + (row * HEADS + head) * SIZE + features, mask=held, other=0.0)
    scaled = asked.to(tl.float32) * scale
    largest = -float("inf")
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    for tile in range(first, last, TILE):
        tokens = tile + tl.arange(0, TILE)
        inside = tokens < last
        where = pool + tokens[:, None].to(tl.int64) * SIZE + features[None, :]
        mask = inside[:, None] & held[None, :]
        key = tl.load(keys + where, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + where, mask=mask, other=0.0).to(tl.float32)
        scores = tl.sum(key * scaled[None, :], 1)
        if ALIBI:
            scores += tl.load(slopes + head) * (tokens - (length - 1)).to(tl.float32)
        if RELATIVE:
            distance = tokens - tl.load(positions + row).to(tl.int32)
            place = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias + head * (2 * reach + 1) + place)
        scores = tl.where(inside, scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, 0))
        shrink = tl.exp(largest - top)
        chances = tl.exp(scores - top)
        total = total * shrink + tl.sum(chances, 0)
        mixed = mixed * shrink + tl.sum(chances[:, None] * value, 0)
        largest = top
    if SPLITS == 1:
        place = out + (row * HEADS + head) * SIZE + features
        tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=held)
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(partial + part * SIZE + features, mixed, mask=held)
        tl.store(weights + part * 2, largest)
        tl.store(weights + part * 2 + 1, total)


@triton.jit
def merge_splits(
    partial,
    weights,
    out,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Weigh the parts of one row and head by their softmax sums; empty parts weigh nothing."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    features = tl.arange(0, BLOCK)
    held = features < SIZE
    splits = tl.arange(0, SPLIT_BLOCK)
    present = splits < SPLITS
    part = (row * HEADS + head) * SPLITS + splits
    largest = tl.load(weights + part * 2, mask=present, other=-float("inf"))
    total = tl.load(weights + part * 2 + 1, mask=present, other=0.0)
    share = tl.exp(largest - tl.max(largest, 0))
    mixed = tl.load(
        partial + part[:, None] * SIZE + features[None, :],
        mask=present[:, None] & held[None, :],
        other=0.0,
    )
    value = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    place = out + (row * HEADS + head) * SIZE + features
    tl.store(place, value.to(out.dtype.element_ty), mask=held)
