"""Weights of four bits in the Triton language: products that convert them in registers.

See four_bits.py for how they lie in memory.

e2m1:  sign, exponent and mantissa are moved to where bfloat16 or float32 has them. The number is
       2^126 too small, zero and one half are the type's smallest ones.
int4:  bfloat16 of 128 to 143 has the code as its last bits. One row's products take the code itself
       for the bits of a float32, as those of int8 do; see gemv.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels import four_bits
from launcher_scripts.kernels.cuda.elementwise import add_bytes, permuted

GROUP = tl.constexpr(four_bits.GROUP)
PERIOD = tl.constexpr(four_bits.PERIOD)
CODE_OF_ZERO = tl.constexpr(four_bits.ZERO_POINT)
RAISED_SCALE = four_bits.RAISED  # of e2m1: 2^126 times the number and the scale may not fit
E2M1_UNIT = tl.constexpr(2.0 ** (126 - RAISED_SCALE))  # what is missing then
QUARTER = tl.constexpr(four_bits.QUARTER)
PERIODS = tl.constexpr(4)
LINE_COLUMNS = tl.constexpr(4 * four_bits.PERIOD)  # columns that 128 bytes have
RAISED = tl.constexpr(2.0**80)  # times x: its products with the smallest numbers are normal
E2M1_LOWERED = tl.constexpr(2.0 ** (126 - RAISED_SCALE - 80))
HALVES_PER_LONG = tl.constexpr(4)
PER_LONG = tl.constexpr(16)
LONGS_PER_LOAD = tl.constexpr(2)  # longs a thread holds side by side: 16 bytes
BYTES = tl.constexpr(0x0F0F0F0F)
# Integers of x that are less than 2^14; the bits of 1.5 * 2^23 plus an integer have it as the last.
X_BITS = tl.constexpr(13)
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
MIN_X = tl.constexpr(2.0**-100)
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
def pairs_at(scales):
    """Addresses of scales as those of what a period has of them, a word or a long."""
    is_wide: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth >= 32
    return scales.to(tl.pointer_type(tl.int64 if is_wide else tl.int32))


@triton.jit
def terms_of(pairs, kind: tl.constexpr):
    """float32 scales of the four lanes of a period, and their zero points.

    kind: the type of scales
    """
    first, second = _words(pairs, kind)
    zero = tl.full(pairs.shape, CODE_OF_ZERO, tl.float32)
    other_zero = zero
    if kind == tl.int32:
        zero, other_zero = (first & 15).to(tl.float32), (second & 15).to(tl.float32)
        first, second = first & -16, second & -16
    if kind == tl.int64:
        one, two = _float32(first << 16), _float32(first & -65536)
        three, four = _float32(second << 16), _float32(second & -65536)
    elif kind == tl.float16:
        one = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        three = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        two, four = one, three
    else:
        one, three = _float32(first), _float32(second)
        two, four = one, three
    return one, two, three, four, zero, zero, other_zero, other_zero


@triton.jit
def _words(pairs, kind: tl.constexpr):
    """The low and the high half of scales' bits; those of 16 bits as the upper ones of a word."""
    if kind.primitive_bitwidth == 16:
        first, second = pairs << 16, pairs & -65536
    else:
        first, second = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
    return first, second


@triton.jit
def _factors_of(pairs, kind: tl.constexpr):
    """As terms_of, in bfloat16, what PTX multiplies numbers by and what it takes off before."""
    first, second = _words(pairs, kind)
    one, three = _bfloat16(first >> 16), _bfloat16(second >> 16)
    two, four = one, three
    offset = tl.full(pairs.shape, 128.0 + CODE_OF_ZERO, tl.bfloat16)
    other_offset = offset
    if kind == tl.int64:
        two, four = one, three
        one, three = _bfloat16(first), _bfloat16(second)
    if kind == tl.int32:
        offset, other_offset = _bfloat16(first & 15 | 0x4300), _bfloat16(second & 15 | 0x4300)
    return one, two, three, four, offset, offset, other_offset, other_offset


@triton.jit
def _float32(bits):
    return bits.to(tl.float32, bitcast=True)


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
def _small(word, LANE: tl.constexpr, UPPER: tl.constexpr, E2M1: tl.constexpr):
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
    factor, offset = terms[LANE], terms[4 + LANE]
    if PTX and kind == tl.bfloat16:
        number = _widened(halves, factor, offset, LANE, E2M1)
    else:
        if PTX:
            unit = tl.full(factor.shape, E2M1_UNIT if E2M1 else 1.0, tl.bfloat16)
            number = _widened(halves, unit, tl.full(factor.shape, 128.0, tl.bfloat16), LANE, E2M1)
            number = number.to(tl.float32)
        else:
            number = _small(halves.to(tl.int32), LANE, False, E2M1)
            number *= E2M1_UNIT if E2M1 else 1.0
        if not E2M1:
            number -= offset
        number = (number * factor).to(kind)
    return number


@triton.jit
def scales_at(scales, gate_scales, rows, is_up, IN: tl.constexpr, GATED: tl.constexpr):
    """Addresses of the scales of rows; with GATED the gate's, but for those that are up's."""
    offset = rows * (IN // PERIOD)
    start = pairs_at(scales) + offset
    if GATED:
        start = tl.where(is_up, start, pairs_at(gate_scales) + offset)
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
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
):
    """dot.add_pieces of a weight of four bits; its scales are applied.

    starts, scales, local: [ROWS, 1], where the weight's rows and their scales start, and which
        there are
    first, COLUMNS: where and how many columns are summed, whole BLOCKs of whole lines. Not known
        how many, the compiler has each product wait for the one before it.
    EVEN: all rows are of the weight, and all columns;  KIND: the type of scales
    """
    kind: tl.constexpr = inputs.dtype.element_ty
    ROWS: tl.constexpr = starts.shape[0]
    product = tl.zeros([ROWS, inputs.shape[1]], tl.float32)
    halves = tl.arange(0, LINE_COLUMNS // 4)[None, :]
    periods = tl.arange(0, PERIODS)[None, :]
    columns = tl.arange(0, PERIOD)[:, None]
    weights = starts.to(tl.pointer_type(tl.int16)) + halves
    for step in tl.range(0, COLUMNS, BLOCK):
        for part in tl.static_range(0, BLOCK, LINE_COLUMNS):
            at = first + step + part
            if EVEN:
                tile = tl.load(weights + at // 4, eviction_policy="evict_first")
            else:
                mask = local & (at // 4 + halves < IN // 4)
                tile = tl.load(weights + at // 4, mask, 0, eviction_policy="evict_first")
            column_periods = at // PERIOD + periods
            mask = local & (column_periods < IN // PERIOD)
            pairs = _fourths(tl.load(scales + column_periods, mask, 0), ROWS, 1)
            tiles = _fourths(tile, ROWS, QUARTER)
            for period in tl.static_range(PERIODS):
                column = at + period * PERIOD + columns
                x = tl.load(inputs + column, mask=valid & (column < IN), other=0.0)
                values = _period(tiles[period], pairs[period], KIND, kind, PTX)
                product = tl.dot(values, x, product, input_precision="ieee")
    if PTX and kind == tl.bfloat16 and (tl.int16 == KIND or tl.int64 == KIND):
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
def _period(halves, pairs, KIND: tl.constexpr, kind: tl.constexpr, PTX: tl.constexpr):
    """The weights [ROWS, PERIOD] of halves, each row's in their order; see quarter.

    pairs, KIND: what the period has of scales, and their type
    """
    e2m1: tl.constexpr = tl.int16 == KIND or tl.int64 == KIND
    in_bfloat16: tl.constexpr = PTX and kind == tl.bfloat16
    terms = _factors_of(pairs, KIND) if in_bfloat16 else terms_of(pairs, KIND)
    first = quarter(halves, terms, kind, 0, e2m1, PTX)
    second = quarter(halves, terms, kind, 1, e2m1, PTX)
    third = quarter(halves, terms, kind, 2, e2m1, PTX)
    fourth = quarter(halves, terms, kind, 3, e2m1, PTX)
    lanes = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(lanes, [0, 2, 3, 1]), [halves.shape[0], PERIOD])


@triton.jit
def load_longs(
    weight,
    scales,
    rows,
    first,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    LONGS: tl.constexpr,
):
    """int64 [ROWS, LONGS], those from `first` on of the rows of a weight, zeros outside; and where
    the scales of what a thread holds of them are [ROWS, LONGS / LONGS_PER_LOAD]."""
    local = (rows < OUT)[:, None]
    lines = rows[:, None].to(tl.int64)
    longs = first + tl.arange(0, LONGS)[None, :]
    at = weight.to(tl.pointer_type(tl.int64)) + lines * (IN // PER_LONG)
    at = tl.max_contiguous(at + longs, [1, LONGS_PER_LOAD])
    mask = local & (longs < IN // PER_LONG)
    tile = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    periods = (first // LONGS_PER_LOAD + tl.arange(0, LONGS // LONGS_PER_LOAD)[None, :]) // (
        4 // LONGS_PER_LOAD
    )
    mask = local & (periods < IN // PERIOD)
    at = pairs_at(scales) + lines * (IN // PERIOD) + periods
    return tile, at, mask


@triton.jit
def _quads(x, first, mask):
    """Four neighbouring numbers of x from each of `first` on, in float32."""
    if x.dtype.element_ty == tl.float32:
        one = tl.load(x + first, mask=mask, other=0.0)
        two = tl.load(x + first + 1, mask=mask, other=0.0)
        three = tl.load(x + first + 2, mask=mask, other=0.0)
        four = tl.load(x + first + 3, mask=mask, other=0.0)
    else:
        at = tl.max_contiguous(tl.multiple_of(first // 4, [1, LONGS_PER_LOAD]), [1, LONGS_PER_LOAD])
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
def _split(one, two, three, four, inverse):
    """The high and the low bytes of four numbers as integers of 16 bits, each four in a word."""
    first = permuted(_integer(one, inverse), _integer(two, inverse), "0x5140")
    second = permuted(_integer(three, inverse), _integer(four, inverse), "0x5140")
    return permuted(first, second, "0x7632"), permuted(first, second, "0x5410")


@triton.jit
def _integer(number, inverse):
    return (number * inverse + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _sum_of_bytes(codes, other_codes, bytes):
    """The integer of codes times x, as the bits of a float32 that is MAGIC too large."""
    high, low, other_high, other_low = bytes
    total = add_bytes(tl.zeros(codes.shape, tl.int32), codes, high, "s")
    total = add_bytes(total, other_codes, other_high, "s") * 256 + MAGIC_BITS
    total = add_bytes(total, codes, low, "u")
    return add_bytes(total, other_codes, other_low, "u").to(tl.float32, bitcast=True)


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
    PAIRS: tl.constexpr = values.shape[1] // LONGS_PER_LOAD
    return tl.sum(tl.reshape(values, [ROWS, PAIRS, LONGS_PER_LOAD]), 2)


@triton.jit
def _lanes(
    long, x, LANE: tl.constexpr, COUNT: tl.constexpr, BY_BYTES: tl.constexpr, E2M1: tl.constexpr
):
    """Products of COUNT lanes of longs from one on, without scales and zero points, and what is to
    be multiplied by these: [ROWS, LONGS] and [1, LONGS]. By bytes lanes come in groups of two."""
    word, upper = long.to(tl.int32), (long >> 32).to(tl.int32)
    if BY_BYTES:
        bytes, step, total = x[LANE // 2]
        low, high = (word >> (2 * LANE)) & BYTES, (upper >> (2 * LANE)) & BYTES
        product = (_sum_of_bytes(low, high, bytes) - MAGIC) * step
        total *= step
    else:
        product = tl.zeros(long.shape, tl.float32)
        total = tl.zeros([1, long.shape[1]], tl.float32)
        for lane in tl.static_range(LANE, LANE + COUNT):
            quad = x[lane]
            for half in tl.static_range(4):
                bits = word if half < 2 else upper
                product += _small(bits, lane, half % 2, E2M1) * quad[half]
                total += quad[half]
    return product, total


@triton.jit
def _add_longs(total, tile, x, kind: tl.constexpr, BY_BYTES: tl.constexpr):
    """total [ROWS, pairs of longs] plus the products of longs' codes with their inputs.

    tile: of load_longs;  x: of `_inputs`;  kind: the type of scales
    """
    e2m1: tl.constexpr = kind == tl.int16 or kind == tl.int64
    count: tl.constexpr = 1 if kind == tl.int64 else 2
    long, at, mask = tile
    terms = terms_of(tl.load(at, mask=mask, other=0), kind)
    for lane in tl.static_range(0, 4, count):
        product, inputs = _lanes(long, x, lane, count, BY_BYTES, e2m1)
        product = _of_pairs(product)
        if not e2m1:
            product -= terms[4 + lane] * _of_pairs(inputs)
        total += product * terms[lane]
    return total


@triton.jit
def _inputs(x, first, mask, E2M1: tl.constexpr, BY_BYTES: tl.constexpr):
    """The inputs of longs as `_lanes` takes them; those of e2m1 are RAISED.

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
    e2m1: tl.constexpr = kind == tl.int16 or kind == tl.int64
    by_bytes: tl.constexpr = PTX and not e2m1 and x.dtype.element_ty != tl.float32
    product = tl.zeros([ROWS, LONGS // LONGS_PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, LONGS // LONGS_PER_LOAD], tl.float32)
    for first in tl.static_range(0, IN // PER_LONG, LONGS):
        if first > 0:
            tile = load_longs(weight, scales, rows, first, OUT, IN, LONGS)
            if PAIRED:
                other_tile = load_longs(
                    other_weight, other_scales, other_rows, first, OUT, IN, LONGS
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
