"""What shares of a row's probabilities are within some bounds, in the Triton language.

A row's tokens are counted by how far their scores are below the largest one. Shares are integers,
so a row gives the same sums to any number of programs, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference_sampling

MAX_PARTS = tl.constexpr(256)  # of a row
# Tokens that a program looks at at once, whose sums it keeps apart until it ends, for shuffles are
# slow; and how often it does so before it loops.
LANES = tl.constexpr(128)
TIMES = tl.constexpr(4)
REACH = tl.constexpr(28.0)  # how far below the largest score a share is less than one unit
COUNT_BITS = tl.constexpr(11)  # of a lane's sums, below those of the shares
COUNT_MASK = tl.constexpr(2**COUNT_BITS.value - 1)
MAX_TOKENS = 2**17  # that one program may look at: its lanes' counts fit their bits
# What a row adds up: shares within each bound and their numbers, the same twice for bounds between
# two of these; all shares, tokens collected, programs that ended.
BOUNDS = tl.constexpr(8)
FINER_BOUNDS = tl.constexpr(16)
LEVELS = tl.constexpr(2)
WHOLE = tl.constexpr(2 * BOUNDS.value + 2 * FINER_BOUNDS.value * LEVELS.value)
FOUND = tl.constexpr(WHOLE.value + 1)
ENDED = tl.constexpr(WHOLE.value + 2)
FIELDS = tl.constexpr(triton.next_power_of_2(WHOLE.value + 3))

EPSILON = tl.constexpr(reference_sampling.TEMPERATURE_EPSILON)
LARGEST = tl.constexpr(reference_sampling.LARGEST)
SMALLEST = tl.constexpr(reference_sampling.SMALLEST)
UNITS = tl.constexpr(reference_sampling.UNITS)


@triton.jit(do_not_specialize=["parts"])
def find_maxima(
    logits, maxima, sums, stride, size, parts, USE_PDL: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the largest logit of a part of a row. The row's sums become zeros."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(part * BLOCK, size, parts * BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + ids, mask=ids < size, other=-float("inf"))
        largest = tl.maximum(largest, values)
    tl.store(maxima + row * MAX_PARTS + part, tl.max(largest, 0))
    if part == 0:
        tl.store(sums + row * FIELDS + tl.arange(0, FIELDS), 0)


@triton.jit
def temperature_factor(temperature, slot):
    """What the logits of the row in a slot are multiplied by."""
    own = tl.load(temperature + slot)
    factor = tl.where(own == 1.0, 1.0, tl.div_rn(1.0, own + EPSILON))
    return tl.maximum(factor, SMALLEST)


@triton.jit
def scores_at(logits, ids, inside, factor):
    values = tl.load(logits + ids, mask=inside, other=-float("inf")) * factor
    return tl.minimum(values, LARGEST) + 0.0  # -0.0 becomes 0.0


@triton.jit
def top_score(maxima, row, parts, factor):
    part = tl.arange(0, MAX_PARTS)
    values = tl.load(maxima + row * MAX_PARTS + part, mask=part < parts, other=-float("inf"))
    score = tl.max(values, 0) * factor
    return tl.maximum(tl.minimum(score, LARGEST), -LARGEST)


@triton.jit
def shares_of(scores, top, least):
    """In units: the shares, and those that are at least so much of the largest one."""
    shares = tl.exp(scores - top)
    weights = (shares * UNITS).to(tl.int64)
    return weights, tl.where(shares >= least, weights, 0)


@triton.jit
def sums_within(view, bounds, COUNT: tl.constexpr, size, part, parts):
    """Of a part of a row: the shares of the tokens within each of COUNT bounds, their numbers, all
    shares.

    view: see candidates.py; its upper bound does not matter
    """
    row_logits, factor, top, above, _upto, least = view
    sums = tl.zeros([COUNT, LANES], tl.int64)
    whole = tl.zeros([LANES], tl.int64)
    for first in range(part * (TIMES * LANES), size, parts * (TIMES * LANES)):
        for time in tl.static_range(TIMES):
            ids = first + time * LANES + tl.arange(0, LANES)
            scores = scores_at(row_logits, ids, ids < size, factor)
            weights, kept = shares_of(scores, top, least)
            below = top - scores
            one = tl.where(below > above, (kept << COUNT_BITS) + 1, 0)
            within = below[None, :] <= bounds[:, None]
            sums += tl.where(within, one[None, :], 0)
            whole += weights
    counts = (sums & COUNT_MASK).to(tl.int32)
    return tl.sum(sums >> COUNT_BITS, 1), tl.sum(counts, 1), tl.sum(whole, 0)


@triton.jit
def level_of(own, LEVEL: tl.constexpr):
    """Where a row has the sums of a level of finer bounds; these levels count from 1."""
    return own + 2 * BOUNDS + 2 * FINER_BOUNDS * (LEVEL - 1)


@triton.jit
def add_sums(fields, masses, counts, COUNT: tl.constexpr):
    """Add a program's sums to those of its row."""
    bound = tl.arange(0, COUNT)
    tl.atomic_add(fields + bound, masses, sem="relaxed")
    tl.atomic_add(fields + COUNT + bound, counts.to(tl.int64), sem="relaxed")
