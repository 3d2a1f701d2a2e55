"""A projection's sum over GPUs that write into each other's memory, in the Triton language.

Every rank has an inbox, two halves of one lane per rank. A rank writes its part of a value into its
lane of every inbox, as a word of 8 bytes that holds the value and the number of the exchange; the
receiver waits for words with that number, so that nothing else has to be waited for. Words of 8
bytes arrive whole. Exchanges take the halves in turn: who sends for the next but one has received
the next from everyone, and those had read their inboxes before they sent it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.gemv_tile import (
    load_tile,
    multiply,
    row_places,
    scales_of,
    vector,
)
from launcher_scripts.kernels.cuda.norm import load_expected, prescale


@triton.jit(do_not_specialize=["rank"])
def gemv_to_inboxes(
    x,
    weight,
    scales,
    inboxes,
    exchanges,
    rank,
    lane_words,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """W x of this rank's part of x, to the inboxes whose addresses are given."""
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = OUT % ROWS == 0
    whole: tl.constexpr = even and BLOCK <= IN
    base = row_places(rows, columns, IN)
    tile = load_tile(weight, base, rows, columns, 0, OUT, IN, whole)
    row_scale = scales_of(scales, weight, rows, OUT)
    if EARLY:
        gdc_wait()
    inside = rows < OUT
    number = tl.load(exchanges + rows // SHARE, mask=inside, other=0, cache_modifier=".cg") + 1
    value, _ = multiply(
        x,
        weight,
        rows,
        weight,
        rows,
        tile,
        tile,
        OUT,
        IN,
        False,
        ROLLED,
        even,
        ROWS,
        BLOCK,
        EARLY,
    )
    bits = (value * row_scale).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (number.to(tl.int64) << 32) | bits
    lane = ((number & 1) * RANKS + rank) * lane_words
    for receiver in tl.static_range(RANKS):
        inbox = tl.load(inboxes + receiver).to(tl.pointer_type(tl.int64))
        tl.store(inbox + lane + rows, word, mask=inside)


@triton.jit
def _missing(old, awaited):
    """Whether words that are awaited are still of an old exchange."""
    return tl.max(tl.where(awaited & old, 1, 0), None) > 0


@triton.jit
def add_from_inbox(
    inbox,
    exchanges,
    offsets,
    residual,
    residual_stats,
    gain,
    exact,
    operand,
    row_stats,
    part_eps,
    lane_words,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    OFFSET: tl.constexpr,
    PRESCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: SHARE values of residual + the sum of what all ranks sent + offsets.

    `operand` gets them in its type; with PRESCALED, the code of a norm behind, as the operand for
    that norm (see norm.py), whose gain is `gain`; their statistics, with part_eps,
    go to `row_stats`.
    LANES is RANKS as a power of two.
    """
    if EARLY:
        gdc_launch_dependents()
    part = tl.program_id(0)
    columns = part * SHARE + tl.arange(0, SHARE)
    inside = columns < SIZE
    held = vector(gain, columns, SIZE, PRESCALED > 0)
    added = vector(offsets, columns, SIZE, OFFSET)
    if EARLY:
        gdc_wait()
    added += tl.load(residual + columns, mask=inside, other=0.0)
    shift, unit = load_expected(residual_stats, PRESCALED)
    number = tl.load(exchanges + part, cache_modifier=".cg") + 1
    lanes = tl.arange(0, LANES)[:, None]
    awaited = (lanes < RANKS) & inside[None, :]
    words = inbox + ((number & 1) * RANKS + lanes) * lane_words + columns[None, :]
    word = tl.load(words, mask=awaited, other=0, volatile=True)
    while _missing((word >> 32) != number, awaited):
        word = tl.load(words, mask=awaited, other=0, volatile=True)
    value = word.to(tl.int32).to(tl.float32, bitcast=True)
    value = added + tl.sum(tl.where(awaited, value, 0.0), 0)
    tl.store(exchanges + part, number)
    tl.store(exact + columns, value, mask=inside)
    if PRESCALED > 0:
        value = prescale(value, inside, held, shift, unit, row_stats, part_eps)
    tl.store(operand + columns, value.to(operand.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def exchange_best(
    values,
    ids,
    tokens,
    inbox,
    inboxes,
    exchanges,
    rank,
    lane_words,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: the id of a row's largest value of all ranks', the lowest rank's of equal ones.

    A row's value and its id are the first two words of its SHARE.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    number = tl.load(exchanges + row, cache_modifier=".cg") + 1
    half = (number & 1) * RANKS
    tag = number.to(tl.int64) << 32
    bits = tl.load(values + row).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    own_id = tl.load(ids + row)
    for receiver in tl.static_range(RANKS):
        target = tl.load(inboxes + receiver).to(tl.pointer_type(tl.int64))
        target += (half + rank) * lane_words + row * SHARE
        tl.store(target, tag | bits)
        tl.store(target + 1, tag | own_id)
    lanes = tl.arange(0, LANES)
    awaited = lanes < RANKS
    words = inbox + (half + lanes) * lane_words + row * SHARE
    found = tl.load(words, mask=awaited, other=0, volatile=True)
    places = tl.load(words + 1, mask=awaited, other=0, volatile=True)
    while _missing((found >> 32 != number) | (places >> 32 != number), awaited):
        found = tl.load(words, mask=awaited, other=0, volatile=True)
        places = tl.load(words + 1, mask=awaited, other=0, volatile=True)
    value = tl.where(awaited, found.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    _, winner = tl.max(value, 0, return_indices=True)
    tl.store(exchanges + row, number)
    tl.store(tokens + row, tl.sum(tl.where(lanes == winner, places & 0xFFFFFFFF, 0), 0))
