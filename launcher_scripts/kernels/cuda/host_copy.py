"""Tokens of a step written into the host's memory, in the Triton language.

A kernel begins as soon as the one ahead has ended. To hand a few tokens to a copy engine takes
5 us longer (docs/decode-speed.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from launcher_scripts.kernels.cuda.compiling import launcher

BLOCK = 128


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["numbers", "out"])
def copy_numbers(numbers, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < count
    tl.store(out + places, tl.load(numbers + places, mask=there), mask=there)


def copy_to_host(tokens: Tensor, host: Tensor) -> None:
    """See reference.copy_to_host."""
    count = tokens.shape[0]
    launcher(copy_numbers, (triton.cdiv(count, BLOCK),))(
        tokens.contiguous(), host, count, BLOCK=BLOCK, num_warps=1
    )
