"""A norm folded into the kernels before and behind it, for steps of one row.

A norm gives the same of (x - shift) * unit as of x; only its eps has to be times unit**2. So the
kernel that makes x leaves the operand (x - shift) * unit * gain, in the type of the weights, where
shift is the mean of the hidden states one sublayer before and unit brings those to a known size:
all its programs know them, and the operand is rounded as a normalized x would be. Each program
leaves the sums of its part of (x - shift) * unit and of its squares as well. The projection behind
adds those up and knows what mean and scale are missing: with gain g and bias b,
y = (W operand - mean * W g) * scale + W b. W g and W b are known when the model is loaded.

float16 holds less than 2**16 and nothing below 2**-24. There the unit brings what most of x
measures, not its deviation, to USUAL: a channel that is a million times larger comes or goes in one
sublayer, and neither overflows nor takes the bits of the others.

Statistics of a row, float32 [4 + 2 * parts]: shift and unit of its operand; shift and unit of the
row that comes after it, left by the projection behind; the parts' sums, then their sums of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

USUAL = tl.constexpr(2.0**-8)  # what most of a float16 operand measures
SPREAD_WEIGHT = tl.constexpr(2.0**-40)  # keeps a row's length times its unit below 2**12
SMALLEST_BITS = tl.constexpr((127 - 60) << 23)  # of a part's sum of squares: those of 2**-60
SMALLEST_SHARE = tl.constexpr(2.0**-48)  # of a value's square in the mean one
LARGEST_UNIT = tl.constexpr(2.0**30)  # of a row of zeros, without eps
SUMS = tl.constexpr(4)  # where the parts' sums begin


@triton.jit
def load_row_stats(row_stats, NORM: tl.constexpr, PARTS: tl.constexpr, SPREAD: tl.constexpr):
    """Shift and unit of the operand, its parts' sums and sums of squares; SPREAD is PARTS as a
    power of two."""
    parts = tl.arange(0, SPREAD)
    shift = 0.0
    unit = 1.0
    total = tl.zeros([SPREAD], tl.float32)
    squares = tl.zeros([SPREAD], tl.float32)
    if NORM > 0:
        unit = tl.load(row_stats + 1)
        squares = tl.load(row_stats + SUMS + PARTS + parts, mask=parts < PARTS, other=0.0)
    if NORM == 1:
        shift = tl.load(row_stats)
        total = tl.load(row_stats + SUMS + parts, mask=parts < PARTS, other=0.0)
    return shift, unit, total, squares


@triton.jit
def load_expected(row_stats, PRESCALED: tl.constexpr):
    """Shift and unit for the row that comes after the one with these statistics. PRESCALED is the
    code of the norm behind it: an RMS norm takes no mean."""
    shift = 0.0
    unit = 1.0
    if PRESCALED == 1:
        shift = tl.load(row_stats + 2)
    if PRESCALED > 0:
        unit = tl.load(row_stats + 3)
    return shift, unit


@triton.jit
def prescale(value, inside, gain, shift, unit, row_stats):
    """A program's part of the operand. Its sums go to row_stats, as the part of its number."""
    value = tl.where(inside, (value - shift) * unit, 0.0)
    part = tl.program_id(0)
    tl.store(row_stats + SUMS + part, tl.sum(value, 0))
    tl.store(row_stats + SUMS + tl.num_programs(0) + part, tl.sum(value * value, 0))
    tl.store(row_stats, shift, mask=part == 0)
    tl.store(row_stats + 1, unit, mask=part == 0)
    tl.store(row_stats + 2, shift, mask=part == 0)
    tl.store(row_stats + 3, unit, mask=part == 0)
    return value * gain


@triton.jit
def standardize(
    values,
    inside,
    row_stats,
    size,
    eps,
    NORM: tl.constexpr,
    PRESCALED: tl.constexpr,
    HALF: tl.constexpr,
):
    """A whole row as the norm has it, but for its gain and bias.

    PRESCALED: with a unit as float16 wants it, if HALF, and row_stats of one part are left
    """
    mean = 0.0
    if NORM == 1:
        mean = tl.sum(values, 0) / size
        values = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(values * values, 0) / size
    unit = 1.0 / tl.sqrt(variance + eps)
    if PRESCALED:
        if HALF:
            logs = tl.log2(tl.maximum(values * values, variance * SMALLEST_SHARE))
            most = tl.exp2(tl.sum(tl.where(inside, logs, 0.0), 0) / size)
            unit = USUAL / tl.sqrt(most + eps + variance * size * SPREAD_WEIGHT)
        unit = tl.minimum(unit, LARGEST_UNIT)
        words = tl.arange(0, 8)
        stats = tl.where(words % 2 == 0, mean, unit)
        stats = tl.where(words == SUMS, 0.0, stats)
        stats = tl.where(words == SUMS + 1, variance * unit * unit * size, stats)
        tl.store(row_stats + words, stats, mask=words < SUMS + 2)
    return values * unit


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _logs(squares):
    """log2, raised by 127 and times 2**23, within a tenth: a number's bits as they are."""
    bits = squares.to(tl.int32, bitcast=True)
    return tl.maximum(bits, SMALLEST_BITS).to(tl.float32)


@triton.jit
def norm_terms(
    shift,
    unit,
    total,
    squares,
    row_stats,
    eps,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
):
    """What the norm takes from an operand [IN] and what it multiplies with, the gain aside.

    One program leaves in row_stats what to expect of the next row.
    """
    mean = 0.0
    scale = 1.0
    foresees: tl.constexpr = HALF and PARTS > 1  # what most of x measures, where it is in parts
    if NORM == 1:
        if foresees:
            whole, length, logs = tl.reduce((total, squares, _logs(squares)), 0, _add_three)
        else:
            whole, length = tl.reduce((total, squares), 0, _add_two)
        mean = whole / IN
        shift += mean / unit
        variance = tl.maximum(length / IN - mean * mean, 0.0)
    if NORM == 2:
        if foresees:
            length, logs = tl.reduce((squares, _logs(squares)), 0, _add_two)
        else:
            length = tl.sum(squares, 0)
        variance = length / IN
    if NORM > 0:
        scale = tl.rsqrt(variance + eps * unit * unit)
        if foresees:
            logs -= (squares.shape[0] - PARTS) * SMALLEST_BITS  # of parts that there are not
            most = tl.exp2(logs / PARTS / 2.0**23 - 127.0) * (PARTS / IN)
            unit *= USUAL * tl.rsqrt(most + eps * unit * unit + length * SPREAD_WEIGHT)
        elif not HALF:
            unit *= scale
        first = tl.program_id(0) == 0
        tl.store(row_stats + 2, shift, mask=first)
        tl.store(row_stats + 3, tl.minimum(unit, LARGEST_UNIT), mask=first)
    return mean, scale


@triton.jit
def normalized(value, sums, mean, scale, NORM: tl.constexpr):
    """The product with the normalized x, but for the offset, of that with the operand."""
    if NORM == 1:
        value = (value - mean * sums) * scale
    elif NORM == 2:
        value = value * scale
    return value
