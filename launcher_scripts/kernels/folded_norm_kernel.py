"""A norm folded into the kernels before and behind it, for steps of one row.

A norm gives the same of (x - shift) * unit as of x; only its eps has to be times unit**2. So the
kernel that makes x leaves the operand (x - shift) * unit * gain, in the type of the weights, where
shift and unit are from the hidden states one sublayer before: all its programs know them, and the
operand is rounded as a normalized x would be. Each program leaves the sums of its part of
(x - shift) * unit and of its squares as well. The projection behind adds those up and knows what
mean and scale are missing: with gain g and bias b, y = (W operand - mean * W g) * scale + W b.
W g and W b are known when the model is loaded. Of queries, keys and values the first program also
leaves shift and unit for the two states that follow.

Shift and unit follow most channels, not all: the shift is their mean, and the unit makes them
measure USUAL. A channel that is a million times larger comes or goes in one sublayer; it takes the
mean and the deviation along, but not these. And float16, which holds less than 2**16 and nothing
below 2**-24, has room for it beside the bits of the others.

Statistics of a row, float32 [4 + 2 * parts]: shift and unit of its operand; shift and unit of the
rows that come after it; the parts' sums, then their sums of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

USUAL = tl.constexpr(2.0**-8)  # what most of an operand measures, its gain aside
FAR = tl.constexpr(16.0)  # a part's mean square, in USUAL**2, from which it is not of most
FAR_ALONE = tl.constexpr(64.0)  # the same of a single value, in what most measure
LENGTH_WEIGHT = tl.constexpr(2.0**-40)  # keeps a row's length times its unit below 2**12
SMALLEST_SHARE = tl.constexpr(2.0**-48)  # of a value's square in the mean one
LARGEST_UNIT = tl.constexpr(2.0**30)  # of a row of zeros, without eps
SUMS = tl.constexpr(4)  # where the parts' sums begin
SAMPLE = tl.constexpr(32)  # parts that say what most channels are like


@triton.jit
def load_row_stats(row_stats, NORM: tl.constexpr, PARTS: tl.constexpr, SPREAD: tl.constexpr):
    """Unit of the operand, its parts' sums and sums of squares; SPREAD is PARTS as a power of
    two."""
    parts = tl.arange(0, SPREAD)
    unit = 1.0
    total = tl.zeros([SPREAD], tl.float32)
    squares = tl.zeros([SPREAD], tl.float32)
    if NORM > 0:
        unit = tl.load(row_stats + 1)
        squares = tl.load(row_stats + SUMS + PARTS + parts, mask=parts < PARTS, other=0.0)
    if NORM == 1:
        total = tl.load(row_stats + SUMS + parts, mask=parts < PARTS, other=0.0)
    return unit, total, squares


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
def prescale(value, inside, gain, shift, unit, row_stats, parts):
    """A program's part of the operand, one of `parts`. Its sums go to row_stats."""
    part = tl.program_id(0)
    value = tl.where(inside, (value - shift) * unit, 0.0)
    tl.store(row_stats + SUMS + part, tl.sum(value, 0))
    tl.store(row_stats + SUMS + parts + part, tl.sum(value * value, 0))
    words = tl.arange(0, 4)
    both = tl.where(words % 2 == 0, shift, unit)
    tl.store(row_stats + words, both, mask=(words < SUMS) & (part == 0))
    return value * gain


@triton.jit
def _usual_square(values, inside, variance, size):
    """The square of what most of a row measure: their geometric mean."""
    logs = tl.log2(tl.maximum(values * values, variance * SMALLEST_SHARE))
    return tl.exp2(tl.sum(tl.where(inside, logs, 0.0), 0) / size)


@triton.jit
def standardize(values, inside, row_stats, size, eps, NORM: tl.constexpr, PRESCALED: tl.constexpr):
    """A whole row as the norm has it, but for its gain and bias; PRESCALED: the row as an operand
    without its gain, whose row_stats of one part are left."""
    shift = 0.0
    if NORM == 1:
        shift = tl.sum(values, 0) / size
        values = tl.where(inside, values - shift, 0.0)
    variance = tl.sum(values * values, 0) / size
    unit = 1.0 / tl.sqrt(variance + eps)
    if PRESCALED:
        mean = 0.0
        usual = _usual_square(values, inside, variance, size)
        if NORM == 1:
            near = inside & (values * values <= FAR_ALONE * usual)
            moved = tl.sum(tl.where(near, values, 0.0), 0)
            moved /= tl.maximum(tl.sum(near.to(tl.float32), 0), 1.0)
            shift += moved
            mean -= moved
            values = tl.where(inside, values - moved, 0.0)
            usual = _usual_square(values, inside, variance, size)
        unit = USUAL / tl.sqrt(usual + eps + variance * size * LENGTH_WEIGHT)
        unit = tl.minimum(unit, LARGEST_UNIT)
        words = tl.arange(0, 8)
        stats = tl.where(words % 2 == 0, shift, unit)
        stats = tl.where(words == SUMS, mean * unit * size, stats)
        length = (variance + mean * mean) * unit * unit * size
        stats = tl.where(words == SUMS + 1, length, stats)
        tl.store(row_stats + words, stats, mask=words < SUMS + 2)
    return values * unit


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def norm_terms(unit, total, squares, eps, IN: tl.constexpr, NORM: tl.constexpr):
    """What the norm takes from an operand [IN], what it multiplies with, the gain aside, and the
    mean square."""
    mean = 0.0
    scale = 1.0
    length = 0.0
    if NORM == 1:
        whole, length = tl.reduce((total, squares), 0, _add_two)
        mean = whole / IN
        length /= IN
        scale = tl.rsqrt(tl.maximum(length - mean * mean, 0.0) + eps * unit * unit)
    elif NORM == 2:
        length = tl.sum(squares, 0) / IN
        scale = tl.rsqrt(length + eps * unit * unit)
    return mean, scale, length


@triton.jit
def leave_expected(
    row_stats,
    mean,
    length,
    eps,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Leave shift and unit for the rows that come after the one [IN] with these statistics.

    A sample of the parts says what most channels are like; `length` is the mean square of all. The
    first program does it, at its end: what all of them load at once costs more.
    """
    sample: tl.constexpr = SAMPLE if PARTS > SAMPLE else PARTS
    limit: tl.constexpr = FAR * USUAL * USUAL * IN / PARTS
    share: tl.constexpr = PARTS / sample / IN  # of the sample's sums in the row's means
    if tl.program_id(0) == 0:
        lanes = tl.arange(0, SAMPLE)
        places = row_stats + SUMS + lanes * (PARTS // sample)
        total = tl.load(places, mask=lanes < sample, other=0.0)
        squares = tl.load(places + PARTS, mask=lanes < sample, other=0.0)
        shift = tl.load(row_stats)
        unit = tl.load(row_stats + 1)
        near_total = tl.where(squares <= limit, total, 0.0)
        near = tl.minimum(squares, limit)
        near_total, near = tl.reduce((near_total, near), 0, _add_two)
        most = near < 0.5 * sample * limit
        moved = 0.0
        if NORM == 1:
            moved = tl.where(most, near_total * share, mean)
        usual = tl.maximum(tl.where(most, near * share, length) - moved * moved, 0.0)
        following = USUAL * tl.rsqrt(usual + eps * unit * unit + length * IN * LENGTH_WEIGHT)
        tl.store(row_stats + 2, shift + moved / unit)
        tl.store(row_stats + 3, tl.minimum(unit * following, LARGEST_UNIT))


@triton.jit
def normalized(value, sums, mean, scale, NORM: tl.constexpr):
    """The product with the normalized x, but for the offset, of that with the operand."""
    if NORM == 1:
        value = (value - mean * sums) * scale
    elif NORM == 2:
        value = value * scale
    return value
