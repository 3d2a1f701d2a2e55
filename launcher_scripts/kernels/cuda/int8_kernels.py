"""Projections whose weights are int8, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.operands import Linear


def dense(linear: Linear) -> Linear:
    """See reference.dense. The weight in the compute type lives as long as the operation."""
    if linear.scale is None:
        return linear
    rows, size = linear.weight.shape
    weight = torch.empty(rows, size, dtype=linear.dtype, device=linear.weight.device)
    block = min(4096, triton.next_power_of_2(size))
    launcher(widen, (rows, triton.cdiv(size, block)))(
        linear.weight, linear.scale, weight, size, BLOCK=block, num_warps=4
    )
    return Linear(weight, linear.bias, linear.norm)


@triton.jit
def widen(weight, scale, out, size, BLOCK: tl.constexpr):
    """One program: BLOCK weights of one row, times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(weight + row * size + columns, mask=inside, other=0).to(tl.float32)
    values *= tl.load(scale + row)
    tl.store(out + row * size + columns, values.to(out.dtype.element_ty), mask=inside)
