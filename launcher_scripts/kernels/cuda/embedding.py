"""What a decode step begins and ends with, one kernel each, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.norm import standardize


@triton.jit
def begin_rows(
    slots,
    token,
    start,
    length,
    source_start,
    source_length,
    history,
    table,
    position_table,
    starts,
    positions,
    lengths,
    sources,
    source_starts,
    exact,
    rounded,
    gain,
    row_stats,
    first_id,
    held,
    padding,
    size,
    eps,
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

    Nothing later starts before this has ended, so all may read what it writes without waiting.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    identity = tl.load(token + slot)
    first = tl.load(start + slot)
    position = tl.load(length + slot)
    tl.store(history + first + position, identity)
    tl.store(length + slot, position + 1, mask=slot != padding)
    tl.store(starts + row, first)
    tl.store(positions + row, position)
    tl.store(lengths + row, position + 1)
    if SOURCES:
        source = tl.load(source_length + slot)
        tl.store(sources + row, tl.maximum(source, 1))
        tl.store(source_starts + row, tl.load(source_start + slot))
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    local = identity - first_id
    mine = (local >= 0) & (local < held)
    value = tl.load(table + local * size + columns, mask=inside & mine, other=0.0).to(tl.float32)
    if POSITIONS:
        place = position_table + position * size + columns
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    target = row.to(tl.int64) * size + columns
    tl.store(exact + target, value, mask=inside)
    if PRESCALED > 0:
        value = standardize(value, inside, row_stats, size, eps, PRESCALED, PARTS, BLOCK)
        value *= tl.load(gain + columns, mask=inside, other=0.0)
    if ROUNDED:
        tl.store(rounded + target, value.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def pick_largest(
    largest,
    places,
    values,
    tokens,
    column,
    slots,
    parts,
    KEEP: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the largest of a row's parts and its place, the first of equal ones.

    KEEP: the place goes to the column of the row's slot, too.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < parts
    value = tl.load(largest + row * parts + columns, mask=inside, other=-float("inf"))
    top, part = tl.max(value, 0, return_indices=True)
    tl.store(values + row, top)
    place = tl.load(places + row * parts + part).to(tl.int64)
    tl.store(tokens + row, place)
    if KEEP:
        tl.store(column + tl.load(slots + row), place)
