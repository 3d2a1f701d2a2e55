"""Loads in the Triton language: prefetches into L2, and e4m3 values of the KV cache.

A cache of keys and values in e4m3: how its numbers are made and read, in the Triton language.

Numbers are rounded on their bits: ptxas 12.8 confuses neighbours where e4m3 that was just made is
made float32 again. The conversion behind that is exact.

One instruction makes float16 of two e4m3; bfloat16 takes three, two of which are slow. So what is
multiplied on the matrix units is float16: it holds all of e4m3, and more bits of the queries and of
the softmax than bfloat16.
"""

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
def prefetch_if(addresses, condition):
    """Prefetch what lies at the addresses that are wanted; the others need not be valid."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, condition.to(tl.int32)],
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
        line_indices = begin + tl.minimum(lines, tl.maximum(count - 1, 0))
        prefetch(first + line_indices)
        prefetch(second + line_indices)


E4M3_MAX = tl.constexpr(448.0)
MIN_NORMAL = tl.constexpr(2.0**-6)
# Next to it float32 has the steps of e4m3's subnormal numbers, 2^-9.
SUBNORMAL_STEPS = tl.constexpr(1.5 * 2.0**14)
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def of_four_bits(values):
    """float32 rounded to the nearest that e4m3 holds, if that is no subnormal number of it."""
    bits = values.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return (bits & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def kept(values, KIND: tl.constexpr):
    """float32 as a cache of KIND keeps it: quantization.saturated, of e4m3 still in float32."""
    if tl.float8e4nv == KIND:
        small = (values + SUBNORMAL_STEPS) - SUBNORMAL_STEPS
        rounded = tl.where(tl.abs(values) < MIN_NORMAL, small, of_four_bits(values))
        rounded = tl.minimum(tl.maximum(rounded, -E4M3_MAX), E4M3_MAX)
        rounded_values = tl.where(values == values, rounded, values)  # NaN stays
    else:
        rounded_values = values.to(KIND)
    return rounded_values


@triton.jit
def for_products(queries, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """float32 queries in the type in which they are multiplied with keys of KIND."""
    if tl.float8e4nv == KIND and tl.bfloat16 == COMPUTE:
        limited = tl.minimum(tl.maximum(queries, -FLOAT16_MAX), FLOAT16_MAX)
        products = tl.where(queries == queries, limited, queries).to(tl.float16)
    else:
        products = queries.to(COMPUTE)
    return products


@triton.jit
def in_halves(tile, PTX: tl.constexpr):
    """Keys or values of a cache, those of e4m3 in float16.

    PTX: kernels are compiled. The compiler may not move this instruction, or it would have values
    read byte by byte behind it, in the order of a product.
    """
    if tile.dtype == tl.float8e4nv:
        if PTX:
            tile = tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }""",
                "=r,=r,r",
                [tile],
                dtype=tl.float16,
                is_pure=False,
                pack=4,
            )
        else:
            tile = tile.to(tl.float16)
    return tile
