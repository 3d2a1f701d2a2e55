"""Candidates of a row, and how they are narrowed down to few, in the Triton language.

A row has a list of its candidates' ids, in any order. Where there are more than a list holds, all
of the row's tokens are looked at, until few enough are left. Tokens come one after the other as a
stable sort would have them: by score, then by id.

view: the row's logits, what they are multiplied by, the largest score; between how far below it
candidates are; the least share that counts
source: the list, how many tokens there are to look at, and whether the list has them
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels.cuda.shares import LANES, TIMES, scores_at, shares_of

CANDIDATES = tl.constexpr(8192)  # that a list holds
BLOCK = tl.constexpr(512)  # candidates that are looked at at once
PLACES = tl.constexpr(8)  # at which a search looks at once
FEW = tl.constexpr(256)  # candidates that are sorted, without a search
NOWHERE = tl.constexpr(-(2**63))  # in the order, behind all tokens


@triton.jit
def collect(view, listed, found, size, part, parts, BLOCK: tl.constexpr):
    """Add the candidates of a part of a row to its list.  found: how many were added"""
    row_logits, factor, top, above, upto, _least = view
    for first in range(part * BLOCK, size, parts * BLOCK):
        ids = first + tl.arange(0, BLOCK)
        below = top - scores_at(row_logits, ids, ids < size, factor)
        inside = (below > above) & (below <= upto)
        one = tl.full([BLOCK], 1, tl.int64)
        at = tl.atomic_add(found + tl.zeros([BLOCK], tl.int32), one, mask=inside, sem="relaxed")
        tl.store(listed + at, ids, mask=inside & (at < CANDIDATES))


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
    room = tl.abs(top) * 1e-6
    first_id = tl.zeros([], tl.int32)
    low = order_of(top - upto * 1.001 - room, first_id + 0x7FFFFFFF)
    high = order_of(top - tl.maximum(above, 0.0) * 0.999 + room, first_id)
    return low, high + 1


@triton.jit
def _block(view, source, at):
    """The source at some numbers: ids, scores, places in the order, and which are candidates."""
    row_logits, factor, top, above, upto, _least = view
    listed, length, is_list = source
    inside = at < length
    ids = tl.load(listed + at, mask=inside & is_list, other=0)
    ids = tl.where(is_list, ids, at)
    scores = scores_at(row_logits, ids, inside, factor)
    below = top - scores
    inside = inside & (below > above) & (below <= upto)
    return ids, scores, order_of(scores, ids), inside


@triton.jit
def amounts_from(view, source, low, step, end):
    """Number and shares of the candidates before `end` from each of PLACES places on, which are a
    step from each other, the first one a step from `low`.
    """
    top, least = view[2], view[5]
    places = low + step * (tl.arange(0, PLACES) + 1)
    counts = tl.zeros([PLACES, LANES], tl.int32)
    masses = tl.zeros([PLACES, LANES], tl.int64)
    for first in range(0, source[1], TIMES * LANES):
        for time in tl.static_range(TIMES):
            at = first + time * LANES + tl.arange(0, LANES)
            _ids, scores, order, inside = _block(view, source, at)
            _weights, kept = shares_of(scores, top, least)
            behind = order[None, :] >= places[:, None]
            behind = behind & (inside & (order < end))[None, :]
            counts += behind.to(tl.int32)
            masses += tl.where(behind, kept[None, :], 0)
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
    top, least = view[2], view[5]
    _ids, _scores, order, inside = _block(view, (listed, count, True), tl.arange(0, FEW))
    order = tl.sort(tl.where(inside, order, NOWHERE), descending=True)
    scores, ids = _token_at(order)
    _weights, kept = shares_of(scores, top, least)
    return ids, scores, tl.where(order > NOWHERE, kept, 0)


@triton.jit
def _shorten(view, source, low, end):
    """Leave the candidates of the source from `low` on and before `end` in the list."""
    listed, length = source[0], source[1]
    kept = tl.zeros([], tl.int32)
    for first in range(0, length, BLOCK):
        ids, _scores, order, inside = _block(view, source, first + tl.arange(0, BLOCK))
        inside = inside & (order >= low) & (order < end)
        at = kept + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(listed + at, ids, mask=inside)
        kept += tl.sum(inside.to(tl.int32), 0)
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
        step = tl.maximum((high - low) // PLACES, 1)
        if not BY_COUNT:
            end = high
        counts, masses = amounts_from(view, (listed, length, is_list), low, step, end)
        counts += beyond
        masses += base
        reached = (counts if BY_COUNT else masses) >= goal
        steps = tl.sum(reached.to(tl.int32), 0)
        place = tl.arange(0, PLACES) + 1
        held = tl.where(steps > 0, tl.sum(tl.where(place == steps, counts, 0), 0), held)
        nearer = steps < PLACES
        low += steps * step
        high = tl.where(nearer, low + step, high)
        if not BY_COUNT:
            after = place == steps + 1
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
