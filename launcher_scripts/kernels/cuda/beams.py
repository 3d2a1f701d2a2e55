"""Beam searches in the Triton language: see reference_beams.py.

Two kernels rank. The first finds the likeliest tokens of parts of a row, and what the row's
log-probabilities need of the parts. A program of the second has a search: it takes the best of all
parts of all hypotheses, one after the other, and writes what goes on. A third kernel copies keys
and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference_sampling
from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.elementwise import cache_token
from launcher_scripts.kernels.reference_sampling import BeamColumns, BeamShape

MAX_WIDTH = 8  # whose candidates one program holds
BLOCK = 1024  # logits that a program of the first kernel has
TILE = 4096  # numbers that a program copies
NOWHERE = tl.constexpr(0x7FFFFFFF)
DONE_SCORE = tl.constexpr(reference_sampling.DONE_SCORE)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def find_likeliest(
    logits,
    allowed,
    found,
    tokens,
    sums,
    stride,
    allowed_stride,
    size,
    COUNT: tl.constexpr,
    ALL_ALLOWED: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the COUNT likeliest tokens of a part of a row, the first of equal ones first.

    sums: of each part its largest logit, and the sum of exponentials below it
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = columns < size
    values = tl.load(logits + row * stride + columns, mask=left, other=-float("inf"))
    part = row * tl.num_programs(1) + tl.program_id(1)
    top = tl.max(values, 0)
    shares = tl.exp(values - tl.where(top > -float("inf"), top, 0.0))
    tl.store(sums + part * 2, top)
    tl.store(sums + part * 2 + 1, tl.sum(shares, 0))
    if not ALL_ALLOWED:
        may = tl.load(allowed + row * allowed_stride + columns, mask=left, other=-float("inf"))
        values = tl.where(may == -float("inf"), may, values)
    for n in range(COUNT):
        best = tl.max(tl.where(left, values, -float("inf")), 0)
        token = tl.min(tl.where(left & (values == best), columns, NOWHERE), 0)
        tl.store(found + part * COUNT + n, best)
        tl.store(tokens + part * COUNT + n, token)
        left = left & (columns != token)


@triton.jit
def _log_sum(sums, row, in_bounds, parts, PARTS: tl.constexpr):
    """Logarithm of the sum of exponentials of the rows [W]."""
    part = tl.arange(0, PARTS)
    at = (row[:, None] * parts + part[None, :]) * 2
    mask = in_bounds[:, None] & (part < parts)[None, :]
    tops = tl.load(sums + at, mask=mask, other=-float("inf"))
    wholes = tl.load(sums + at + 1, mask=mask, other=0.0)
    top = tl.max(tops, 1)
    top = tl.where(top > -float("inf"), top, 0.0)
    total = tl.sum(wholes * tl.exp(tops - top[:, None]), 1)
    return top + tl.log(tl.where(in_bounds, total, 1.0))


@triton.jit
def _go_on(order, slots, beam_score, token_of, parents, search, WIDTH: tl.constexpr):
    """Make the first WIDTH that do not end the next hypotheses; behind them come those that end."""
    listed, parent, token, ends, ranking = order
    goes = tl.where(listed, 1 - ends, 0)
    is_end = tl.where(listed, ends, 0)
    ends_before = tl.sum(goes, 0) + tl.cumsum(is_end, 0) - is_end
    target = search * WIDTH + tl.where(ends > 0, ends_before, tl.cumsum(goes, 0) - goes)
    goes_on = listed & (target < (search + 1) * WIDTH)
    slot = tl.load(slots + target, mask=goes_on, other=0)
    tl.store(token_of + slot, token, mask=goes_on)
    tl.store(beam_score + slot, tl.where(ends > 0, ranking + DONE_SCORE, ranking), mask=goes_on)
    source = tl.load(slots + search * WIDTH + parent, mask=goes_on, other=0)
    tl.store(parents + target, source, mask=goes_on)


@triton.jit
def rank_search(
    found,
    tokens,
    sums,
    slots,
    beam_score,
    end_id,
    token_of,
    choices,
    scores,
    parents,
    parts,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    ORDER: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: the KEPT best continuations of a search, and the WIDTH of them that go on."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    search = tl.program_id(0).to(tl.int64)
    hypothesis = tl.arange(0, ROWS)
    is_row = hypothesis < WIDTH
    row = search * WIDTH + hypothesis
    log_sum = _log_sum(sums, row, is_row, parts, PARTS)
    slot = tl.load(slots + row, mask=is_row, other=0)
    before = tl.load(beam_score + slot, mask=is_row, other=0.0)
    lanes = tl.arange(0, PLACES)
    size = parts * COUNT
    at = row[:, None] * size + lanes[None, :]
    mask = is_row[:, None] & (lanes < size)[None, :]
    logit = tl.load(found + at, mask=mask, other=-float("inf"))
    left = mask & (tl.load(tokens + at, mask=mask, other=NOWHERE) != NOWHERE)
    total = before[:, None] + (logit - log_sum[:, None])
    number = hypothesis[:, None] * PLACES + lanes[None, :]

    rank = tl.arange(0, ORDER)
    parent = tl.zeros([ORDER], tl.int64)
    token = tl.zeros([ORDER], tl.int64)
    ends = tl.zeros([ORDER], tl.int32)
    ranking = tl.zeros([ORDER], tl.float32)
    log_prob = tl.zeros([ORDER], tl.float32)
    for n in range(KEPT):
        best = tl.max(tl.max(tl.where(left, total, -float("inf")), 1), 0)
        first = tl.min(tl.min(tl.where(left & (total == best), number, NOWHERE), 1), 0)
        left = left & (number != first)
        first = tl.where(first == NOWHERE, 0, first)  # where scores are no numbers
        which = first // PLACES
        source_index = (search * WIDTH + which) * size + first % PLACES
        next_ids = tl.load(tokens + source_index).to(tl.int64)
        end = tl.load(end_id + tl.load(slots + search * WIDTH + which))
        sum_of = tl.sum(tl.where(hypothesis == which, log_sum, 0.0), 0)
        here = rank == n
        parent = tl.where(here, which.to(tl.int64), parent)
        token = tl.where(here, next_ids, token)
        ends = tl.where(here, (next_ids == end).to(tl.int32), ends)
        ranking = tl.where(here, best, ranking)
        log_prob = tl.where(here, tl.load(found + source_index) - sum_of, log_prob)

    listed = rank < KEPT
    out = search * KEPT + rank
    step = tl.num_programs(0) * KEPT
    tl.store(choices + out, parent, mask=listed)
    tl.store(choices + step + out, token, mask=listed)
    tl.store(choices + 2 * step + out, ends.to(tl.int64), mask=listed)
    tl.store(scores + out, ranking, mask=listed)
    tl.store(scores + step + out, ranking, mask=listed)
    tl.store(scores + 2 * step + out, log_prob, mask=listed)

    order = (listed, parent, token, ends, ranking)
    _go_on(order, slots, beam_score, token_of, parents, search, WIDTH)


def rank_beams(
    logits: Tensor,
    allowed: Tensor,
    slots: Tensor,
    columns: BeamColumns,
    shape: BeamShape,
    completed: Tensor | None = None,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See reference_beams.rank_beams, whose operations it takes for wide searches, stop words and
    diversity.
    """
    rows, size = logits.shape
    shape = shape.within(size)
    if shape.width > MAX_WIDTH or completed is not None or bonus is not None:
        return reference_sampling.rank_beams(
            logits, allowed, slots, columns, shape, completed, bonus
        )
    count, width, device = shape.siblings, shape.candidates, logits.device
    parts, searches = triton.cdiv(size, BLOCK), rows // shape.width
    maxima = torch.empty(rows, parts, count, device=device)
    tokens = torch.empty(rows, parts, count, dtype=torch.int32, device=device)
    sums = torch.empty(rows, parts, 2, device=device)
    launcher(find_likeliest, (rows, parts))(
        logits,
        allowed,
        maxima,
        tokens,
        sums,
        logits.stride(0),
        allowed.stride(0),
        size,
        COUNT=count,
        ALL_ALLOWED=allowed is logits,
        BLOCK=BLOCK,
        num_warps=1,
        **pdl_options(logits),
    )
    choices = torch.empty(3, searches, width, dtype=torch.int64, device=device)
    scores = torch.empty(3, searches, width, device=device)
    parents = torch.empty_like(slots)
    launcher(rank_search, (searches,))(
        maxima,
        tokens,
        sums,
        slots,
        columns.beam_score,
        columns.end_id,
        columns.token,
        choices,
        scores,
        parents,
        parts,
        WIDTH=shape.width,
        COUNT=count,
        KEPT=width,
        ROWS=triton.next_power_of_2(shape.width),
        PARTS=triton.next_power_of_2(parts),
        PLACES=triton.next_power_of_2(parts * count),
        ORDER=triton.next_power_of_2(width),
        num_warps=8,
        **pdl_options(logits),
    )
    return choices, scores, parents


@triton.jit
def copy_hypotheses(
    pool,
    ids,
    slots,
    parents,
    length,
    prompt_length,
    start,
    table,
    tokens,
    count,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: AT_ONCE of the last tokens of a search, of one layer's head's keys or values."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, AT_ONCE * ROWS)
    back = tl.program_id(2) * AT_ONCE + lane // ROWS
    local = (lane % ROWS < WIDTH) & (back < count)
    row = tl.program_id(1) * WIDTH + lane % ROWS
    slot = tl.load(slots + row, mask=local, other=0)
    parent = tl.load(parents + row, mask=local, other=0)
    position = tl.load(length + slot, mask=local, other=0) - 1 - back
    local = local & (position >= tl.load(prompt_length + slot, mask=local, other=0))
    position = tl.where(local, position, 0)
    source = tl.load(start + parent, mask=local, other=0) + position
    target = tl.load(start + slot, mask=local, other=0) + position
    source = cache_token(table, source, BLOCK_TOKENS)
    target = cache_token(table, target, BLOCK_TOKENS)
    local = local & (source != target)
    channel = tl.arange(0, HEAD)
    mask = local[:, None] & (channel < SIZE)[None, :]
    at = pool + head * tokens * SIZE
    read = tl.load(at + source[:, None] * SIZE + channel[None, :], mask=mask)
    written = tl.load(ids + source, mask=local & (HAS_IDS and head == 0))
    tl.debug_barrier()
    tl.store(at + target[:, None] * SIZE + channel[None, :], read, mask=mask)
    tl.store(ids + target, written, mask=local & (HAS_IDS and head == 0))


def reorder_beams(
    pool: Tensor,
    ids: Tensor | None,
    slots: Tensor,
    parents: Tensor,
    columns: BeamColumns,
    width: int,
    count: int,
) -> None:
    """See reference_beams.reorder_beams."""
    layers, pair, heads, tokens, size = pool.shape
    table = columns.table
    rows, head = triton.next_power_of_2(width), triton.next_power_of_2(size)
    at_once = max(1, TILE // (rows * head))
    grid = (layers * pair * heads, slots.shape[0] // width, triton.cdiv(count, at_once))
    launcher(copy_hypotheses, grid)(
        pool.view(INTEGERS[pool.element_size()]),
        slots if ids is None else ids,
        slots,
        parents,
        columns.length,
        columns.prompt_length,
        columns.start,
        slots if table is None else table.entries,
        tokens,
        count,
        WIDTH=width,
        ROWS=rows,
        AT_ONCE=at_once,
        SIZE=size,
        HEAD=head,
        HAS_IDS=ids is not None,
        BLOCK_TOKENS=0 if table is None else table.tokens,
        num_warps=4,
        **pdl_options(pool),
    )
