"""Candidates of a row, and how they are narrowed down to few, in the Triton language.

A row has a list of its candidates' ids, in any order. Where there are more than a list holds, all
of the row's tokens are looked at, until few enough are left. Tokens come one after the other as a
stable sort would have them: by score, then by id.

view: the row's logits, what they are multiplied by, the largest score; between how far below it
candidates are; the least share that counts
source: the list, how many tokens there are to look at, and whether the list has them

What shares of a row's probabilities are within some bounds, in the Triton language.

A row's tokens are counted by how far their scores are below the largest one. Shares are integers,
so a row gives the same sums to any number of programs, in any order.

In which group of a row's tokens its next one lies, in the Triton language.

A group has the tokens whose scores are between two bounds on how far they are below the largest
one. For a row of top-k it has all tokens up to the bound within which the k largest are.
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
SPAN = tl.constexpr(28.0)  # how far below the largest score a share is less than one unit
COUNT_BITS = tl.constexpr(11)  # of a lane's sums, below those of the shares
COUNT_MASK = tl.constexpr(2**COUNT_BITS.value - 1)
MAX_TOKENS = 2**17  # that one program may look at: its lanes' counts fit their bits
# What a row adds up: shares within each bound and their numbers, the same twice for bounds between
# two of these; all shares, tokens collected, programs that ended.
BOUNDS = tl.constexpr(8)
FINER_BOUNDS = tl.constexpr(16)
LEVELS = tl.constexpr(2)
SHARE_TOTAL = tl.constexpr(2 * BOUNDS.value + 2 * FINER_BOUNDS.value * LEVELS.value)
NUM_LISTED = tl.constexpr(SHARE_TOTAL.value + 1)
LISTED_END = tl.constexpr(SHARE_TOTAL.value + 2)
FIELDS = tl.constexpr(triton.next_power_of_2(SHARE_TOTAL.value + 3))

EPSILON = tl.constexpr(reference_sampling.TEMPERATURE_EPSILON)
FLOAT_MAX = tl.constexpr(reference_sampling.FLOAT_MAX)
FLOAT_TINY = tl.constexpr(reference_sampling.FLOAT_TINY)
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
    max_value = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(part * BLOCK, size, parts * BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + ids, mask=ids < size, other=-float("inf"))
        max_value = tl.maximum(max_value, values)
    tl.store(maxima + row * MAX_PARTS + part, tl.max(max_value, 0))
    if part == 0:
        tl.store(sums + row * FIELDS + tl.arange(0, FIELDS), 0)


@triton.jit
def temperature_factor(temperature, slot):
    """Return the factor of the logits of the row in a slot."""
    value = tl.load(temperature + slot)
    factor = tl.where(value == 1.0, 1.0, tl.div_rn(1.0, value + EPSILON))
    return tl.maximum(factor, FLOAT_TINY)


@triton.jit
def scores_at(logits, ids, mask, factor):
    values = tl.load(logits + ids, mask=mask, other=-float("inf")) * factor
    return tl.minimum(values, FLOAT_MAX) + 0.0  # -0.0 becomes 0.0


@triton.jit
def top_score(maxima, row, parts, factor):
    part = tl.arange(0, MAX_PARTS)
    values = tl.load(maxima + row * MAX_PARTS + part, mask=part < parts, other=-float("inf"))
    score = tl.max(values, 0) * factor
    return tl.maximum(tl.minimum(score, FLOAT_MAX), -FLOAT_MAX)


@triton.jit
def shares_of(scores, top, minimum):
    """In units: the shares, and those that are at least so much of the largest one."""
    shares = tl.exp(scores - top)
    weights = (shares * UNITS).to(tl.int64)
    return weights, tl.where(shares >= minimum, weights, 0)


@triton.jit
def sums_within(view, bounds, COUNT: tl.constexpr, size, part, parts):
    """Return the sums over a part of a row: the shares of the tokens within each of COUNT bounds,
    their numbers, all shares.

    view: see candidates.py; its upper bound does not matter
    """
    row_logits, factor, top, above, _upto, minimum = view
    sums = tl.zeros([COUNT, LANES], tl.int64)
    total = tl.zeros([LANES], tl.int64)
    for first in range(part * (TIMES * LANES), size, parts * (TIMES * LANES)):
        for time in tl.static_range(TIMES):
            ids = first + time * LANES + tl.arange(0, LANES)
            scores = scores_at(row_logits, ids, ids < size, factor)
            weights, in_view = shares_of(scores, top, minimum)
            below = top - scores
            one = tl.where(below > above, (in_view << COUNT_BITS) + 1, 0)
            within = below[None, :] <= bounds[:, None]
            sums += tl.where(within, one[None, :], 0)
            total += weights
    counts = (sums & COUNT_MASK).to(tl.int32)
    return tl.sum(sums >> COUNT_BITS, 1), tl.sum(counts, 1), tl.sum(total, 0)


@triton.jit
def level_of(row_sums, LEVEL: tl.constexpr):
    """Return the offset of a row's sums of a level of finer bounds; these levels count from 1."""
    return row_sums + 2 * BOUNDS + 2 * FINER_BOUNDS * (LEVEL - 1)


@triton.jit
def add_sums(fields, masses, counts, COUNT: tl.constexpr):
    """Add a program's sums to those of its row."""
    bound = tl.arange(0, COUNT)
    tl.atomic_add(fields + bound, masses, sem="relaxed")
    tl.atomic_add(fields + COUNT + bound, counts.to(tl.int64), sem="relaxed")


CANDIDATES = tl.constexpr(8192)  # that a list holds
BLOCK = tl.constexpr(512)  # candidates that are looked at at once
STEPS = tl.constexpr(8)  # at which a search looks at once
FEW = tl.constexpr(256)  # candidates that are sorted, without a search
NOWHERE = tl.constexpr(-(2**63))  # in the order, behind all tokens


@triton.jit
def collect(view, listed, found, size, part, parts, BLOCK: tl.constexpr):
    """Add the candidates of a part of a row to its list.  found: how many were added"""
    row_logits, factor, top, above, upto, _minimum = view
    for first in range(part * BLOCK, size, parts * BLOCK):
        ids = first + tl.arange(0, BLOCK)
        below = top - scores_at(row_logits, ids, ids < size, factor)
        mask = (below > above) & (below <= upto)
        one = tl.full([BLOCK], 1, tl.int64)
        at = tl.atomic_add(found + tl.zeros([BLOCK], tl.int32), one, mask=mask, sem="relaxed")
        tl.store(listed + at, ids, mask=mask & (at < CANDIDATES))


@triton.jit
def order_of(scores, ids):
    """Integers that are larger for tokens that come earlier."""
    bits = scores.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 31) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def extent(view):
    """Bounds on the places of all candidates in the order, with room for rounding."""
    top, above, upto = view[2], view[3], view[4]
    tolerance = tl.abs(top) * 1e-6
    first_id = tl.zeros([], tl.int32)
    low = order_of(top - upto * 1.001 - tolerance, first_id + 0x7FFFFFFF)
    high = order_of(top - tl.maximum(above, 0.0) * 0.999 + tolerance, first_id)
    return low, high + 1


@triton.jit
def _block(view, source, at):
    """The source at some numbers: ids, scores, places in the order, and which are candidates."""
    row_logits, factor, top, above, upto, _minimum = view
    listed, length, is_list = source
    mask = at < length
    ids = tl.load(listed + at, mask=mask & is_list, other=0)
    ids = tl.where(is_list, ids, at)
    scores = scores_at(row_logits, ids, mask, factor)
    below = top - scores
    mask = mask & (below > above) & (below <= upto)
    return ids, scores, order_of(scores, ids), mask


@triton.jit
def amounts_from(view, source, low, step, end):
    """Number and shares of the candidates before `end` from each of PLACES places on, which are a
    step from each other, the first one a step from `low`.
    """
    top, minimum = view[2], view[5]
    bounds = low + step * (tl.arange(0, STEPS) + 1)
    counts = tl.zeros([STEPS, LANES], tl.int32)
    masses = tl.zeros([STEPS, LANES], tl.int64)
    for first in range(0, source[1], TIMES * LANES):
        for time in tl.static_range(TIMES):
            at = first + time * LANES + tl.arange(0, LANES)
            _ids, scores, order, mask = _block(view, source, at)
            _weights, in_view = shares_of(scores, top, minimum)
            after = order[None, :] >= bounds[:, None]
            after = after & (mask & (order < end))[None, :]
            counts += after.to(tl.int32)
            masses += tl.where(after, in_view[None, :], 0)
    return tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def _token_at(order):
    """Score and id at a place in the order; the inverse of `order_of`."""
    rising = (order >> 31).to(tl.int32)
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    ids = 0x7FFFFFFF - (order & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), ids.to(tl.int32)


@triton.jit
def sorted_few(view, listed, count):
    """Ids, scores and shares of a list of at most FEW candidates in their order; what is no
    candidate comes last, without a share.
    """
    top, minimum = view[2], view[5]
    _ids, _scores, order, mask = _block(view, (listed, count, True), tl.arange(0, FEW))
    order = tl.sort(tl.where(mask, order, NOWHERE), descending=True)
    scores, ids = _token_at(order)
    _weights, in_view = shares_of(scores, top, minimum)
    return ids, scores, tl.where(order > NOWHERE, in_view, 0)


@triton.jit
def _shorten(view, source, low, end):
    """Leave the candidates of the source from `low` on and before `end` in the list."""
    listed, length = source[0], source[1]
    num_in_view = tl.zeros([], tl.int32)
    for first in range(0, length, BLOCK):
        ids, _scores, order, mask = _block(view, source, first + tl.arange(0, BLOCK))
        mask = mask & (order >= low) & (order < end)
        at = num_in_view + tl.cumsum(mask.to(tl.int32), 0) - 1
        tl.store(listed + at, ids, mask=mask)
        num_in_view += tl.sum(mask.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def narrow(view, source, low, high, held, goal, BY_COUNT: tl.constexpr):
    """Move the places `low` and `high`, so that the goal is still reached from `low` on and not
    from `high` on.

    The goal is a number of candidates: then just so many are from `low` on in the end. Or it is a
    sum of shares: then at most FEW are left between the places, and in the list.

    held: candidates from `low` on
    Returns `low`, how many candidates are from there on or left, the shares from `high` on, and the
    source.
    """
    listed, length, is_list = source
    end = high
    beyond = tl.zeros([], tl.int32)  # candidates from `high` on, and their shares
    base = tl.zeros([], tl.int64)
    left = held
    going = held > (goal if BY_COUNT else FEW)
    while going:
        step = tl.maximum((high - low) // STEPS, 1)
        if not BY_COUNT:
            end = high
        counts, masses = amounts_from(view, (listed, length, is_list), low, step, end)
        counts += beyond
        masses += base
        reached = (counts if BY_COUNT else masses) >= goal
        steps = tl.sum(reached.to(tl.int32), 0)
        position = tl.arange(0, STEPS) + 1
        held = tl.where(steps > 0, tl.sum(tl.where(position == steps, counts, 0), 0), held)
        nearer = steps < STEPS
        low += steps * step
        high = tl.where(nearer, low + step, high)
        if not BY_COUNT:
            after = position == steps + 1
            beyond = tl.where(nearer, tl.sum(tl.where(after, counts, 0), 0), beyond)
            base = tl.where(nearer, tl.sum(tl.where(after, masses, 0), 0), base)
            end = high
        left = held - beyond
        if (length > BLOCK) & (left <= CANDIDATES) & (left * 2 <= length):
            _shorten(view, (listed, length, is_list), low, end)
            length = left
            is_list = is_list | True
        going = (held > goal if BY_COUNT else left > FEW) & (high - low > 1)
    if not BY_COUNT:
        _shorten(view, (listed, length, is_list), low, high)
        held = left
    return low, held, base, (listed, length, is_list)


@triton.jit
def _mix(bits):
    """See reference_sampling._mix."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def choice_of(seed, length, prompt_length, top_k, top_p, slot):
    """Return the sampling of the row in a slot: whether by top-p alone; else its k; its p; the
    share before the token or with it, float64.
    """
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    step = tl.load(length + slot) - tl.load(prompt_length + slot)
    bits = _mix(_mix(tl.load(seed + slot)) + (step + 1) * -7046029254386353131)
    uniform = (((bits >> 40) & 0xFFFFFF) + 1).to(tl.float64) * 5.9604644775390625e-08  # 2^-24
    part = uniform * tl.where(p > 0, p, 1.0).to(tl.float64)
    return (k == 0) & (p > 0), tl.maximum(k, 1), p, part


@triton.jit
def target_in(part, mass):
    """At which sum of shares the token is reached."""
    exact = part * mass.to(tl.float64)
    integer = exact.to(tl.int64)
    integer += (integer.to(tl.float64) < exact).to(tl.int64)
    return tl.minimum(tl.maximum(integer, 1), mass)


@triton.jit
def all_bounds():
    bound = tl.arange(0, BOUNDS)
    root = (bound + 1).to(tl.float32) * 0.5
    return tl.where(bound == BOUNDS - 1, SPAN, root * root)


@triton.jit
def finer_bounds(above, upto):
    """Between two bounds."""
    bound = tl.arange(0, FINER_BOUNDS)
    low = tl.maximum(above, 0.0)
    between = low + (upto - low) * ((bound + 1).to(tl.float32) / FINER_BOUNDS)
    return tl.where(bound == FINER_BOUNDS - 1, upto, between)


@triton.jit
def _group_in(fields, bounds, COUNT: tl.constexpr, above, mass, count, by_p, k, target):
    """Its bounds; the shares and the number of the tokens up to the first one, and the number up to
    the second.  above, mass, count: the same for what is before all of these bounds
    """
    bound = tl.arange(0, COUNT)
    masses = tl.load(fields + bound) + mass
    counts = tl.load(fields + COUNT + bound) + count
    reached = tl.where(by_p, masses >= target, counts >= k)
    index = tl.minimum(tl.sum((~reached).to(tl.int32), 0), COUNT - 1)
    here, before = bound == index, bound == index - 1
    if index > 0:
        above = tl.sum(tl.where(before, bounds, 0.0), 0)
        mass = tl.sum(tl.where(before, masses, 0), 0)
        count = tl.sum(tl.where(before, counts, 0), 0)
    upto = tl.sum(tl.where(here, bounds, 0.0), 0)
    return above, upto, mass, count, tl.sum(tl.where(here, counts, 0), 0)


@triton.jit
def group_of(row_sums, by_p, k, part, LEVEL: tl.constexpr):
    """The row's group, as far as the levels of bounds up to LEVEL say it: its bounds, the number of
    its tokens, how far they are from the target of the shares, and how many finer levels were
    needed until they were few.
    """
    zero = tl.zeros([], tl.int64)
    target = target_in(part, tl.max(tl.load(row_sums + tl.arange(0, BOUNDS)), 0))
    above = tl.full([], -1.0, tl.float32)
    above, upto, mass, count, end = _group_in(
        row_sums, all_bounds(), BOUNDS, above, zero, zero, by_p, k, target
    )
    number = end - tl.where(by_p, count, 0)
    levels = tl.zeros([], tl.int32)
    for level in tl.static_range(1, LEVEL + 1):
        if number > FEW:
            bounds, fields = finer_bounds(above, upto), level_of(row_sums, level)
            above, upto, mass, count, end = _group_in(
                fields, bounds, FINER_BOUNDS, above, mass, count, by_p, k, target
            )
            number = end - tl.where(by_p, count, 0)
            levels += 1
    return above, upto, number.to(tl.int32), target - mass, levels
