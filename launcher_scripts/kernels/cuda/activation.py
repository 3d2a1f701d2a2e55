"""Activations and gates, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.common import clamped_swiglu
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options

ACTIVATION_CODES = {
    None: 0,
    "gelu": 1,
    "gelu_erf": 2,
    "relu": 3,
    "silu": 4,
    "squared_relu": 5,
    "clamped_swiglu": 6,
}
CLAMP = tl.constexpr(clamped_swiglu.CLAMP)
SLOPE = tl.constexpr(clamped_swiglu.SLOPE)
GATE_BLOCK = 2048


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a code in ACTIVATION_CODES."""
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
    elif ACTIVATION == 6:
        x = x / (1.0 + tl.exp(-SLOPE * x))
    return x


@triton.jit
def activate_gated(x, gate, ACTIVATION: tl.constexpr):
    """See reference.activated."""
    if ACTIVATION == 6:
        x = tl.minimum(x, CLAMP)
        gate = tl.minimum(tl.maximum(gate, -CLAMP), CLAMP) + 1.0
    return activate(x, ACTIVATION) * gate


@triton.jit
def multiply_gate(
    up,
    gate,
    size,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """up = act(up) * gate, of `size` numbers."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    value = activate_gated(value, factor, ACTIVATION)
    tl.store(up + places, value.to(up.dtype.element_ty), mask=inside)


def gated(up: Tensor, gate: Tensor, activation: str) -> Tensor:
    """act(up) * gate of [N, ffn] each, in the place of `up`."""
    launcher(multiply_gate, (triton.cdiv(up.numel(), GATE_BLOCK),))(
        up,
        gate,
        up.numel(),
        ACTIVATION=ACTIVATION_CODES[activation],
        BLOCK=GATE_BLOCK,
        num_warps=8,
        **pdl_options(up),
    )
    return up
