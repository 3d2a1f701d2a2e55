"""From logits to tokens in the Triton language, without sorting a vocabulary: see
reference_sampling.sample.

The first kernel finds the largest logits of parts of a row. The second adds up, for some bounds on
how far a score is below the largest one, the shares of the tokens within each, and counts them. So
it is known between which two bounds the token lies, or within which the k largest do. Where many
tokens do, two more kernels add up the same for finer bounds between these two. As soon as few do,
they are collected. The last kernel collects the rest; the program of a row that ends last narrows
them down to one.
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
    sorted_few,
)
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.groups import (
    all_bounds,
    choice_of,
    finer_bounds,
    group_of,
    target_in,
)
from launcher_scripts.kernels.cuda.shares import (
    BOUNDS,
    ENDED,
    FIELDS,
    FINER_BOUNDS,
    FOUND,
    LANES,
    LEVELS,
    MAX_PARTS,
    MAX_TOKENS,
    REACH,
    TIMES,
    UNITS,
    WHOLE,
    add_sums,
    find_maxima,
    level_of,
    sums_within,
    temperature_factor,
    top_score,
)
from launcher_scripts.kernels.operands import SamplingColumns

PROGRAMS = 2048  # that a step of few rows is split over
BLOCK = 1024  # logits that a program reads at once


@triton.jit(do_not_specialize=["parts"])
def add_shares(
    logits,
    maxima,
    sums,
    slots,
    temperature,
    min_p,
    stride,
    size,
    parts,
    USE_PDL: tl.constexpr,
):
    """One program: of a part of a row, the sums within each bound."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    factor = temperature_factor(temperature, slot)
    top = top_score(maxima, row, parts, factor)
    view = (logits + row * stride, factor, top, -1.0, REACH, tl.load(min_p + slot))
    masses, counts, whole = sums_within(view, all_bounds(), BOUNDS, size, tl.program_id(1), parts)
    own = sums + row * FIELDS
    add_sums(own, masses, counts, BOUNDS)
    tl.atomic_add(own + WHOLE, whole, sem="relaxed")


@triton.jit(do_not_specialize=["parts"])
def add_finer_shares(
    logits,
    maxima,
    sums,
    candidates,
    slots,
    length,
    prompt_length,
    seed,
    top_k,
    top_p,
    temperature,
    min_p,
    stride,
    size,
    parts,
    USE_PDL: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: of a part of a row, the sums within each bound of a finer level. Or, where the
    level before has left few tokens, these.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    own = sums + row * FIELDS
    factor = temperature_factor(temperature, slot)
    top = top_score(maxima, row, parts, factor)
    by_p, k, _, part = choice_of(seed, length, prompt_length, top_k, top_p, slot)
    above, upto, count, _, levels = group_of(own, by_p, k, part, LEVEL - 1)
    view = (logits + row * stride, factor, top, above, upto, tl.load(min_p + slot))
    if count > FEW:
        bounds = finer_bounds(above, upto)
        masses, counts, _ = sums_within(view, bounds, FINER_BOUNDS, size, tl.program_id(1), parts)
        add_sums(level_of(own, LEVEL), masses, counts, FINER_BOUNDS)
    elif levels == LEVEL - 1:
        view = (logits + row * stride, factor, top, tl.where(by_p, above, -1.0), upto, 0.0)
        listed = candidates + row * CANDIDATES
        collect(view, listed, own + FOUND, size, tl.program_id(1), parts, BLOCK)


@triton.jit
def _narrowed(view, listed, size, count, by_p, k, part, mass, target):
    """Leave few candidates in the list: their number, the shares of all that can be chosen, and the
    target after those before the ones that are left.
    """
    is_list = count <= CANDIDATES
    source = (listed, tl.where(is_list, count, size), is_list)
    low, high = extent(view)
    if not by_p:
        low, count, _, source = narrow(view, source, low, high, count, k, BY_COUNT=True)
        _, masses = amounts_from(view, source, low, 0, high)
        mass = tl.max(masses, 0)
        target = target_in(part, mass)
    _, count, before, _ = narrow(view, source, low, high, count, target, BY_COUNT=False)
    return count, mass, target - before


@triton.jit
def _choose(view, listed, own, size, count, by_p, k, part, target):
    """Id and score of the row's token, and the shares that it was chosen from.

    target: counts the shares from the first candidate on
    """
    mass = tl.load(own + WHOLE)
    many = count > FEW
    if many:
        count, mass, target = _narrowed(view, listed, size, count, by_p, k, part, mass, target)
    ids, scores, kept = sorted_few(view, listed, count)
    narrowed = by_p | many
    kept = tl.where(narrowed | (tl.arange(0, FEW) < k), kept, 0)
    if not narrowed:
        mass = tl.sum(kept, 0)
        target = target_in(part, mass)
    running = tl.cumsum(kept)
    chosen = (kept > 0) & (running >= target) & (running - kept < target)
    token = tl.max(tl.where(chosen, ids, 0), 0)
    score = tl.max(tl.where(chosen, scores, -float("inf")), 0)
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
    seed,
    top_k,
    top_p,
    temperature,
    min_p,
    token,
    reset_id,
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
    by_p, k, p, part = choice_of(seed, length, prompt_length, top_k, top_p, slot)
    above, upto, count, target, levels = group_of(own, by_p, k, part, LEVELS)
    above = tl.where(by_p, above, -1.0)
    view = (logits + row * stride, factor, top, above, upto, tl.load(min_p + slot))
    listed = candidates + row * CANDIDATES
    if (levels == LEVELS) & (count <= CANDIDATES):
        collect(view, listed, own + FOUND, size, tl.program_id(1), parts, BLOCK)
        tl.debug_barrier()
    if tl.atomic_add(own + ENDED, 1, sem="acq_rel") == parts - 1:
        chosen, score, mass = _choose(view, listed, own, size, count, by_p, k, part, target)
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
    blocks = triton.cdiv(size, LANES.value * TIMES.value)
    parts = max(1, min(blocks, MAX_PARTS.value, PROGRAMS // rows), triton.cdiv(size, MAX_TOKENS))
    maxima = torch.empty(rows, MAX_PARTS.value, device=device)
    sums = torch.empty(rows, FIELDS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, CANDIDATES.value, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    log_probs = torch.empty(2, rows, device=device)
    shape = (logits.stride(0), size, parts)
    scores = (columns.temperature, columns.min_p)
    choice = (columns.length, columns.prompt_length, columns.seed, columns.top_k, columns.top_p)
    # Products and sums are rounded as the reference rounds them.
    options = {"num_warps": 4, "enable_fp_fusion": False} | pdl_options(logits)
    grid = (rows, parts)
    launcher(find_maxima, grid)(logits, maxima, sums, *shape, BLOCK=BLOCK, **options)
    launcher(add_shares, grid)(logits, maxima, sums, slots, *scores, *shape, **options)
    row_tensors = (logits, maxima, sums, candidates, slots, *choice, *scores)
    for level in range(1, LEVELS.value + 1):
        launcher(add_finer_shares, grid)(*row_tensors, *shape, LEVEL=level, BLOCK=BLOCK, **options)
    launcher(choose_tokens, grid)(
        *row_tensors,
        columns.token,
        columns.reset_id,
        columns.initial_top_p,
        columns.top_p_decay,
        columns.top_p_min,
        tokens,
        log_probs,
        *shape,
        BLOCK=BLOCK,
        **options,
    )
    return tokens, log_probs
