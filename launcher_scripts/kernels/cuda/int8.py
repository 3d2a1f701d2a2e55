"""An int8 weight times a few rows on the matrix units, in the Triton language.

The matrix units multiply int8 with int8 only, and making whole numbers of the weights first takes
more time than reading them. So the rows of x become numbers of 16 bits with a step of their own,
and those two digits of 8 bits each. The sums of the digits' products are exact; the steps, the
largest of a row over 32639, are finer than bfloat16 for all but the smallest values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BASE = tl.constexpr(256)
LARGEST = tl.constexpr(127 * 256 + 127)


@triton.jit
def split_rows(x, digits, steps, size, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one row of x [N, size] as (256 * high + low) * step.

    digits: int8 [2, N, size], the high ones first;  steps: float32 [N]
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    step = tl.where(largest > 0, largest, 1.0) / LARGEST
    whole = tl.floor(values / step + 0.5).to(tl.int32)
    high = (whole + BASE // 2) >> 8
    target = digits + row * size + columns
    tl.store(target, high.to(tl.int8), mask=inside)
    lows = tl.num_programs(0).to(tl.int64) * size
    tl.store(target + lows, (whole - high * BASE).to(tl.int8), mask=inside)
    tl.store(steps + row, step)


@triton.jit
def load_piece(weights, held, EVEN: tl.constexpr):
    """Some columns of a weight's rows, which are read once."""
    if EVEN:
        tile = tl.load(weights, eviction_policy="evict_first")
    else:
        tile = tl.load(weights, mask=held, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def dot_digits(
    digits,
    steps,
    starts,
    held,
    first,
    last,
    count,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """float32 [ROWS, BATCH]: rows of an int8 weight times those of x, over columns first..last-1;
    the weight's scales are not applied.

    starts, held: [ROWS, 1], where the weight's rows start, and which there are
    """
    columns = tl.arange(0, BLOCK)
    batch = tl.arange(0, BATCH)
    high = tl.zeros([ROWS, BATCH], tl.int32)
    low = tl.zeros([ROWS, BATCH], tl.int32)
    weights = starts + columns[None, :]
    places = digits + batch[None, :] * IN + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        inside = (batch < count)[None, :] & (column + columns < IN)[:, None]
        highs = tl.load(places + column, mask=inside, other=0)
        lows = tl.load(places + count * IN + column, mask=inside, other=0)
        high = tl.dot(tile, highs, high, out_dtype=tl.int32)
        low = tl.dot(tile, lows, low, out_dtype=tl.int32)
    step = tl.load(steps + batch, mask=batch < count, other=0.0)[None, :]
    return (high.to(tl.float32) * BASE + low.to(tl.float32)) * step
