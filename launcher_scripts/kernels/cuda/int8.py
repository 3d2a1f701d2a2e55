"""An int8 weight times a few rows on the matrix units, in the Triton language.

The matrix units multiply int8 with int8 only, and making whole numbers of the weights first takes
more time than reading them. So each row of x becomes int16 with a scale (step) of its own, and an
int16 becomes a high and a low int8. The sums of their products are exact. The steps, the largest of
a row over 32639, are finer than bfloat16 for all but the smallest values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options

BASE = tl.constexpr(256)
LARGEST = tl.constexpr(127 * 256 + 127)


@triton.jit
def split_rows(x, hi_lo, steps, size, USE_PDL: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one row of x [N, size] as (256 * high + low) * step.

    hi_lo: int8 [2, N, size], the high ones first;  steps: float32 [N]
    """
    if USE_PDL:
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
    target = hi_lo + row * size + columns
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
        tile = tl.load(weights, mask=held, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def dot_hi_lo_int8(
    hi_lo,
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
    places = hi_lo + batch[None, :] * IN + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        inside = (batch < count)[None, :] & (column + columns < IN)[:, None]
        highs = tl.load(places + column, mask=inside, other=0)
        lows = tl.load(places + count * IN + column, mask=inside, other=0)
        high = tl.dot(tile, highs, high, out_dtype=tl.int32)
        low = tl.dot(tile, lows, low, out_dtype=tl.int32)
    step = tl.load(steps + batch, mask=batch < count, other=0.0)[None, :]
    return (high.to(tl.float32) * BASE + low.to(tl.float32)) * step


def split_hi_lo_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] as an int8 weight is multiplied with: hi_lo int8 [2, N, in], steps [N]."""
    count, size = x.shape
    hi_lo = torch.empty(2, count, size, dtype=torch.int8, device=x.device)
    steps = torch.empty(count, device=x.device)
    block = triton.next_power_of_2(size)
    warps = max(1, min(32, block // 512))
    launcher(split_rows, (count,))(
        x, hi_lo, steps, size, BLOCK=block, num_warps=warps, **pdl_options(x)
    )
    return hi_lo, steps
