"""What shares of a row's probabilities are within some bounds, in the Triton language.

A row's tokens are counted by how far their scores are below the largest one. Shares are integers,
so a row gives the same sums to any number of programs, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference_sampling

MOST_PARTS = tl.constexpr(256)  # of a row
LANES = tl.constexpr(128)  # sums that a program keeps apart until it ends: shuffles are slow
BOUNDS = tl.constexpr(16)
REACH = tl.constexpr(28.0)  # how far below the largest score a share is less than one unit
# What a row adds up: amounts within the bounds, all shares, tokens collected, programs that ended.
WHOLE = tl.constexpr(16)
FOUND = tl.constexpr(17)
ENDED = tl.constexpr(18)
FIELDS = tl.constexpr(32)

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
    tl.store(maxima + row * MOST_PARTS + part, tl.max(largest, 0))
    if part == 0:
        tl.store(sums + row * FIELDS + tl.arange(0, FIELDS), 0)


@triton.jit
def tile(SIZE: tl.constexpr):
    """The numbers below SIZE, [SIZE / LANES, LANES]; sums over the rows need no shuffles."""
    return tl.arange(0, SIZE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


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
    part = tl.arange(0, MOST_PARTS)
    values = tl.load(maxima + row * MOST_PARTS + part, mask=part < parts, other=-float("inf"))
    score = tl.max(values, 0) * factor
    return tl.maximum(tl.minimum(score, LARGEST), -LARGEST)


@triton.jit
def shares_of(scores, top, least):
    """In units: the shares, and those that are at least so much of the largest one."""
    shares = tl.exp(scores - top)
    weights = (shares * UNITS).to(tl.int64)
    return weights, tl.where(shares >= least, weights, 0)


@triton.jit
def all_bounds():
    root = (tl.arange(0, BOUNDS) + 1).to(tl.float32) / BOUNDS
    return root * root * REACH


@triton.jit
def method_of(top_k, top_p, slot):
    """Whether the row in a slot chooses by top-p alone; else its k; its p."""
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    return (k == 0) & (p > 0), tl.maximum(k, 1), p


@triton.jit(do_not_specialize=["parts"])
def add_shares(
    logits,
    maxima,
    sums,
    slots,
    top_k,
    top_p,
    min_p,
    temperature,
    stride,
    size,
    parts,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: of a part of a row, the shares of the tokens within each bound, or their number
    for top-k.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row)
    factor = temperature_factor(temperature, slot)
    least = tl.load(min_p + slot)
    by_p, _, _ = method_of(top_k, top_p, slot)
    top = top_score(maxima, row, parts, factor)
    bounds = all_bounds()
    counts = tl.zeros([BOUNDS, LANES], tl.int32)
    masses = tl.zeros([BOUNDS, LANES], tl.int64)
    whole = tl.zeros([LANES], tl.int64)
    for first in range(part * BLOCK, size, parts * BLOCK):
        ids = first + tile(BLOCK)
        scores = scores_at(logits + row * stride, ids, ids < size, factor)
        weights, kept = shares_of(scores, top, least)
        within = (top - scores)[None, :, :] <= bounds[:, None, None]
        if by_p:
            masses += tl.sum(tl.where(within, kept[None, :, :], 0), 1)
        else:
            counts += tl.sum(within.to(tl.int32), 1)
        whole += tl.sum(weights, 0)
    own = sums + row * FIELDS
    amounts = tl.sum(masses + counts, 1)
    tl.atomic_add(own + tl.arange(0, BOUNDS), amounts, sem="relaxed")
    tl.atomic_add(own + WHOLE, tl.sum(whole, 0), sem="relaxed")
