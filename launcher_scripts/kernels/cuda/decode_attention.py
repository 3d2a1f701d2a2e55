"""Attention of one new token per row over the key/value cache, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.attention_tile import (
    add_tile,
    bonus_of,
    capped,
    load_keys_values,
    merge_parts,
    newest_token,
    part_of,
    store_head,
    turned,
)
from launcher_scripts.kernels.cuda.norm import look_ahead


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
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest score, sum of weights, weighted values) of the newest token, if it is here."""
    largest = -1e30
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    if present:
        key, mixed = newest_token(
            keys,
            values,
            place,
            new_key,
            new_value,
            stride,
            cosines,
            sines,
            turn,
            STORE,
            PARTS,
            SIZE,
            HALF,
            stores,
        )
        largest = capped(tl.sum(key * scaled, 0), SOFTCAP)
        if RELATIVE:
            largest += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach) + reach)
        total = 1.0
    return largest, total, mixed


@triton.jit(do_not_specialize=["pool_tokens"])
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
    RELATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EARLY: tl.constexpr,
    FRESH: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row, one query head, one of SPLITS parts of the context.

    The softmax runs along with the sum (Milakov and Gimelshein 2018), in float32. The program of a
    row and head that ends last merges the parts; it leaves its count in `arrivals` at zero.

    EARLY: starts, lengths and all tokens are there before the kernel this one waits for ends, but
    for the last with FRESH. STORE: `query` holds keys and values beside the queries, not yet
    turned; the last token is taken from there, turned and stored. PARTS: `query` is the sum of so
    many tensors. NORM: row_stats are of one row's state [STATE]; a program beside looks ahead.
    """
    if EARLY:
        gdc_launch_dependents()
    if NORM > 0 and tl.program_id(2) == SPLITS:
        look_ahead(row_stats, tl.program_id(1) == 0, STATE, NORM, STATE_PARTS, EARLY)
        return
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    old, first, last, parts = part_of(length - (1 if FRESH else 0), split, SPLITS, TILE)
    if first > 0 and first >= old:
        return
    group = head // GROUP  # the head's keys and values
    pool = (group * pool_tokens.to(tl.int64) + tl.load(starts + row)) * SIZE
    tokens = first + tl.arange(0, TILE)
    key, value = load_keys_values(keys, values, pool, tokens, last, SIZE, BLOCK)
    slope = tl.load(slopes + head) if ALIBI else 0.0
    turn = tl.load(positions + row).to(tl.int32) if RELATIVE or HALF > 0 else 0
    bias += head * (2 * reach + 1) if RELATIVE else 0
    if EARLY:
        gdc_wait()
    held: tl.constexpr = (HEADS + (2 * (HEADS // GROUP) if STORE else 0)) * SIZE
    asked, stride = query + row * held, tl.num_programs(0) * held
    scaled = turned(asked + head * SIZE, stride, cosines, sines, turn, PARTS, SIZE, HALF, BLOCK)
    scaled *= scale
    largest, total, mixed = _newest_first(
        keys,
        values,
        pool + old.to(tl.int64) * SIZE + tl.arange(0, BLOCK),
        asked + (HEADS + group) * SIZE,
        asked + (HEADS + HEADS // GROUP + group) * SIZE,
        stride,
        cosines,
        sines,
        turn,
        scaled,
        bias,
        old - turn,
        reach,
        FRESH and split == 0,
        head % GROUP == 0,
        RELATIVE,
        SOFTCAP,
        STORE,
        PARTS,
        SIZE,
        HALF,
        BLOCK,
    )
    for _ in range(first, last, TILE):
        later = load_keys_values(keys, values, pool, tokens + TILE, last, SIZE, BLOCK)
        bonus = bonus_of(tokens, slope, length, bias, turn, reach, last, ALIBI, RELATIVE)
        largest, total, mixed = add_tile(largest, total, mixed, key, value, scaled, bonus, SOFTCAP)
        tokens, key, value = tokens + TILE, later[0], later[1]
    place = row * HEADS + head
    if SPLITS == 1:
        store_head(out, place, mixed / total, SIZE, BLOCK)
    else:
        _store_part(partial, weights, place * SPLITS + split, mixed, largest, total, SIZE, BLOCK)
        _merge_if_last(
            partial, weights, arrivals, out, place, parts, SIZE, BLOCK, SPLITS, SPLIT_BLOCK
        )


@triton.jit
def _store_part(
    partial, weights, part, mixed, largest, total, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    store_head(partial, part, mixed, SIZE, BLOCK)
    tl.store(weights + part * 2, largest)
    tl.store(weights + part * 2 + 1, total)


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
        merge_parts(partial, weights, out, group, parts, SIZE, BLOCK, SPLITS, SPLIT_BLOCK)
        tl.store(arrivals + group, 0)
