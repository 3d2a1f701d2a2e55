"""From logits to tokens in the Triton language, without sorting: see reference_sampling.sample.

Three kernels. The first finds the largest logits of parts of a row. The second adds up, for some
bounds on how far a score is below the largest one, the shares of the tokens within each; for rows
of top-k it counts them. So it is known between which two bounds the token lies, or within which the
k largest do. The third collects those tokens; the program of a row that ends last narrows them down
to one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.candidates import (
    CANDIDATES,
    FEW,
    amounts_from,
    collect,
    extent,
    narrow,
    only_one,
    rank_few,
)
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.shares import (
    BOUNDS,
    ENDED,
    FIELDS,
    FOUND,
    MOST_PARTS,
    UNITS,
    WHOLE,
    add_shares,
    all_bounds,
    find_maxima,
    method_of,
    temperature_factor,
    top_score,
)
from launcher_scripts.kernels.operands import SamplingColumns

PROGRAMS = 1024  # that a step of few rows is split over
BLOCK = 1024  # logits that a program reads at once


@triton.jit
def _mix(bits):
    """See reference_sampling._mix."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _drawn_part(seed, length, prompt_length, p, slot):
    """What part of the shares comes before the token or with it, float64."""
    step = tl.load(length + slot) - tl.load(prompt_length + slot)
    bits = _mix(_mix(tl.load(seed + slot)) + (step + 1) * -7046029254386353131)
    uniform = (((bits >> 40) & 0xFFFFFF) + 1).to(tl.float64) * 5.9604644775390625e-08  # 2^-24
    return uniform * tl.where(p > 0, p, 1.0).to(tl.float64)


@triton.jit
def _target(part, mass):
    """At which sum of shares the token is reached."""
    exact = part * mass.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), mass)


@triton.jit
def _within_bounds(own, by_p, k, part):
    """Which tokens are candidates: how far below the largest score, above one bound and up to
    another. Where the token is chosen by top-p alone, also the shares before them and its target.
    """
    bound = tl.arange(0, BOUNDS)
    amounts = tl.load(own + bound)
    target = _target(part, tl.max(amounts, 0))
    reached = amounts >= tl.where(by_p, target, k)
    place = tl.minimum(tl.sum((~reached).to(tl.int32), 0), BOUNDS - 1)
    bounds = all_bounds()
    upto = tl.sum(tl.where(bound == place, bounds, 0.0), 0)
    after = by_p & (place > 0)
    before = bound == place - 1
    above = tl.where(after, tl.sum(tl.where(before, bounds, 0.0), 0), -1.0)
    base = tl.where(after, tl.sum(tl.where(before, amounts, 0), 0), 0)
    return above, upto, base, target


@triton.jit
def _choose_of_few(view, source, by_p, k, part, mass, target):
    """See _choose."""
    ids, scores, rank, kept, running = rank_few(view, source)
    kept = tl.where(by_p | (rank < k), kept, 0)
    if not by_p:
        mass = tl.sum(kept, 0)
        target = _target(part, mass)
    chosen = (kept > 0) & (running >= target) & (running - kept < target)
    token = tl.max(tl.where(chosen, ids, 0), 0)
    score = tl.max(tl.where(chosen, scores, -float("inf")), 0)
    return token, score, mass


@triton.jit
def _choose_of_many(view, source, count, by_p, k, part, mass, target):
    """See _choose."""
    low, high = extent(view)
    if not by_p:
        low, _, count, source = narrow(view, source, low, high, count, k, BY_COUNT=True)
        _, masses = amounts_from(view, source, low, 0, high)
        mass = tl.max(masses, 0)
        target = _target(part, mass)
    low, high, _, source = narrow(view, source, low, high, count, target, BY_COUNT=False)
    token, score = only_one(view, source, low, high)
    return token, score, mass


@triton.jit
def _choose(view, listed, own, size, by_p, k, part, base, target):
    """Id and score of the row's token, and the shares that it was chosen from."""
    count = tl.load(own + FOUND).to(tl.int32)
    is_list = count <= CANDIDATES
    source = (listed, tl.where(is_list, count, size), is_list)
    whole = tl.load(own + WHOLE)
    target -= base
    if count <= FEW:
        token, score, mass = _choose_of_few(view, source, by_p, k, part, whole, target)
    else:
        token, score, mass = _choose_of_many(view, source, count, by_p, k, part, whole, target)
    return token, score, mass


@triton.jit(do_not_specialize=["parts"])
def choose_tokens(
    logits,
    maxima,
    sums,
    candidates,
    slots,
    length,
    prompt_length,
    token,
    seed,
    top_k,
    reset_id,
    temperature,
    min_p,
    top_p,
    initial_top_p,
    top_p_decay,
    top_p_min,
    tokens,
    log_probs,
    stride,
    size,
    parts,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the candidates of a part of a row. The row's last program chooses one."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    own = sums + row * FIELDS
    factor = temperature_factor(temperature, slot)
    top = top_score(maxima, row, parts, factor)
    by_p, k, p = method_of(top_k, top_p, slot)
    part = _drawn_part(seed, length, prompt_length, p, slot)
    above, upto, base, target = _within_bounds(own, by_p, k, part)
    view = (logits + row * stride, factor, top, above, upto, tl.load(min_p + slot))
    listed = candidates + row * CANDIDATES
    collect(view, listed, own + FOUND, size, tl.program_id(1), parts, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(own + ENDED, 1, sem="acq_rel") == parts - 1:
        chosen, score, mass = _choose(view, listed, own, size, by_p, k, part, base, target)
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(token + slot, chosen.to(tl.int64))
        if by_p:
            moved = tl.maximum(p * tl.load(top_p_decay + slot), tl.load(top_p_min + slot))
            reset = chosen == tl.load(reset_id + slot)
            tl.store(top_p + slot, tl.where(reset, tl.load(initial_top_p + slot), moved))
        below = score - top
        tl.store(log_probs + row, below - _log_of(tl.load(own + WHOLE)))
        tl.store(log_probs + tl.num_programs(0) + row, below - _log_of(mass))


@triton.jit
def _log_of(mass):
    return tl.log(tl.maximum(mass, 1).to(tl.float32) / UNITS)


def sample(logits: Tensor, slots: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """See reference_sampling.sample."""
    rows, size = logits.shape
    device = logits.device
    blocks = triton.cdiv(size, BLOCK)
    parts = max(1, min(blocks, MOST_PARTS.value, PROGRAMS // rows))
    maxima = torch.empty(rows, MOST_PARTS.value, device=device)
    sums = torch.empty(rows, FIELDS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, CANDIDATES.value, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    log_probs = torch.empty(2, rows, device=device)
    shape = (logits.stride(0), size, parts)
    # Products and sums are rounded as the reference rounds them.
    options = {"num_warps": 4, "enable_fp_fusion": False, "BLOCK": BLOCK}
    options |= pdl_options(logits)
    launcher(find_maxima, (rows, parts))(logits, maxima, sums, *shape, **options)
    launcher(add_shares, (rows, parts))(
        logits,
        maxima,
        sums,
        slots,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.temperature,
        *shape,
        **options,
    )
    launcher(choose_tokens, (rows, parts))(
        logits,
        maxima,
        sums,
        candidates,
        slots,
        columns.length,
        columns.prompt_length,
        columns.token,
        columns.seed,
        columns.top_k,
        columns.reset_id,
        columns.temperature,
        columns.min_p,
        columns.top_p,
        columns.initial_top_p,
        columns.top_p_decay,
        columns.top_p_min,
        tokens,
        log_probs,
        *shape,
        **options,
    )
    return tokens, log_probs
