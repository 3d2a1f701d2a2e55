"""In which group of a row's tokens its next one lies, in the Triton language.

A group has the tokens whose scores are between two bounds on how far they are below the largest
one. For a row of top-k it has all tokens up to the bound within which the k largest are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels.cuda.candidates import FEW
from launcher_scripts.kernels.cuda.shares import BOUNDS, FINER_BOUNDS, REACH, level_of


@triton.jit
def _mix(bits):
    """See reference_sampling._mix."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def choice_of(seed, length, prompt_length, top_k, top_p, slot):
    """How the row in a slot chooses: whether by top-p alone; else its k; its p; what part of the
    shares comes before the token or with it, float64.
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
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), mass)


@triton.jit
def all_bounds():
    bound = tl.arange(0, BOUNDS)
    root = (bound + 1).to(tl.float32) * 0.5
    return tl.where(bound == BOUNDS - 1, REACH, root * root)


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
    place = tl.minimum(tl.sum((~reached).to(tl.int32), 0), COUNT - 1)
    here, before = bound == place, bound == place - 1
    if place > 0:
        above = tl.sum(tl.where(before, bounds, 0.0), 0)
        mass = tl.sum(tl.where(before, masses, 0), 0)
        count = tl.sum(tl.where(before, counts, 0), 0)
    upto = tl.sum(tl.where(here, bounds, 0.0), 0)
    return above, upto, mass, count, tl.sum(tl.where(here, counts, 0), 0)


@triton.jit
def group_of(own, by_p, k, part, LEVEL: tl.constexpr):
    """The row's group, as far as the levels of bounds up to LEVEL say it: its bounds, the number of
    its tokens, how far they are from the target of the shares, and how many finer levels were
    needed until they were few.
    """
    nothing = tl.zeros([], tl.int64)
    target = target_in(part, tl.max(tl.load(own + tl.arange(0, BOUNDS)), 0))
    above = tl.full([], -1.0, tl.float32)
    above, upto, mass, count, end = _group_in(
        own, all_bounds(), BOUNDS, above, nothing, nothing, by_p, k, target
    )
    number = end - tl.where(by_p, count, 0)
    levels = tl.zeros([], tl.int32)
    for level in tl.static_range(1, LEVEL + 1):
        if number > FEW:
            bounds, fields = finer_bounds(above, upto), level_of(own, level)
            above, upto, mass, count, end = _group_in(
                fields, bounds, FINER_BOUNDS, above, mass, count, by_p, k, target
            )
            number = end - tl.where(by_p, count, 0)
            levels += 1
    return above, upto, number.to(tl.int32), target - mass, levels
