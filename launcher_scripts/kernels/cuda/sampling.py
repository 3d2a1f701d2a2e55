"""From logits to tokens in the Triton language, without sorting a vocabulary: see
reference_sampling.sample.

The first kernel finds the largest logits of parts of a row. The second adds up, for some bounds on
how far a score is below the largest one, the shares of the tokens within each, and counts them. So
it is known between which two bounds the token lies, or within which the k largest do. Where many
tokens do, two more kernels add up the same for finer bounds between these two. As soon as few do,
they are collected. The last kernel collects the rest; the program of a row that ends last narrows
them down to one.

Biases, penalties and forbidden tokens in the Triton language: see reference_sampling.process.

Only the logits of tokens that a row has change, so a program goes through the row's tokens. A token
that the row has several times changes once: whichever of its positions takes its count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.candidates import (
    BOUNDS,
    CANDIDATES,
    FEW,
    FIELDS,
    FINER_BOUNDS,
    FLOAT_MAX,
    LANES,
    LEVELS,
    LISTED_END,
    MAX_PARTS,
    MAX_TOKENS,
    NUM_LISTED,
    SHARE_TOTAL,
    SPAN,
    TIMES,
    UNITS,
    add_sums,
    all_bounds,
    amounts_from,
    choice_of,
    collect,
    extent,
    find_maxima,
    finer_bounds,
    group_of,
    level_of,
    narrow,
    sorted_few,
    sums_within,
    target_in,
    temperature_factor,
    top_score,
)
from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.elementwise import cache_token
from launcher_scripts.kernels.reference_sampling import SamplingColumns

BLOCK = 1024  # tokens of a row that are looked at at once


@triton.jit
def _id_at(history, index, mask, BLOCK_TOKENS: tl.constexpr):
    """The ids of a row's tokens; -1 where the mask is not.

    history: the ids in the cache, the table, and the row's first address
    """
    ids, table, start = history
    token = cache_token(table, start + tl.where(mask, index, 0), BLOCK_TOKENS)
    return tl.load(ids + token, mask=mask, other=-1)


@triton.jit
def _tokens(history, first, last, size, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """A block of a row's positions, its ids there, and which of these have logits."""
    indices = first + tl.arange(0, BLOCK)
    ids = _id_at(history, indices, indices < last, BLOCK_TOKENS)
    return indices, ids, (ids >= 0) & (ids < size)  # virtual tokens are negative


@triton.jit
def _penalized(
    logit,
    count,
    slot,
    temperature,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    output_presence_penalty,
):
    """Logits of tokens that the row has, `count` times among those it has generated."""
    repetition = tl.load(repetition_penalty + slot)
    logit = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, repetition))
    logit = logit - tl.load(frequency_penalty + slot) * count.to(tl.float32)
    logit = logit - tl.where(count > 0, tl.load(output_presence_penalty + slot), 0.0)
    factor = temperature_factor(temperature, slot)
    logit = logit - tl.div_rn(tl.load(presence_penalty + slot), factor)
    return tl.minimum(tl.maximum(logit, -FLOAT_MAX), FLOAT_MAX)


@triton.jit
def _without_repeats(
    row_logits, history, length, n, size, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """-inf at every token that followed the row's last n - 1 tokens before; n of 0: nowhere."""
    for first in range(0, tl.where(n > 0, length, 0), BLOCK):
        indices, ids, mask = _tokens(history, first, length, size, BLOCK, BLOCK_TOKENS)
        mask = mask & (indices >= n - 1)
        for back in range(1, tl.minimum(n, length + 1)):
            earlier = _id_at(history, indices - back, mask, BLOCK_TOKENS)
            mask = mask & (earlier == _id_at(history, length - back, True, BLOCK_TOKENS))
        tl.store(row_logits + ids, -float("inf"), mask=mask)


@triton.jit
def _add_biases(row_logits, ids, values, count, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at < count, other=0)
        logit = tl.load(row_logits + token, mask=at < count, other=0.0)
        bias = tl.load(values + at, mask=at < count, other=0.0)
        tl.store(row_logits + token, logit + bias, mask=at < count)
    tl.debug_barrier()


@triton.jit
def _without_words(
    row_logits,
    history,
    length,
    ids,
    lengths,
    count,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """-inf at every token that would complete a word."""
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        size = tl.load(lengths + at, mask=at < count, other=0)
        completed = (size > 0) & (length >= size - 1)
        for back in range(1, tl.minimum(tl.max(size, 0), length + 1)):
            earlier = tl.load(ids + at - back, mask=completed & (back < size), other=-1)
            latest = _id_at(history, length - back, True, BLOCK_TOKENS)
            completed = completed & ((back >= size) | (earlier == latest))
        token = tl.load(ids + at, mask=completed, other=0)
        tl.store(row_logits + token, -float("inf"), mask=completed)


@triton.jit
def process_rows(
    logits,
    history,
    table,
    counts,
    slots,
    start,
    length,
    prompt_length,
    end_id,
    min_length,
    no_repeat_ngram_size,
    bias_count,
    word_count,
    temperature,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    output_presence_penalty,
    bias_ids,
    bias_values,
    word_ids,
    word_lengths,
    stride,
    size,
    LISTED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row's logits.  counts: [rows, size], room for those of its ids"""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    row_logits = logits + row * stride
    history, counts = (history, table, tl.load(start + slot)), counts + row * size
    tokens, prompt = tl.load(length + slot).to(tl.int32), tl.load(prompt_length + slot)
    listed = slot * LISTED
    biases = tl.load(bias_count + slot).to(tl.int32)
    _add_biases(row_logits, bias_ids + listed, bias_values + listed, biases, BLOCK)
    penalized = tl.load(repetition_penalty + slot) != 1.0
    penalized = penalized | (tl.load(presence_penalty + slot) != 0.0)
    penalized = penalized | (tl.load(frequency_penalty + slot) != 0.0)
    penalized = penalized | (tl.load(output_presence_penalty + slot) != 0.0)
    last = tl.where(penalized, tokens, 0)
    for first in range(0, last, BLOCK):
        indices, ids, mask = _tokens(history, first, last, size, BLOCK, BLOCK_TOKENS)
        tl.store(counts + ids, 0, mask=mask)
    tl.debug_barrier()
    for first in range(0, last, BLOCK):
        indices, ids, mask = _tokens(history, first, last, size, BLOCK, BLOCK_TOKENS)
        tl.atomic_add(counts + ids, 1, mask=mask & (indices >= prompt), sem="relaxed")
    tl.debug_barrier()
    for first in range(0, last, BLOCK):
        indices, ids, mask = _tokens(history, first, last, size, BLOCK, BLOCK_TOKENS)
        count = tl.atomic_xchg(counts + ids, -1, mask=mask, sem="relaxed")
        mask = mask & (count >= 0)
        changed = _penalized(
            tl.load(row_logits + ids, mask=mask, other=0.0),
            count,
            slot,
            temperature,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            output_presence_penalty,
        )
        tl.store(row_logits + ids, changed, mask=mask)
    tl.debug_barrier()
    end = tl.load(end_id + slot)
    early = tokens - prompt < tl.load(min_length + slot)
    tl.store(row_logits + end, -float("inf"), mask=early & (end >= 0) & (end < size))
    words = tl.load(word_count + slot).to(tl.int32)
    _without_words(
        *(row_logits, history, tokens, word_ids + listed, word_lengths + listed, words),
        *(BLOCK, BLOCK_TOKENS),
    )
    n = tl.load(no_repeat_ngram_size + slot)
    _without_repeats(row_logits, history, tokens, n, size, BLOCK, BLOCK_TOKENS)


def process(logits: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor) -> Tensor:
    """See reference_sampling.process."""
    rows, size = logits.shape
    table = columns.table
    counts = torch.empty(rows, size, dtype=torch.int32, device=logits.device)
    launcher(process_rows, (rows,))(
        logits,
        history,
        history if table is None else table.entries,
        counts,
        slots,
        columns.start,
        columns.length,
        columns.prompt_length,
        columns.end_id,
        columns.min_length,
        columns.no_repeat_ngram_size,
        columns.bias_count,
        columns.word_count,
        columns.temperature,
        columns.repetition_penalty,
        columns.presence_penalty,
        columns.frequency_penalty,
        columns.output_presence_penalty,
        columns.bias_ids,
        columns.bias_values,
        columns.word_ids,
        columns.word_lengths,
        logits.stride(0),
        size,
        LISTED=columns.word_ids.shape[1],
        BLOCK_TOKENS=0 if table is None else table.tokens,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
        **pdl_options(logits),
    )
    return logits


PROGRAMS = 2048  # that a step of few rows is split over


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
    view = (logits + row * stride, factor, top, -1.0, SPAN, tl.load(min_p + slot))
    masses, counts, total = sums_within(view, all_bounds(), BOUNDS, size, tl.program_id(1), parts)
    row_sums = sums + row * FIELDS
    add_sums(row_sums, masses, counts, BOUNDS)
    tl.atomic_add(row_sums + SHARE_TOTAL, total, sem="relaxed")


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
    row_sums = sums + row * FIELDS
    factor = temperature_factor(temperature, slot)
    top = top_score(maxima, row, parts, factor)
    by_p, k, _, part = choice_of(seed, length, prompt_length, top_k, top_p, slot)
    above, upto, count, _, levels = group_of(row_sums, by_p, k, part, LEVEL - 1)
    view = (logits + row * stride, factor, top, above, upto, tl.load(min_p + slot))
    if count > FEW:
        bounds = finer_bounds(above, upto)
        masses, counts, _ = sums_within(view, bounds, FINER_BOUNDS, size, tl.program_id(1), parts)
        add_sums(level_of(row_sums, LEVEL), masses, counts, FINER_BOUNDS)
    elif levels == LEVEL - 1:
        view = (logits + row * stride, factor, top, tl.where(by_p, above, -1.0), upto, 0.0)
        listed = candidates + row * CANDIDATES
        collect(view, listed, row_sums + NUM_LISTED, size, tl.program_id(1), parts, BLOCK)


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
def _choose(view, listed, row_sums, size, count, by_p, k, part, target):
    """Id and score of the row's token, and the shares that it was chosen from.

    target: counts the shares from the first candidate on
    """
    mass = tl.load(row_sums + SHARE_TOTAL)
    many = count > FEW
    if many:
        count, mass, target = _narrowed(view, listed, size, count, by_p, k, part, mass, target)
    ids, scores, weights = sorted_few(view, listed, count)
    narrowed = by_p | many
    weights = tl.where(narrowed | (tl.arange(0, FEW) < k), weights, 0)
    if not narrowed:
        mass = tl.sum(weights, 0)
        target = target_in(part, mass)
    running = tl.cumsum(weights)
    selected = (weights > 0) & (running >= target) & (running - weights < target)
    token = tl.max(tl.where(selected, ids, 0), 0)
    score = tl.max(tl.where(selected, scores, -float("inf")), 0)
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
    row_sums = sums + row * FIELDS
    factor = temperature_factor(temperature, slot)
    top = top_score(maxima, row, parts, factor)
    by_p, k, p, part = choice_of(seed, length, prompt_length, top_k, top_p, slot)
    above, upto, count, target, levels = group_of(row_sums, by_p, k, part, LEVELS)
    above = tl.where(by_p, above, -1.0)
    view = (logits + row * stride, factor, top, above, upto, tl.load(min_p + slot))
    listed = candidates + row * CANDIDATES
    if (levels == LEVELS) & (count <= CANDIDATES):
        collect(view, listed, row_sums + NUM_LISTED, size, tl.program_id(1), parts, BLOCK)
        tl.debug_barrier()
    if tl.atomic_add(row_sums + LISTED_END, 1, sem="acq_rel") == parts - 1:
        selected, score, mass = _choose(view, listed, row_sums, size, count, by_p, k, part, target)
        tl.store(tokens + row, selected.to(tl.int64))
        tl.store(token + slot, selected.to(tl.int64))
        if by_p:
            moved = tl.maximum(p * tl.load(top_p_decay + slot), tl.load(top_p_min + slot))
            reset = selected == tl.load(reset_id + slot)
            tl.store(top_p + slot, tl.where(reset, tl.load(initial_top_p + slot), moved))
        below = score - top
        tl.store(log_probs + row, below - _log_of(tl.load(row_sums + SHARE_TOTAL)))
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
