"""Matrix times vector in the Triton language: what a step of one row consists of.

With EARLY set, a kernel starts while the one before still runs (programmatic dependent launch) and
fetches its first weights, which nobody writes, before it waits for that one's results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.gemv_tile import (
    activate,
    load_tile,
    multiply,
    row_places,
    scales_of,
    vector,
)
from launcher_scripts.kernels.cuda.norm import (
    load_expected,
    load_row_stats,
    norm_terms,
    normalized,
    prescale,
)


@triton.jit
def gemv(
    x,
    row_stats,
    weight,
    gate_weight,
    scales,
    gate_scales,
    offsets,
    gate_offsets,
    sums,
    gate_sums,
    residual,
    residual_stats,
    gain,
    out,
    rounded,
    new_row_stats,
    part_eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRESCALED: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + act(W norm(x) + b) * (W2 norm(x) + b2), the parts as the flags say.

    Where there is a norm, x is the operand that norm.py describes. ROUNDED: the
    result goes to `rounded` as well, in its type; with PRESCALED, the code of a norm behind, as the
    operand for that norm, whose gain is `gain`, and its statistics to `new_row_stats`;
    residual_stats say what to expect; part_eps is for that norm.
    """
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = OUT % ROWS == 0
    whole: tl.constexpr = even and BLOCK <= IN
    base = row_places(rows, columns, IN)
    tile = load_tile(weight, base, rows, columns, 0, OUT, IN, whole)
    gate_tile = tile
    if GATED:
        gate_tile = load_tile(gate_weight, base, rows, columns, 0, OUT, IN, whole)
    row_scale = scales_of(scales, weight, rows, OUT)
    gate_scale = scales_of(gate_scales, gate_weight, rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    gate_offset = vector(gate_offsets, rows, OUT, OFFSET and GATED)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    gate_row_sums = vector(gate_sums, rows, OUT, NORM == 1 and GATED)
    next_gain = vector(gain, rows, OUT, PRESCALED > 0)
    if EARLY:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    added = vector(residual, rows, OUT, RESIDUAL)
    next_shift, next_unit = load_expected(residual_stats, PRESCALED)
    value, gate = multiply(
        x,
        weight,
        rows,
        gate_weight,
        rows,
        tile,
        gate_tile,
        OUT,
        IN,
        GATED,
        ROLLED,
        even,
        ROWS,
        BLOCK,
        EARLY,
    )
    mean, scale = norm_terms(total, squares, IN, NORM)
    value = normalized(value * row_scale, row_sums, mean, scale, NORM) + offset
    value = activate(value, ACTIVATION)
    if GATED:
        gate = normalized(gate * gate_scale, gate_row_sums, mean, scale, NORM)
        value = value * (gate + gate_offset)
    value = value + added
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=rows < OUT)
    if ROUNDED:
        if PRESCALED > 0:
            value = prescale(
                value, rows < OUT, next_gain, next_shift, next_unit, new_row_stats, part_eps
            )
        tl.store(rounded + rows, value.to(rounded.dtype.element_ty), mask=rows < OUT)


@triton.jit
def gemv_largest(
    x,
    row_stats,
    weight,
    scales,
    offsets,
    sums,
    largest,
    places,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of ROWS values of W norm(x) + b, and where it is: the first of equal ones."""
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = OUT % ROWS == 0
    whole: tl.constexpr = even and BLOCK <= IN
    base = row_places(rows, columns, IN)
    tile = load_tile(weight, base, rows, columns, 0, OUT, IN, whole)
    row_scale = scales_of(scales, weight, rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    if EARLY:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
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
    mean, scale = norm_terms(total, squares, IN, NORM)
    value = normalized(value * row_scale, row_sums, mean, scale, NORM) + offset
    value = tl.where(rows < OUT, value, -float("inf"))
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(largest + tl.program_id(0), top)
    tl.store(places + tl.program_id(0), tl.program_id(0) * ROWS + place)
