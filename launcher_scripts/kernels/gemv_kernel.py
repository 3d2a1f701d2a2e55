"""Matrix times vector in the Triton language: what a step of one row consists of.

Every program owns a few rows of the weight and reads them in wide pieces, each weight once; the
norm's statistics come from the same pass over x.
"""

from __future__ import annotations

import triton
import triton.language as tl


def gemv_shape(in_size: int) -> tuple[int, int, int]:
    """(rows per program, columns per piece, warps): measured on an H200, bfloat16."""
    if in_size >= 4096:
        return 4, 2048, 8
    if in_size >= 2048:
        return 4, 1024, 4
    return 2, min(1024, triton.next_power_of_2(in_size)), 4


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 5:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def _finish(
    product, mean, inverse, rows, inside, sums, offsets, NORM: tl.constexpr, OFFSET: tl.constexpr
):
    """From W (g x) to W norm(x) + b."""
    if NORM == 1:
        product = (product - mean * tl.load(sums + rows, mask=inside, other=0.0)) * inverse
    elif NORM == 2:
        product = product * inverse
    if OFFSET:
        product += tl.load(offsets + rows, mask=inside, other=0.0)
    return product


@triton.jit
def gemv(
    x,
    weight,
    gate_weight,
    gain,
    sums,
    gate_sums,
    offsets,
    gate_offsets,
    residual,
    out,
    out_size,
    eps,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + act(W norm(x) + b) * (W2 norm(x) + b2), the parts as the flags say.

    NORM 0 none, 1 layer norm, 2 RMS norm; sums and offsets as in operands.Linear.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = rows < out_size
    base = rows[:, None].to(tl.int64) * IN + columns[None, :]
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    gated = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for first in tl.static_range(0, IN, BLOCK):
        within = first + columns[None, :] < IN
        mask = inside[:, None] & within
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
        piece = tl.load(x + first + columns[None, :], mask=within, other=0.0).to(tl.float32)
        if NORM != 0:
            total += piece
            squares += piece * piece
            piece *= tl.load(gain + first + columns[None, :], mask=within, other=0.0)
        product += tile.to(tl.float32) * piece
        if GATED:
            tile = tl.load(
                gate_weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            gated += tile.to(tl.float32) * piece
    mean = 0.0
    inverse = 1.0
    if NORM != 0:
        mean = tl.sum(tl.sum(total, 1), 0) / IN
        square = tl.sum(tl.sum(squares, 1), 0) / IN
        if NORM == 1:
            square -= mean * mean
        inverse = 1.0 / tl.sqrt(square + eps)
    value = _finish(tl.sum(product, 1), mean, inverse, rows, inside, sums, offsets, NORM, OFFSET)
    value = _activate(value, ACTIVATION)
    if GATED:
        value *= _finish(
            tl.sum(gated, 1), mean, inverse, rows, inside, gate_sums, gate_offsets, NORM, OFFSET
        )
    if RESIDUAL:
        value += tl.load(residual + rows, mask=inside, other=0.0)
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=inside)
