"""Weights of four bits in the Triton language: products that convert them in registers.

See four_bits.py for how they lie in memory. A byte's low and high code belong to columns that are
GROUP apart, so each becomes a tile of its own, which is multiplied with inputs of its own.

e2m1:  sign, exponent and mantissa are moved to where bfloat16 or float32 has them. The number is
       2^126 too small, zero and one half are the type's smallest ones.
int4:  bfloat16 of 128 to 143 has the code as its last bits. One row's products take the code itself
       for the bits of a float32, as those of int8 do; see gemv.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels import four_bits
from launcher_scripts.kernels.cuda.compiling import DotTile

GROUP = tl.constexpr(four_bits.GROUP)
PERIOD = tl.constexpr(four_bits.PERIOD)
ZERO_POINT = tl.constexpr(four_bits.ZERO_POINT)
RAISED_SCALE = four_bits.RAISED  # of e2m1: 2^126 times the number and the scale may not fit
E2M1_UNIT = tl.constexpr(2.0 ** (126 - RAISED_SCALE))  # what is missing then
QUARTER = tl.constexpr(four_bits.QUARTER)
PERIODS = tl.constexpr(4)
LINE = tl.constexpr(4 * four_bits.PERIOD)  # columns that 128 bytes have
SIGNED = tl.constexpr(-0x7E400000)  # where float32 has e2m1's sign, exponent and mantissa

# The codes at one lane of two halves as a pair of numbers, less an offset, times a factor.
_INT4 = "lop3.b32 $0, $0, 0x000f000f, 0x43004300, 0xea;\nsub.rn.bf16x2 $0, $0, $3;"
_INT4 += "\nmul.rn.bf16x2 $0, $0, $2;"
_E2M1 = "\nand.b32 $0, $0, 0x81c081c0;\nmul.rn.bf16x2 $0, $0, $2;"
INT4_1 = tl.constexpr("mov.b32 $0, $1;" + _INT4)
INT4_2 = tl.constexpr("shr.b32 $0, $1, 8;" + _INT4)
INT4_3 = tl.constexpr("shr.b32 $0, $1, 4;" + _INT4)
INT4_4 = tl.constexpr("shr.b32 $0, $1, 12;" + _INT4)
E2M1_1 = tl.constexpr("mov.b32 $0, $1;" + _E2M1)
E2M1_2 = tl.constexpr("shl.b32 $0, $1, 3;" + _E2M1)
E2M1_3 = tl.constexpr("shl.b32 $0, $1, 6;" + _E2M1)
E2M1_4 = tl.constexpr(
    "{\n.reg .b32 t;\nshl.b32 $0, $1, 1;\nand.b32 $0, $0, 0x80008000;\nshr.b32 t, $1, 5;\n"
    "lop3.b32 $0, t, 0x01000100, $0, 0xea;\nshr.b32 t, $1, 4;\n"
    "lop3.b32 $0, t, 0x00c000c0, $0, 0xea;\nmul.rn.bf16x2 $0, $0, $2;\n}"
)


@triton.jit
def load_pairs(scales, groups, mask):
    """The bits of the scales of even groups, with those of the groups after them above them."""
    if scales.dtype.element_ty.primitive_bitwidth == 32:
        pointers = scales.to(tl.pointer_type(tl.int64))
    else:
        pointers = scales.to(tl.pointer_type(tl.int32))
    return tl.load(pointers + groups // 2, mask=mask, other=0)


@triton.jit
def terms_of(pairs, kind: tl.constexpr):
    """float32 scales of even groups and of those after them, and the zero points of both.

    kind: the type of scales
    """
    if kind.primitive_bitwidth == 32:
        first, second = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
    else:
        first, second = pairs << 16, pairs & -65536
    low_zero = tl.full(pairs.shape, ZERO_POINT, tl.float32)
    high_zero = low_zero
    if kind == tl.int32:
        low_zero, high_zero = (first & 15).to(tl.float32), (second & 15).to(tl.float32)
        first, second = first & -16, second & -16
    if kind == tl.float16:
        low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low, high = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
    return low, high, low_zero, high_zero


@triton.jit
def _factors_of(pairs, kind: tl.constexpr):
    """As terms_of, in bfloat16, what PTX multiplies numbers by and what it takes off before."""
    offset = tl.full(pairs.shape, 128.0 + ZERO_POINT, tl.bfloat16)
    other_offset = offset
    if kind == tl.int32:
        first, second = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
        low, high = _bfloat16(first >> 16), _bfloat16(second >> 16)
        offset, other_offset = _bfloat16(first & 15 | 0x4300), _bfloat16(second & 15 | 0x4300)
    else:
        low, high = _bfloat16(pairs), _bfloat16(pairs >> 16)
    return low, high, offset, other_offset


@triton.jit
def _bfloat16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _by_ptx(halves, factor, offset, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, "=&r,r,r,r", [halves, factor, offset], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _widened(halves, factor, offset, LANE: tl.constexpr, E2M1: tl.constexpr):
    """(code - offset) * factor in bfloat16, of int4's code plus 128."""
    if LANE == 0:
        number = _by_ptx(halves, factor, offset, E2M1_1 if E2M1 else INT4_1)
    elif LANE == 1:
        number = _by_ptx(halves, factor, offset, E2M1_2 if E2M1 else INT4_2)
    elif LANE == 2:
        number = _by_ptx(halves, factor, offset, E2M1_3 if E2M1 else INT4_3)
    else:
        number = _by_ptx(halves, factor, offset, E2M1_4 if E2M1 else INT4_4)
    return number


@triton.jit
def _moved(bits, COUNT: tl.constexpr):
    """Bits moved to the left, or to the right."""
    return bits << COUNT if COUNT >= 0 else bits >> -COUNT


@triton.jit
def small(word, LANE: tl.constexpr, UPPER: tl.constexpr, E2M1: tl.constexpr):
    """The number at a lane of the lower or upper half of words, in float32: int4's code; e2m1 is
    2^126 too small."""
    up: tl.constexpr = 0 if UPPER else 16
    if not E2M1:
        number = (word >> (16 - up + LANE % 2 * 8 + LANE // 2 * 4) & 15).to(tl.float32)
    else:
        if LANE < 3:
            bits = word << (up + 3 * LANE) & SIGNED
        else:
            bits = word << (up + 1) & -0x80000000
            bits |= _moved(word, up - 5) & 0x01000000
            bits |= _moved(word, up - 4) & 0x00C00000
        number = bits.to(tl.float32, bitcast=True)
    return number


@triton.jit
def quarter(
    halves, terms, kind: tl.constexpr, LANE: tl.constexpr, E2M1: tl.constexpr, PTX: tl.constexpr
):
    """The weights at one lane of halves in a type; e2m1's in bfloat16 by PTX lack E2M1_UNIT.

    terms: of terms_of, or _factors_of for bfloat16 with PTX
    """
    factor, offset = terms[LANE // 2], terms[2 + LANE // 2]
    if PTX and kind == tl.bfloat16:
        number = _widened(halves, factor, offset, LANE, E2M1)
    else:
        if PTX:
            unit = tl.full(factor.shape, E2M1_UNIT if E2M1 else 1.0, tl.bfloat16)
            number = _widened(halves, unit, tl.full(factor.shape, 128.0, tl.bfloat16), LANE, E2M1)
            number = number.to(tl.float32)
        else:
            number = small(halves.to(tl.int32), LANE, False, E2M1)
            number *= E2M1_UNIT if E2M1 else 1.0
        if not E2M1:
            number -= offset
        number = (number * factor).to(kind)
    return number


@triton.jit
def scales_at(scales, gate_scales, rows, is_up, IN: tl.constexpr, GATED: tl.constexpr):
    """Addresses of the scales of rows; with GATED the gate's, but for those that are up's."""
    offset = rows * (IN // GROUP)
    start = scales + offset
    if GATED:
        start = tl.where(is_up, start, gate_scales + offset)
    return start


@triton.jit
def add_packed(
    inputs,
    valid,
    starts,
    scales,
    local,
    first,
    COLUMNS: tl.constexpr,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """dot.add_pieces of a weight of four bits; its scales are applied.

    starts, scales, local: [ROWS, 1], where the weight's rows and their scales start, and which
        there are
    first, COLUMNS: where and how many columns are summed, which are whole BLOCKs, as these are
        whole LINEs. Where the compiler does not know how many, it has each of the products with
        weights from registers wait for the one before it.
    EVEN: all rows are of the weight, and all columns
    """
    kind: tl.constexpr = inputs.dtype.element_ty
    product = tl.zeros([ROWS, BATCH], tl.float32)
    halves = tl.arange(0, LINE // 4)[None, :]
    pairs = tl.arange(0, PERIODS)[None, :]
    columns = tl.arange(0, PERIOD)[:, None]
    weights = starts.to(tl.pointer_type(tl.int16)) + halves
    for step in tl.range(0, COLUMNS, BLOCK):
        for part in tl.static_range(0, BLOCK, LINE):
            at = first + step + part
            if EVEN:
                tile = tl.load(weights + at // 4, eviction_policy="evict_first")
            else:
                mask = local & (at // 4 + halves < IN // 4)
                tile = tl.load(weights + at // 4, mask, 0, eviction_policy="evict_first")
            mask = local & (at // PERIOD + pairs < IN // PERIOD)
            terms = _fourths(load_pairs(scales, at // GROUP + 2 * pairs, mask), ROWS, 1)
            tiles = _fourths(tile, ROWS, QUARTER)
            for period in tl.static_range(PERIODS):
                column = at + period * PERIOD + columns
                x = tl.load(inputs + column, mask=valid & (column < IN), other=0.0)
                values = _period(tiles[period], terms[period], scales, kind, PTX)
                product = tl.dot(values, x, product, input_precision="ieee")
    if PTX and kind == tl.bfloat16 and scales.dtype.element_ty == tl.int16:
        product *= E2M1_UNIT
    return product


@triton.jit
def _fourths(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, 4 * SIZE] as four [ROWS, SIZE], which lie as a thread holds them."""
    parts = tl.permute(tl.reshape(values, [ROWS, 2, 2, SIZE]), [0, 3, 1, 2])
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _period(halves, pairs, scales, kind: tl.constexpr, PTX: tl.constexpr):
    """The weights [ROWS, PERIOD] of halves, each row's in their order; see quarter."""
    scale: tl.constexpr = scales.dtype.element_ty
    e2m1: tl.constexpr = scale == tl.int16
    in_bfloat16: tl.constexpr = PTX and kind == tl.bfloat16
    terms = _factors_of(pairs, scale) if in_bfloat16 else terms_of(pairs, scale)
    first = quarter(halves, terms, kind, 0, e2m1, PTX)
    second = quarter(halves, terms, kind, 1, e2m1, PTX)
    third = quarter(halves, terms, kind, 2, e2m1, PTX)
    fourth = quarter(halves, terms, kind, 3, e2m1, PTX)
    lanes = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(lanes, [0, 2, 3, 1]), [halves.shape[0], PERIOD])


def packed_tile(tile: DotTile, in_size: int) -> DotTile:
    """The tile with as many columns and splits, up to its own, as divide the inputs' lines."""
    lines = triton.cdiv(in_size, LINE.value)
    at_once = _divisor(lines, tile.block // LINE.value)
    splits = _divisor(lines // at_once, tile.splits)
    return tile._replace(block=at_once * LINE.value, splits=splits, prefetch=0)


def _divisor(number: int, largest: int) -> int:
    return next((n for n in range(largest, 1, -1) if number % n == 0), 1)
