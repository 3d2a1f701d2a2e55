"""Bringing memory into L2 before it is read, in the Triton language: 128 bytes at an address."""

from __future__ import annotations

import triton
import triton.language as tl

BYTES = tl.constexpr(128)  # that one prefetch brings


@triton.jit
def prefetch(addresses):
    """Prefetch what lies at each of the addresses, which must be valid ones."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_if(addresses, wanted):
    """Prefetch what lies at the addresses that are wanted; the others need not be valid."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_both(first, second, begin, count, MOST: tl.constexpr):
    """Prefetch `count` numbers of both from `begin` on, MOST (a power of two, or 0) at most."""
    if MOST > 0:
        line: tl.constexpr = BYTES * 8 // first.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, MOST // line) * line
        places = begin + tl.minimum(lines, tl.maximum(count - 1, 0))
        prefetch(first + places)
        prefetch(second + places)
