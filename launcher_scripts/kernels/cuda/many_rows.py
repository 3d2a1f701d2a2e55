"""A weight times more rows than dot.py takes: cuBLAS, and what weights in bytes need before it.

An e4m3 weight is multiplied as it is where the GPU can. Then the inputs are e4m3, too, each row
with a scale of its own. Any other weight in bytes is in the compute type for the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from launcher_scripts.common.quantization import FOUR_BITS
from launcher_scripts.kernels.cuda.compiling import launcher, traits_of
from launcher_scripts.kernels.cuda.dot import MAX_ROWS
from launcher_scripts.kernels.cuda.elementwise import E4M3_MAX
from launcher_scripts.kernels.cuda.packed import (
    PERIOD,
    QUARTER,
    pairs_at,
    quarter,
    terms_of,
)
from launcher_scripts.kernels.operands import Linear
from launcher_scripts.kernels.reference import ACTIVATIONS, added_lora

# Activations that cuBLAS computes at the end of a product, and what torch says for each.
USE_GELU = {"gelu": True, "relu": False}
MULTIPLE = 16  # of which torch._scaled_mm wants both of a weight's sizes


@triton.jit
def widen(weight, scale, out, size, BLOCK: tl.constexpr):
    """One program: BLOCK weights of one row, times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(weight + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    values *= tl.load(scale + row)
    tl.store(out + row * size + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def unpack(weight, scales, out, IN: tl.constexpr, ROWS: tl.constexpr):
    """One program: GROUP bytes of ROWS rows of a weight in the type of `out` [rows, IN]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column, columns = tl.program_id(1) * PERIOD, tl.arange(0, QUARTER)[None, :]
    kind: tl.constexpr = scales.dtype.element_ty
    e2m1: tl.constexpr = kind == tl.int16 or kind == tl.int64
    halves = weight.to(tl.pointer_type(tl.int16)) + (rows * IN + column) // 4 + columns
    tile = tl.load(halves)
    terms = terms_of(tl.load(pairs_at(scales) + rows * (IN // PERIOD) + column // PERIOD), kind)
    for lane in tl.static_range(4):
        weights = quarter(tile, terms, out.dtype.element_ty, lane, e2m1, False)
        tl.store(out + rows * IN + column + lane * QUARTER + columns, weights)


@triton.jit
def quantize_rows(x, out, scales, size, BLOCK: tl.constexpr):
    """One program: one row of x [N, size] as e4m3 [size] times a scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    max_abs = tl.max(tl.abs(values), 0)
    scale = tl.div_rn(tl.where(max_abs > 0, max_abs, 1.0), E4M3_MAX)
    tl.store(out + row * size + columns, (values / scale).to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """quantization.quantized_rows to fp8 of x [N, in]."""
    count, size = x.shape
    rows = torch.empty(count, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, device=x.device)
    block = triton.next_power_of_2(size)
    warps = max(1, min(32, block // 512))
    launcher(quantize_rows, (count,))(x, rows, scales, size, BLOCK=block, num_warps=warps)
    return rows, scales


def multiplies_fp8(x: Tensor, linear: Linear) -> bool:
    """Return whether linear(x) rounds its inputs x [N, in] to e4m3."""
    return (
        linear.quantization == "fp8"
        and x.shape[0] > MAX_ROWS
        and x.dtype == torch.bfloat16
        and all(size % MULTIPLE == 0 for size in linear.weight.shape)
        and traits_of(x.device).has_fp8_products
    )


def many_rows(x: Tensor, linear: Linear) -> Tensor:
    """linear(x) [N, out], its norm aside."""
    return products(x, (linear,))[0]


def activated_product(x: Tensor, linear: Linear, activation: str) -> Tensor:
    """act(linear(x)) [N, out], its norm aside. cuBLAS activates sums before they are rounded."""
    if x.is_meta:
        return many_rows(x, linear)
    plain = linear.lora is None and not multiplies_fp8(x, linear)
    if not (plain and x.is_cuda and activation in USE_GELU):
        return ACTIVATIONS[activation](many_rows(x, linear))
    dense_weight = dense(linear)
    bias = (
        x.new_zeros(dense_weight.weight.shape[0])
        if dense_weight.bias is None
        else dense_weight.bias
    )
    return torch._addmm_activation(bias, x, dense_weight.weight.t(), use_gelu=USE_GELU[activation])


def products(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """linear(x) [N, out] of several linears with weights of one shape and type, norms aside; see
    reference.products.
    """
    if multiplies_fp8(x, linears[0]):
        rows, scales = fp8_rows(x)
        outs = [_scaled_product(rows, scales, linear) for linear in linears]
    else:
        dense_weights = [dense(linear) for linear in linears]
        if x.is_meta:  # torch takes milliseconds for the shape of a product or an activation
            outs = [x.new_empty(x.shape[0], linear.weight.shape[0]) for linear in linears]
        else:
            outs = [functional.linear(x, linear.weight, linear.bias) for linear in dense_weights]
    return added_lora(outs, x, linears[0].lora)


def _scaled_product(rows: Tensor, scales: Tensor, linear: Linear) -> Tensor:
    if linear.scale is None:
        raise ValueError("the weight has no scales")
    return torch._scaled_mm(
        rows,
        linear.weight.t(),
        scale_a=scales[:, None],
        scale_b=linear.scale[None],
        bias=linear.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def dense(linear: Linear) -> Linear:
    """The same projection with its weight in the compute type, as long as the operation lives."""
    if linear.scale is None:
        return linear
    if linear.quantization in FOUR_BITS:
        return Linear(unpacked_weight(linear), linear.bias, linear.norm)
    rows, size = linear.weight.shape
    weight = torch.empty(rows, size, dtype=linear.dtype, device=linear.weight.device)
    block = min(4096, triton.next_power_of_2(size))
    launcher(widen, (rows, triton.cdiv(size, block)))(
        linear.weight, linear.scale, weight, size, BLOCK=block, num_warps=4
    )
    return Linear(weight, linear.bias, linear.norm)


def unpacked_weight(linear: Linear) -> Tensor:
    """A weight of four bits in the compute type."""
    rows, size = linear.weight.shape[0], linear.in_size
    out = torch.empty(rows, size, dtype=linear.dtype, device=linear.weight.device)
    at_once = next(count for count in (64, 16, 4, 2, 1) if rows % count == 0)
    launcher(unpack, (rows // at_once, size // PERIOD.value))(
        linear.weight, linear.scale, out, IN=size, ROWS=at_once, num_warps=2
    )
    return out
