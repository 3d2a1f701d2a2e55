"""A weight in bytes times a few rows on the matrix units, in the Triton language.

The matrix units multiply bytes with bytes of the same type, and making wider numbers of the weights
first takes more time than reading them. So each row of x gets a scale (step) of its own, and every
number of it becomes a high and a low byte. Their products are summed apart.

int8:  an int16 in two parts, of which the sums are exact. The steps, the largest of a row over
       32639, are finer than bfloat16 for all but the smallest values.
e4m3:  the low byte is what the high one lacks, eight times. Together they have the eight bits of
       bfloat16; float16, which has more, is not split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.common.quantization import Quantization
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.e4m3 import of_four_bits

INT8_BASE = tl.constexpr(256)  # of the high bytes, where the low ones have 1
INT8_LARGEST = tl.constexpr(127 * 256 + 127)
FP8_BASE = tl.constexpr(8)
FP8_LARGEST = tl.constexpr(440 * 8)  # a rounded quotient by 448 could be more than e4m3 holds


@triton.jit
def split_rows(x, hi_lo, steps, size, USE_PDL: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one row of x [N, size] as (base * high + low) * step.

    hi_lo: bytes [2, N, size], the high ones first;  steps: float32 [N]
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    largest = tl.where(largest > 0, largest, 1.0)
    if hi_lo.dtype.element_ty == tl.int8:
        step = largest / INT8_LARGEST
        whole = tl.floor(values / step + 0.5).to(tl.int32)
        high = (whole + INT8_BASE // 2) >> 8
        low = whole - high * INT8_BASE
    else:
        step = largest / FP8_LARGEST
        whole = values / step
        high = of_four_bits(whole / FP8_BASE)
        low = whole - high * FP8_BASE
    target = hi_lo + row * size + columns
    tl.store(target, high.to(hi_lo.dtype.element_ty), mask=inside)
    lows = tl.num_programs(0).to(tl.int64) * size
    tl.store(target + lows, low.to(hi_lo.dtype.element_ty), mask=inside)
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
def dot_hi_lo(
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
    """float32 [ROWS, BATCH]: rows of a weight in bytes times those of x, over columns
    first..last-1; the weight's scales are not applied.

    starts, held: [ROWS, 1], where the weight's rows start, and which there are
    """
    whole: tl.constexpr = hi_lo.dtype.element_ty == tl.int8
    sum_type: tl.constexpr = tl.int32 if whole else tl.float32
    columns = tl.arange(0, BLOCK)
    batch = tl.arange(0, BATCH)
    high = tl.zeros([ROWS, BATCH], sum_type)
    low = tl.zeros([ROWS, BATCH], sum_type)
    weights = starts + columns[None, :]
    places = hi_lo + batch[None, :] * IN + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        inside = (batch < count)[None, :] & (column + columns < IN)[:, None]
        highs = tl.load(places + column, mask=inside, other=0.0)
        lows = tl.load(places + count * IN + column, mask=inside, other=0.0)
        if whole:
            high = tl.dot(tile, highs, high, out_dtype=tl.int32)
            low = tl.dot(tile, lows, low, out_dtype=tl.int32)
        else:  # the matrix units add e4m3 in fewer bits than float32 has
            high += tl.dot(tile, highs)
            low += tl.dot(tile, lows)
    step = tl.load(steps + batch, mask=batch < count, other=0.0)[None, :]
    base: tl.constexpr = INT8_BASE if whole else FP8_BASE
    return (high.to(tl.float32) * base + low.to(tl.float32)) * step


def splits(x: Tensor, quantization: Quantization | None) -> bool:
    """Whether x [N, in] is split for weights that are so quantized."""
    return quantization == "int8" or (quantization == "fp8" and x.dtype == torch.bfloat16)


def split_hi_lo(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N, in] as a weight of `dtype` is multiplied with: hi_lo [2, N, in] of it, steps [N]."""
    count, size = x.shape
    hi_lo = torch.empty(2, count, size, dtype=dtype, device=x.device)
    steps = torch.empty(count, device=x.device)
    block = triton.next_power_of_2(size)
    warps = max(1, min(32, block // 512))
    launcher(split_rows, (count,))(
        x, hi_lo, steps, size, BLOCK=block, num_warps=warps, **pdl_options(x)
    )
    return hi_lo, steps
