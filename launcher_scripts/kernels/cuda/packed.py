"""Weights of four bits in the Triton language: products that convert them in registers.

See four_bits.py for how they lie in memory. A byte's low and high code belong to columns that are
GROUP apart, so each becomes a tile of its own, which is multiplied with inputs of its own.

e2m1:  sign, exponent and mantissa are moved to where bfloat16 or float32 has them. The number is
       2^126 too small, zero and one half are the type's smallest ones.
int4:  bfloat16 of 128 to 143 has the code as its last bits. One row's products take the code itself
       for the bits of a float32, as those of int8 do; see gemv.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher_scripts.kernels import four_bits
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.operands import Linear

GROUP = tl.constexpr(four_bits.GROUP)
PERIOD = tl.constexpr(four_bits.PERIOD)
ZERO_POINT = tl.constexpr(four_bits.ZERO_POINT)
BIAS = tl.constexpr(four_bits.BIAS)
E2M1_UNIT = tl.constexpr(2.0**126)
RAISED = tl.constexpr(2.0**80)  # times x: its products with the smallest numbers are normal
INT4_LOWERED = tl.constexpr(2.0 ** (149 - 80))
E2M1_LOWERED = tl.constexpr(2.0 ** (126 - 80))
PER_WORD = tl.constexpr(8)
PER_LOAD = tl.constexpr(2)  # words a thread holds side by side, and quads of x: 16 bytes

# The low or the high codes of four bytes as two pairs of numbers. Each has a program, because the
# compiler moves those with one result behind shared memory.
_INT4_PTX = """
and.b32 t, t, 0x0f0f0f0f;
prmt.b32 $0, t, m, 0x4140;
prmt.b32 $1, t, m, 0x4342;
sub.rn.bf16x2 $0, $0, offset;
sub.rn.bf16x2 $1, $1, offset;
}"""
_E2M1_PTX = """
and.b32 l, l, 0xc0c0c0c0;
prmt.b32 $0, l, h, 0x5140;
prmt.b32 $1, l, h, 0x7362;
mul.rn.bf16x2 $0, $0, unit;
mul.rn.bf16x2 $1, $1, unit;
}"""
_INT4_BEGIN = """{
.reg .b32 t, m, offset;
mov.b32 m, 0x43434343;
mov.b32 offset, 0x43084308;
"""
_E2M1_BEGIN = """{
.reg .b32 h, l, t, unit;
mov.b32 unit, 0x7e807e80;
"""
INT4_LOW = tl.constexpr(_INT4_BEGIN + "mov.b32 t, $2;" + _INT4_PTX)
INT4_HIGH = tl.constexpr(_INT4_BEGIN + "shr.b32 t, $2, 4;" + _INT4_PTX)
E2M1_LOW = tl.constexpr(_E2M1_BEGIN + "and.b32 h, $2, 0x81818181;\nshl.b32 l, $2, 1;" + _E2M1_PTX)
E2M1_HIGH = tl.constexpr(
    _E2M1_BEGIN
    + "shl.b32 t, $2, 3;\nand.b32 t, t, 0x80808080;\nshr.b32 h, $2, 1;\n"
    + "and.b32 h, h, 0x01010101;\nor.b32 h, h, t;\nshl.b32 l, $2, 4;"
    + _E2M1_PTX
)


@triton.jit
def load_scales(scales, groups, mask):
    """float32 scales of even groups and of those after them, and the zero points of both."""
    if scales.dtype.element_ty == tl.uint8:
        pair = tl.load(scales.to(tl.pointer_type(tl.int16)) + groups // 2, mask=mask, other=0)
        pair = pair.to(tl.int32)
        low = ((pair & 255) << 23).to(tl.float32, bitcast=True)
        high = (((pair >> 8) & 255) << 23).to(tl.float32, bitcast=True)
        low_zero = tl.zeros(low.shape, tl.float32)
        high_zero = low_zero
    elif scales.dtype.element_ty == tl.int32:
        pair = tl.load(scales.to(tl.pointer_type(tl.int64)) + groups // 2, mask=mask, other=0)
        first, second = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        low = (first & -16).to(tl.float32, bitcast=True)
        high = (second & -16).to(tl.float32, bitcast=True)
        low_zero, high_zero = (first & 15).to(tl.float32), (second & 15).to(tl.float32)
    else:
        if scales.dtype.element_ty == tl.bfloat16:
            pair = tl.load(scales.to(tl.pointer_type(tl.int32)) + groups // 2, mask=mask, other=0)
            low = (pair << 16).to(tl.float32, bitcast=True)
            high = (pair & -65536).to(tl.float32, bitcast=True)
        else:
            low = tl.load(scales + groups, mask=mask, other=0.0).to(tl.float32)
            high = tl.load(scales + groups + 1, mask=mask, other=0.0).to(tl.float32)
        low_zero = tl.full(low.shape, ZERO_POINT, tl.float32)
        high_zero = low_zero
    return low, high, low_zero, high_zero


@triton.jit
def _by_ptx(tile, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def converted(tile, kind: tl.constexpr, E2M1: tl.constexpr, PACKED: tl.constexpr):
    """The low and the high codes of bytes as numbers of a type; int4's less ZERO_POINT.

    PACKED: four bytes at a time
    """
    if PACKED and kind == tl.bfloat16:
        first = _by_ptx(tile, E2M1_LOW if E2M1 else INT4_LOW)
        second = _by_ptx(tile, E2M1_HIGH if E2M1 else INT4_HIGH)
    else:
        bits = tile.to(tl.int32)
        if E2M1:
            first = ((bits & 0x81) << 24) | ((bits & 0x60) << 17)
            second = ((bits & 0x10) << 27) | ((bits & 2) << 23) | ((bits & 12) << 20)
            first = first.to(tl.float32, bitcast=True) * E2M1_UNIT
            second = second.to(tl.float32, bitcast=True) * E2M1_UNIT
        else:
            first, second = (bits & 15) - ZERO_POINT, (bits >> 4) - ZERO_POINT
        first, second = first.to(kind), second.to(kind)
    return first, second


@triton.jit
def scales_at(scales, gate_scales, rows, is_up, IN: tl.constexpr, GATED: tl.constexpr):
    """Addresses of the scales of rows; with GATED the gate's, but for those that are up's."""
    offset = rows * (IN // GROUP)
    start = scales + offset
    if GATED:
        start = tl.where(is_up, start, gate_scales + offset)
    return start


@triton.jit
def _add_group(product, codes, inputs, valid, scale, zero, ZEROS: tl.constexpr):
    """product plus codes times the inputs at an address, each row by its scale; with ZEROS less its
    zero point."""
    x = tl.load(inputs, mask=valid, other=0.0)
    added = tl.dot(codes, x, input_precision="ieee")
    if ZEROS:
        ones = tl.full(codes.shape, 1.0, codes.dtype)  # sums of x where the products are
        added += (ZERO_POINT - zero) * tl.dot(ones, x, input_precision="ieee")
    return product + added * scale


@triton.jit
def add_packed(
    inputs,
    valid,
    starts,
    scales,
    local,
    first,
    last,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dot.add_pieces of a weight of four bits; its scales are applied.

    starts, scales, local: [ROWS, 1], where the weight's rows and their scales start, and which
        there are
    first, last: whole BLOCKs, which are whole PERIODs
    """
    e2m1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    zeros: tl.constexpr = scales.dtype.element_ty == tl.int32
    kind: tl.constexpr = inputs.dtype.element_ty
    columns = tl.arange(0, GROUP)
    product = tl.zeros([ROWS, BATCH], tl.float32)
    weights = starts + columns[None, :]
    offsets = inputs + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        for part in tl.static_range(0, BLOCK, PERIOD):
            at = column + part
            if EVEN:
                tile = tl.load(weights + at // 2, eviction_policy="evict_first")
            else:
                tile = tl.load(weights + at // 2, local, 0, eviction_policy="evict_first")
            low, high, zero, other_zero = load_scales(scales, at // GROUP, local)
            one, two = converted(tile, kind, e2m1, PACKED)
            x = offsets + at
            product = _add_group(product, one, x, valid, low, zero, zeros)
            product = _add_group(product, two, x + GROUP, valid, high, other_zero, zeros)
    return product


@triton.jit
def load_words(weight, rows, first, OUT: tl.constexpr, IN: tl.constexpr, WORDS: tl.constexpr):
    """int32 [ROWS, WORDS], the words from `first` on of the rows of a weight; zeros outside."""
    words = first + tl.arange(0, WORDS)[None, :]
    mask = (rows < OUT)[:, None] & (words < IN // PER_WORD)
    at = weight.to(tl.pointer_type(tl.int32)) + rows[:, None].to(tl.int64) * (IN // PER_WORD)
    at = tl.max_contiguous(at + words, [1, PER_LOAD])
    return tl.load(at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _quads(x, first, mask, ROWS: tl.constexpr):
    """Four neighbouring numbers of x from each of `first` [1, WORDS] on, in float32 for ROWS rows
    alike: they are widened behind the broadcast, so that threads exchange them as they are stored.
    """
    shape: tl.constexpr = [ROWS, first.shape[1]]
    if x.dtype.element_ty == tl.float32:
        one = tl.broadcast_to(tl.load(x + first, mask=mask, other=0.0), shape)
        two = tl.broadcast_to(tl.load(x + first + 1, mask=mask, other=0.0), shape)
        three = tl.broadcast_to(tl.load(x + first + 2, mask=mask, other=0.0), shape)
        four = tl.broadcast_to(tl.load(x + first + 3, mask=mask, other=0.0), shape)
    else:
        at = tl.max_contiguous(tl.multiple_of(first // 4, [1, PER_LOAD]), [1, PER_LOAD])
        quad = tl.load(x.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
        quad = tl.broadcast_to(quad, shape)
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
def _moved(bits, PLACES: tl.constexpr):
    """Bits moved to the left, or to the right."""
    return bits << PLACES if PLACES >= 0 else bits >> -PLACES


@triton.jit
def _numbers(word, BYTE: tl.constexpr, E2M1: tl.constexpr):
    """A byte's low and high number of each word, as small float32 as their bits are; those of int4
    are 2^(8 * BYTE % 16), the high ones 2^4 more, times too large."""
    if E2M1:
        first = _moved(word, 24 - 8 * BYTE) & -0x7F000000
        first |= _moved(word, 17 - 8 * BYTE) & 0xC00000
        second = _moved(word, 27 - 8 * BYTE) & -0x80000000
        second |= _moved(word, 23 - 8 * BYTE) & 0x1000000
        second |= _moved(word, 20 - 8 * BYTE) & 0xC00000
    else:
        half = word >> (16 * (BYTE // 2))
        first = half & (15 << (8 * (BYTE % 2)))
        second = half & (240 << (8 * (BYTE % 2)))
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _of_pairs(values):
    """Sums of the words that a thread holds side by side."""
    ROWS: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = values.shape[1] // PER_LOAD
    return tl.sum(tl.reshape(values, [ROWS, PAIRS, PER_LOAD]), 2)


@triton.jit
def _add_words(total, word, scales, rows, first, low, high, OUT: tl.constexpr, IN: tl.constexpr):
    """total [ROWS, pairs of words] plus the products of words' codes with their inputs.

    first: the number of the first word
    low, high: the inputs of the low and of the high codes, which are RAISED, and their sums
    """
    e2m1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    pairs = first // PER_LOAD + tl.arange(0, total.shape[1])[None, :]
    periods = pairs // (PER_WORD // PER_LOAD)
    mask = (rows < OUT)[:, None] & (periods < IN // PERIOD)
    at = scales + rows[:, None].to(tl.int64) * (IN // GROUP)
    scale, other_scale, zero, other_zero = load_scales(at, periods * 2, mask)
    one = tl.zeros(word.shape, tl.float32)
    other = tl.zeros(word.shape, tl.float32)
    for byte in tl.static_range(4):
        number, other_number = _numbers(word, byte, e2m1)
        one += number * low[byte]
        other += other_number * high[byte]
    one, other = _of_pairs(one), _of_pairs(other)
    if not e2m1:
        one = one * INT4_LOWERED - zero * low[4]
        other = other * INT4_LOWERED - other_zero * high[4]
    return total + one * scale + other * other_scale


@triton.jit
def _raised(x, first, mask, E2M1: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr):
    """Four inputs of codes as `_numbers` has them, and their sums over pairs of words."""
    one, two, three, four = _quads(x, first, mask, ROWS)
    if E2M1:
        total = 0.0
        one, two, three, four = one * RAISED, two * RAISED, three * RAISED, four * RAISED
    else:
        alone, beside, third, fourth = _quads(x, first, mask, 1)
        total = _of_pairs(alone + beside + third + fourth)
        unit: tl.constexpr = RAISED / (16.0 if HIGH else 1.0)
        one, two = one * unit, two * (unit / 256)
        three, four = three * unit, four * (unit / 256)
    return one, two, three, four, total


@triton.jit
def multiply_packed(
    x, started, other_started, OUT: tl.constexpr, IN: tl.constexpr, PAIRED: tl.constexpr
):
    """gemv.multiply of weights of four bits; their scales are applied."""
    weight, scales, rows, tile = started
    other_weight, other_scales, other_rows, other_tile = other_started
    ROWS: tl.constexpr = tile.shape[0]
    WORDS: tl.constexpr = tile.shape[1]
    e2m1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    product = tl.zeros([ROWS, WORDS // PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, WORDS // PER_LOAD], tl.float32)
    for first in tl.static_range(0, IN // PER_WORD, WORDS):
        if first > 0:
            tile = load_words(weight, rows, first, OUT, IN, WORDS)
            if PAIRED:
                other_tile = load_words(other_weight, other_rows, first, OUT, IN, WORDS)
        words = first + tl.arange(0, WORDS)[None, :]
        mask = words < IN // PER_WORD
        column = words // PER_WORD * PERIOD + words % PER_WORD * 4
        low = _raised(x, column, mask, e2m1, False, ROWS)
        high = _raised(x, column + GROUP, mask, e2m1, True, ROWS)
        product = _add_words(product, tile, scales, rows, first, low, high, OUT, IN)
        if PAIRED:
            other = _add_words(
                other, other_tile, other_scales, other_rows, first, low, high, OUT, IN
            )
    if e2m1:
        product, other = product * E2M1_LOWERED, other * E2M1_LOWERED
    return tl.sum(product, 1), tl.sum(other, 1)


@triton.jit
def unpack(weight, scales, out, IN: tl.constexpr, ROWS: tl.constexpr):
    """One program: GROUP bytes of ROWS rows of a weight in the type of `out` [rows, IN]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column, columns = tl.program_id(1) * PERIOD, tl.arange(0, GROUP)[None, :]
    e2m1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    everywhere = rows >= 0
    tile = tl.load(weight + rows * (IN // 2) + column // 2 + columns)
    low, high, low_zero, high_zero = load_scales(
        scales + rows * (IN // GROUP), column // GROUP, everywhere
    )
    one, two = converted(tile, tl.float32, e2m1, False)
    if not e2m1:
        one, two = one + (ZERO_POINT - low_zero), two + (ZERO_POINT - high_zero)
    target = out + rows * IN + column + columns
    tl.store(target, (one * low).to(out.dtype.element_ty))
    tl.store(target + GROUP, (two * high).to(out.dtype.element_ty))


def unpacked_weight(linear: Linear) -> Tensor:
    """A weight of four bits in the compute type."""
    rows, size = linear.weight.shape[0], linear.in_size
    out = torch.empty(rows, size, dtype=linear.dtype, device=linear.weight.device)
    at_once = next(count for count in (64, 16, 4, 2, 1) if rows % count == 0)
    launcher(unpack, (rows // at_once, size // four_bits.PERIOD))(
        linear.weight, linear.scale, out, IN=size, ROWS=at_once, num_warps=2
    )
    return out


def packed_block(in_size: int, block: int) -> int:
    """Columns of a piece: the most up to `block` that are whole periods and divide the inputs."""
    periods = in_size // four_bits.PERIOD
    divisors = (n for n in range(block // four_bits.PERIOD, 1, -1) if periods % n == 0)
    return next(divisors, 1) * four_bits.PERIOD
