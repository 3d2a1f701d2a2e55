"""Embeddings, and how a decode step begins, in the Triton language.

Tokens of a step written into the host's memory, in the Triton language.

A step that is a CUDA graph does it itself, so the host launches nothing for it. A copy engine would
take 5 us longer (docs/decode-speed.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.elementwise import cache_token
from launcher_scripts.kernels.cuda.norm import (
    empty_stats,
    full_row_parts,
    hidden,
    norm_code,
    standardize,
)
from launcher_scripts.kernels.operands import EmbeddingTables, Hidden, Norm, RowColumns, StepRows


@triton.jit
def look_up(ids, table, out, first_id, held, size, BLOCK: tl.constexpr):
    """One program: the table's row of one id in float32, zeros for an id of another rank."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    local = tl.load(ids + token).to(tl.int64) - first_id
    mine = (local >= 0) & (local < held)
    mask = columns < size
    values = tl.load(table + local * size + columns, mask=mask & mine, other=0.0)
    tl.store(out + token.to(tl.int64) * size + columns, values.to(tl.float32), mask=mask)


@triton.jit
def begin_rows(
    slots,
    token,
    start,
    length,
    source_start,
    source_length,
    history,
    block_table,
    table,
    position_table,
    starts,
    positions,
    lengths,
    sources,
    source_starts,
    located,
    exact,
    rounded,
    gain,
    row_stats,
    first_id,
    held,
    padding,
    size,
    eps,
    BLOCK_TOKENS: tl.constexpr,
    SOURCES: tl.constexpr,
    POSITIONS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRESCALED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row's token goes to the history and its embedding to `exact`.

    PRESCALED, the code of a norm behind: what goes to `rounded` is the operand for that norm (see
    norm.py), whose gain is `gain`; its statistics go to row_stats.

    It never calls gdc_launch_dependents: no later kernel starts before it has ended, so all of them
    may read what it writes before gdc_wait.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    identity = tl.load(token + slot)
    first = tl.load(start + slot)
    position = tl.load(length + slot)
    new = cache_token(block_table, first + position, BLOCK_TOKENS)
    tl.store(history + new, identity)
    tl.store(located + row, new)
    tl.store(length + slot, position + 1, mask=slot != padding)
    tl.store(starts + row, first)
    tl.store(positions + row, position)
    tl.store(lengths + row, position + 1)
    if SOURCES:
        source = tl.load(source_length + slot)
        tl.store(sources + row, tl.maximum(source, 1))
        tl.store(source_starts + row, tl.load(source_start + slot))
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    local = identity - first_id
    mine = (local >= 0) & (local < held)
    value = tl.load(table + local * size + columns, mask=mask & mine, other=0.0).to(tl.float32)
    if POSITIONS:
        offset = position_table + position * size + columns
        value += tl.load(offset, mask=mask, other=0.0).to(tl.float32)
    target = row.to(tl.int64) * size + columns
    tl.store(exact + target, value, mask=mask)
    if PRESCALED > 0:
        value = standardize(value, mask, row_stats, size, eps, PRESCALED, PARTS, BLOCK)
        value *= tl.load(gain + columns, mask=mask, other=0.0)
    if ROUNDED:
        tl.store(rounded + target, value.to(rounded.dtype.element_ty), mask=mask)


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """See reference.embed."""
    size = table.shape[1]
    out = torch.empty(ids.shape[0], size, device=table.device)
    launcher(look_up, (ids.shape[0],))(
        ids, table, out, first_id, table.shape[0], size, BLOCK=triton.next_power_of_2(size)
    )
    return out


def begin_step(
    slots: Tensor,
    columns: RowColumns,
    history: Tensor,
    tables: EmbeddingTables,
    norm_of_next: Norm | None,
    *,
    sources: bool = False,
) -> tuple[Hidden, StepRows]:
    """See reference.begin_step."""
    rows, size, dtype = slots.shape[0], tables.tokens.shape[1], tables.tokens.dtype
    exact = torch.empty(rows, size, device=slots.device)
    folded = norm_of_next if rows == 1 else None
    alike = dtype == torch.float32 and folded is None
    rounded = exact if alike else exact.new_empty(rows, size, dtype=dtype)
    parts = 0 if folded is None else full_row_parts(size)
    row_stats = None if folded is None else empty_stats(parts, slots.device)
    numbers = torch.empty(6, rows, dtype=torch.int64, device=slots.device)
    starts, positions, lengths, source_starts, source_lengths, located = numbers
    launcher(begin_rows, (rows,))(
        slots,
        columns.token,
        columns.start,
        columns.length,
        columns.source_start,
        columns.source_length,
        history,
        slots if columns.table is None else columns.table.entries,
        tables.tokens,
        tables.tokens if tables.positions is None else tables.positions,
        starts,
        positions,
        lengths,
        source_lengths,
        source_starts,
        located,
        exact,
        rounded,
        exact if folded is None else folded.weight,
        exact if row_stats is None else row_stats,
        tables.first_id,
        tables.tokens.shape[0],
        columns.padding,
        size,
        0.0 if folded is None else folded.eps,
        BLOCK_TOKENS=0 if columns.table is None else columns.table.tokens,
        SOURCES=sources,
        POSITIONS=tables.positions is not None,
        ROUNDED=rounded is not exact,
        PRESCALED=norm_code(folded),
        PARTS=parts,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
    )
    step_rows = StepRows(starts, positions, lengths, located=located)
    if sources:
        step_rows = replace(step_rows, source_starts=source_starts, source_lengths=source_lengths)
    if rows == 1:
        return Hidden(exact, rounded, row_stats), step_rows
    return hidden(exact, norm_of_next, dtype), step_rows


BLOCK = 256


@triton.jit(
    do_not_specialize=["count", "lines", "width", "padding"],
    do_not_specialize_on_alignment=["tokens", "slots", "memory"],
)
def write_line(
    tokens,
    slots,
    memory,
    written,
    count,
    lines,
    width,
    padding,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the tokens of all rows, and that a line more has been written."""
    if USE_PDL:
        gdc_wait()
    if tl.load(slots) != padding:
        number = tl.load(written)
        line = memory + number % lines * width
        for first in range(0, count, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            mask = offsets < count
            tl.store(line + offsets, tl.load(tokens + offsets, mask=mask), mask=mask)
        tl.store(written, number + 1)


def copy_to_host(
    tokens: Tensor, slots: Tensor, memory: Tensor, written: Tensor, padding: int
) -> None:
    """See reference.copy_to_host."""
    lines, width = memory.shape
    launcher(write_line, (1,))(
        tokens.contiguous(),
        slots.contiguous(),
        memory,
        written,
        min(tokens.shape[0], width),
        lines,
        width,
        padding,
        BLOCK=BLOCK,
        **pdl_options(tokens),
    )
