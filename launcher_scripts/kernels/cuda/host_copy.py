"""Tokens of a step written into the host's memory, in the Triton language.

A step that is a CUDA graph does it itself, so the host launches nothing for it. A copy engine would
take 5 us longer (docs/decode-speed.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options

BLOCK = 256


@triton.jit(
    do_not_specialize=["count", "lines", "width", "padding"],
    do_not_specialize_on_alignment=["tokens", "slots", "memory"],
)
def write_line(
    tokens,
    slots,
    memory,
    written,
    count,
    lines,
    width,
    padding,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the tokens of all rows, and that a line more has been written."""
    if USE_PDL:
        gdc_wait()
    if tl.load(slots) != padding:
        number = tl.load(written)
        line = memory + number % lines * width
        for first in range(0, count, BLOCK):
            places = first + tl.arange(0, BLOCK)
            there = places < count
            tl.store(line + places, tl.load(tokens + places, mask=there), mask=there)
        tl.store(written, number + 1)


def copy_to_host(
    tokens: Tensor, slots: Tensor, memory: Tensor, written: Tensor, padding: int
) -> None:
    """See reference.copy_to_host."""
    lines, width = memory.shape
    launcher(write_line, (1,))(
        tokens.contiguous(),
        slots.contiguous(),
        memory,
        written,
        min(tokens.shape[0], width),
        lines,
        width,
        padding,
        BLOCK=BLOCK,
        **pdl_options(tokens),
    )
