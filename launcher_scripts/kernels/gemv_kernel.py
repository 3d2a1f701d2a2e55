"""Matrix times vector in the Triton language: what a step of one row consists of.

Every program owns a few rows of the weight and reads them in wide pieces, each weight once.
"""

from __future__ import annotations

import triton
import triton.language as tl


def gemv_shape(in_size: int) -> tuple[int, int, int]:
    """(rows per program, columns per piece, warps): measured on an H200, bfloat16."""
    if in_size >= 4096:
        return 4, 2048, 8
    if in_size >= 2048:
        return 1, 1024, 4
    return 2, max(8, min(1024, triton.next_power_of_2(in_size))), 4


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
def gemv(
    x,
    weight,
    gate_weight,
    bias,
    gate_bias,
    residual,
    out,
    out_size,
    IN: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + act(W x + b) * (W2 x + b2), the parts as the flags say.

    x has the weight's type, so that both are held by the threads in the same way, and eight
    products are summed at a time as they come: other types and other sums cost up to a third.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = rows < out_size
    base = rows[:, None].to(tl.int64) * IN + columns[None, :]
    offset = tl.zeros([ROWS], tl.float32)
    gate_offset = tl.zeros([ROWS], tl.float32)
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        offset = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate_offset = tl.load(gate_bias + rows, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        added = tl.load(residual + rows, mask=inside, other=0.0)
    product = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    gated = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    for first in tl.static_range(0, IN, BLOCK):
        within = first + columns[None, :] < IN
        mask = inside[:, None] & within
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
        piece = tl.load(x + first + columns[None, :], mask=within, other=0.0).to(tl.float32)
        product += tl.sum(tl.reshape(tile.to(tl.float32) * piece, [ROWS, BLOCK // 8, 8]), 2)
        if GATED:
            tile = tl.load(
                gate_weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            gated += tl.sum(tl.reshape(tile.to(tl.float32) * piece, [ROWS, BLOCK // 8, 8]), 2)
    value = _activate(tl.sum(product, 1) + offset, ACTIVATION)
    if GATED:
        value *= tl.sum(gated, 1) + gate_offset
    tl.store(out + rows, (value + added).to(out.dtype.element_ty), mask=inside)
