"""Convolutions over a row's last tokens in the Triton language: those of one new token of each row;
see reference_recurrence.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.reference_recurrence import ConvOperands, RecurrenceOperands

CHANNELS = 1024  # of a program
MANY_STATES = 512  # of heads


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def earlier_inputs(
    tail, weight, bias, channels, mask, WIDTH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr
):
    """(the convolution without its newest inputs, the weights of those)"""
    total = tl.zeros(channels.shape, tl.float32)
    if BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        taken = tl.load(tail + tap * WIDTH + channels, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        total += taken * factor
    newest = tl.load(weight + channels * TAPS + TAPS - 1, mask=mask, other=0.0)
    return total, newest.to(tl.float32)


@triton.jit
def convolved(earlier, newest, source, mask):
    """silu of the convolution, with the newest inputs at `source`."""
    return silu(earlier + newest * tl.load(source, mask=mask, other=0.0).to(tl.float32))


@triton.jit
def move_inputs(tail, source, channels, mask, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """Let the newest inputs follow those in the tail, whose oldest go."""
    newest = tl.load(source, mask=mask)
    for tap in tl.static_range(TAPS - 2):
        later = tl.load(tail + (tap + 1) * WIDTH + channels, mask=mask)
        tl.store(tail + tap * WIDTH + channels, later, mask=mask)
    tl.store(tail + (TAPS - 2) * WIDTH + channels, newest, mask=mask)


@triton.jit
def convolve_rows(
    projected,
    slots,
    tails,
    conv,
    conv_bias,
    out,
    stride,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: silu of the convolution of one row's BLOCK channels, whose inputs from FIRST on
    go to its tail.
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < WIDTH
    tail = tails + tl.load(slots + row) * (TAPS - 1) * WIDTH
    total, weight = earlier_inputs(tail, conv, conv_bias, channels, mask, WIDTH, TAPS, BIAS)
    if USE_PDL:
        gdc_wait()
    source = projected + row * stride + FIRST + channels
    tl.store(out + row * WIDTH + channels, convolved(total, weight, source, mask), mask=mask)
    move_inputs(tail, source, channels, mask, WIDTH, TAPS)


@triton.jit
def short_conv_rows(
    projected,
    slots,
    tails,
    conv,
    conv_bias,
    out,
    stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, BLOCK channels."""
    if USE_PDL:
        gdc_launch_dependents()
    row, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < WIDTH
    tail = tails + tl.load(slots + row) * (TAPS - 1) * WIDTH
    total, weight = earlier_inputs(tail, conv, conv_bias, channels, mask, WIDTH, TAPS, BIAS)
    if USE_PDL:
        gdc_wait()
    source = projected + row * stride + channels
    b = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(source + 2 * WIDTH, mask=mask, other=0.0).to(tl.float32)
    newest = (b * x).to(tails.dtype.element_ty)
    for tap in tl.static_range(TAPS - 2):
        later = tl.load(tail + (tap + 1) * WIDTH + channels, mask=mask)
        tl.store(tail + tap * WIDTH + channels, later, mask=mask)
    tl.store(tail + (TAPS - 2) * WIDTH + channels, newest, mask=mask)
    y = c * (total + weight * newest.to(tl.float32))
    tl.store(out + row * WIDTH + channels, y.to(out.dtype.element_ty), mask=mask)


def convolved_rows(
    projected: Tensor, layer: RecurrenceOperands, slots: Tensor, first: int
) -> Tensor | None:
    """Outputs of the convolution of many rows' inputs from the column `first` on, float32."""
    rows, (width, taps) = projected.shape[0], layer.conv.shape
    if rows * layer.states.shape[1] < MANY_STATES or taps < 2:
        return None
    mixed = torch.empty(rows, width, device=projected.device)
    launcher(convolve_rows, (rows, triton.cdiv(width, CHANNELS)))(
        projected,
        slots,
        layer.tails,
        layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias,
        mixed,
        projected.stride(0),
        FIRST=first,
        WIDTH=width,
        TAPS=taps,
        BIAS=layer.conv_bias is not None,
        BLOCK=CHANNELS,
        num_warps=4,
        **pdl_options(projected),
    )
    return mixed


def step_short_conv(projected: Tensor, layer: ConvOperands, slots: Tensor) -> Tensor:
    """See reference_recurrence.step_short_conv."""
    rows, (width, taps) = projected.shape[0], layer.conv.shape
    out = torch.empty(rows, width, dtype=projected.dtype, device=projected.device)
    launcher(short_conv_rows, (rows, triton.cdiv(width, 256)))(
        projected,
        slots,
        layer.tails,
        layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias,
        out,
        projected.stride(0),
        WIDTH=width,
        TAPS=taps,
        BIAS=layer.conv_bias is not None,
        BLOCK=256,
        num_warps=2,
        **pdl_options(projected),
    )
    return out
