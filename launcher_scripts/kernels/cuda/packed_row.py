"""Weights of four bits times one row, in the Triton language: the inside of gemv.py for them.

A thread holds two longs of a weight side by side, which are half a period: see four_bits.py. With
PTX int4 is multiplied as bytes, unless x is float32; e2m1, and what has no PTX, as float32, of
which a code has some bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels.cuda.packed import (
    GROUP,
    PERIOD,
    QUARTER,
    RAISED_SCALE,
    load_pairs,
    small,
    terms_of,
)

RAISED = tl.constexpr(2.0**80)  # times x: its products with the smallest numbers are normal
E2M1_LOWERED = tl.constexpr(2.0 ** (126 - RAISED_SCALE - 80))
HALVES_PER_LONG = tl.constexpr(4)
PER_LONG = tl.constexpr(16)
PER_LOAD = tl.constexpr(2)  # longs a thread holds side by side: 16 bytes
BYTES = tl.constexpr(0x0F0F0F0F)
# Integers of x that are less than 2^14; the bits of 1.5 * 2^23 plus an integer have it as the last.
X_BITS = tl.constexpr(13)
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
MIN_X = tl.constexpr(2.0**-100)
PREDICATED = tl.constexpr("{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n")


@triton.jit
def _load_where_needed(scales, periods, mask):
    """load_pairs by the threads that multiply by them: the compiler would have others load them,
    and hand them over through shared memory."""
    if scales.dtype.element_ty.primitive_bitwidth == 32:
        pairs = tl.inline_asm_elementwise(
            PREDICATED + "mov.b64 $0, 0;\n@p ld.global.b64 $0, [$1];\n}",
            "=&l,l,r",
            [scales.to(tl.pointer_type(tl.int64)) + periods, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        pairs = tl.inline_asm_elementwise(
            PREDICATED + "mov.b32 $0, 0;\n@p ld.global.b32 $0, [$1];\n}",
            "=&r,l,r",
            [scales.to(tl.pointer_type(tl.int32)) + periods, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return pairs


@triton.jit
def load_longs(
    weight,
    scales,
    rows,
    first,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    LONGS: tl.constexpr,
    PTX: tl.constexpr,
):
    """int64 [ROWS, LONGS], those from `first` on of the rows of a weight, and the pairs of scales
    [ROWS, LONGS / PER_LOAD] of what a thread holds of them; zeros outside."""
    local = (rows < OUT)[:, None]
    lines = rows[:, None].to(tl.int64)
    longs = first + tl.arange(0, LONGS)[None, :]
    at = weight.to(tl.pointer_type(tl.int64)) + lines * (IN // PER_LONG)
    at = tl.max_contiguous(at + longs, [1, PER_LOAD])
    mask = local & (longs < IN // PER_LONG)
    tile = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    periods = (first // PER_LOAD + tl.arange(0, LONGS // PER_LOAD)[None, :]) // (4 // PER_LOAD)
    mask = local & (periods < IN // PERIOD)
    scales += lines * (IN // GROUP)
    if PTX:
        return tile, _load_where_needed(scales, periods, mask)
    else:  # noqa: RET505 (the compiler sees one of both)
        return tile, load_pairs(scales, periods * 2, mask)


@triton.jit
def _quads(x, first, mask):
    """Four neighbouring numbers of x from each of `first` on, in float32."""
    if x.dtype.element_ty == tl.float32:
        one = tl.load(x + first, mask=mask, other=0.0)
        two = tl.load(x + first + 1, mask=mask, other=0.0)
        three = tl.load(x + first + 2, mask=mask, other=0.0)
        four = tl.load(x + first + 3, mask=mask, other=0.0)
    else:
        at = tl.max_contiguous(tl.multiple_of(first // 4, [1, PER_LOAD]), [1, PER_LOAD])
        quad = tl.load(x.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
        low, high = quad.to(tl.int32), (quad >> 32).to(tl.int32)
        if x.dtype.element_ty == tl.bfloat16:
            one = (low << 16).to(tl.float32, bitcast=True)
            two = (low & -65536).to(tl.float32, bitcast=True)
            three = (high << 16).to(tl.float32, bitcast=True)
            four = (high & -65536).to(tl.float32, bitcast=True)
        else:
            one = low.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            two = (low >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            three = high.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            four = (high >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return one, two, three, four


@triton.jit
def _max_abs(quad):
    one, two, three, four = quad
    return tl.maximum(tl.maximum(tl.abs(one), tl.abs(two)), tl.maximum(tl.abs(three), tl.abs(four)))


@triton.jit
def _permuted(bytes, others, SELECTED: tl.constexpr):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + SELECTED + ";",
        "=r,r,r",
        [bytes, others],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_bytes(total, codes, bytes, SIGN: tl.constexpr):
    """total plus products of four bytes without a sign with others, which have one if SIGN is s."""
    return tl.inline_asm_elementwise(
        "dp4a.u32." + SIGN + "32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [codes, bytes, total],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _split(one, two, three, four, inverse):
    """The high and the low bytes of four numbers as integers of 16 bits, each four in a word."""
    first = _permuted(_integer(one, inverse), _integer(two, inverse), "0x5140")
    second = _permuted(_integer(three, inverse), _integer(four, inverse), "0x5140")
    return _permuted(first, second, "0x7632"), _permuted(first, second, "0x5410")


@triton.jit
def _integer(number, inverse):
    return (number * inverse + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _sum_of_bytes(codes, other_codes, bytes):
    """The integer of codes times x, as the bits of a float32 that is MAGIC too large."""
    high, low, other_high, other_low = bytes
    total = _add_bytes(tl.zeros(codes.shape, tl.int32), codes, high, "s")
    total = _add_bytes(total, other_codes, other_high, "s") * 256 + MAGIC_BITS
    total = _add_bytes(total, codes, low, "u")
    return _add_bytes(total, other_codes, other_low, "u").to(tl.float32, bitcast=True)


@triton.jit
def _in_bytes(quad, other):
    """Two quads, which are QUARTER apart, as _sum_of_bytes takes them, the step of their integers,
    and their sum."""
    one, two, three, four = quad
    first, second, third, fourth = other
    max_abs = tl.maximum(tl.maximum(_max_abs(quad), _max_abs(other)), MIN_X)
    exponent = max_abs.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (127 << 23) - exponent + ((127 + X_BITS) << 23)
    inverse = inverse.to(tl.float32, bitcast=True)
    step = (exponent - (X_BITS << 23)).to(tl.float32, bitcast=True)
    high, low = _split(one, first, two, second, inverse)
    other_high, other_low = _split(three, third, four, fourth, inverse)
    bytes = high, low, other_high, other_low
    ones = tl.full(high.shape, 0x01010101, tl.int32)
    return bytes, step, _sum_of_bytes(ones, ones, bytes) - MAGIC


@triton.jit
def _of_pairs(values):
    """Sums of the longs that a thread holds side by side."""
    ROWS: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = values.shape[1] // PER_LOAD
    return tl.sum(tl.reshape(values, [ROWS, PAIRS, PER_LOAD]), 2)


@triton.jit
def _group(long, x, HIGH: tl.constexpr, BY_BYTES: tl.constexpr, E2M1: tl.constexpr):
    """Products of the low or of the high group of longs, which miss scales and zero points, and
    what is to be multiplied by these: [ROWS, LONGS] and [1, LONGS]."""
    word, upper = long.to(tl.int32), (long >> 32).to(tl.int32)
    if BY_BYTES:
        bytes, step, total = x[HIGH]
        low, high = (word >> (4 * HIGH)) & BYTES, (upper >> (4 * HIGH)) & BYTES
        product = (_sum_of_bytes(low, high, bytes) - MAGIC) * step
        total *= step
    else:
        product = tl.zeros(long.shape, tl.float32)
        total = tl.zeros([1, long.shape[1]], tl.float32)
        for quarter in tl.static_range(2):
            quad = x[2 * HIGH + quarter]
            for half in tl.static_range(4):
                bits = word if half < 2 else upper
                product += small(bits, 2 * HIGH + quarter, half % 2, E2M1) * quad[half]
                total += quad[half]
    return product, total


@triton.jit
def _add_longs(total, tile, x, kind: tl.constexpr, BY_BYTES: tl.constexpr):
    """total [ROWS, pairs of longs] plus the products of longs' codes with their inputs.

    tile: of load_longs;  x: of `_inputs`;  kind: the type of scales
    """
    e2m1: tl.constexpr = kind == tl.int16
    long, pairs = tile
    scale, other_scale, zero, other_zero = terms_of(pairs, kind)
    one, low = _group(long, x, 0, BY_BYTES, e2m1)
    other, high = _group(long, x, 1, BY_BYTES, e2m1)
    one, other = _of_pairs(one), _of_pairs(other)
    if not e2m1:
        one -= zero * _of_pairs(low)
        other -= other_zero * _of_pairs(high)
    return total + one * scale + other * other_scale


@triton.jit
def _inputs(x, first, mask, E2M1: tl.constexpr, BY_BYTES: tl.constexpr):
    """The inputs of longs as `_group` takes them; those of e2m1 are RAISED.

    first: the column of a long's first input
    """
    if BY_BYTES:
        return (
            _in_bytes(_quads(x, first, mask), _quads(x, first + QUARTER, mask)),
            _in_bytes(_quads(x, first + GROUP, mask), _quads(x, first + GROUP + QUARTER, mask)),
        )
    else:  # noqa: RET505 (the compiler sees one of both)
        unit: tl.constexpr = RAISED if E2M1 else 1.0
        return (
            _raised(_quads(x, first, mask), unit),
            _raised(_quads(x, first + QUARTER, mask), unit),
            _raised(_quads(x, first + GROUP, mask), unit),
            _raised(_quads(x, first + GROUP + QUARTER, mask), unit),
        )


@triton.jit
def _raised(quad, UNIT: tl.constexpr):
    return quad[0] * UNIT, quad[1] * UNIT, quad[2] * UNIT, quad[3] * UNIT


@triton.jit
def multiply_packed(
    x,
    started,
    other_started,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PAIRED: tl.constexpr,
    PTX: tl.constexpr,
):
    """gemv.multiply of weights of four bits; their scales are applied.

    With PTX int4 is multiplied as bytes, unless x is float32: of x 16 numbers at a time become
    integers of 15 bits.
    """
    weight, scales, rows, tile = started
    other_weight, other_scales, other_rows, other_tile = other_started
    ROWS: tl.constexpr = tile[0].shape[0]
    LONGS: tl.constexpr = tile[0].shape[1]
    kind: tl.constexpr = scales.dtype.element_ty
    e2m1: tl.constexpr = kind == tl.int16
    by_bytes: tl.constexpr = PTX and not e2m1 and x.dtype.element_ty != tl.float32
    product = tl.zeros([ROWS, LONGS // PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, LONGS // PER_LOAD], tl.float32)
    for first in tl.static_range(0, IN // PER_LONG, LONGS):
        if first > 0:
            tile = load_longs(weight, scales, rows, first, OUT, IN, LONGS, PTX)
            if PAIRED:
                other_tile = load_longs(
                    other_weight, other_scales, other_rows, first, OUT, IN, LONGS, PTX
                )
        longs = first + tl.arange(0, LONGS)[None, :]
        column = longs // 4 * PERIOD + longs % 4 * HALVES_PER_LONG
        values = _inputs(x, column, longs < IN // PER_LONG, e2m1, by_bytes)
        product = _add_longs(product, tile, values, kind, by_bytes)
        if PAIRED:
            other = _add_longs(other, other_tile, values, kind, by_bytes)
    if e2m1:
        product, other = product * E2M1_LOWERED, other * E2M1_LOWERED
    return tl.sum(product, 1), tl.sum(other, 1)
