"""The largest of a row's values and where it is, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options

ARGMAX_BLOCK = 1024


@triton.jit
def block_argmax(logits, values, places, stride, size, BLOCK: tl.constexpr):
    """One program: the largest of one block of a row and where it is, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = tl.load(logits + row * stride + columns, mask=columns < size, other=-float("inf"))
    largest, where = tl.max(row_logits, 0, return_indices=True)
    part = row * tl.num_programs(1) + block
    tl.store(values + part, largest)
    tl.store(places + part, block * BLOCK + where)


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
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the largest of a row's parts and its place, the first of equal ones.

    KEEP: the place goes to the column of the row's slot, too.
    """
    if USE_PDL:
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


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax. Two kernels: of blocks, then of the blocks' results."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    values = torch.empty(rows, blocks, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    launcher(block_argmax, (rows, blocks))(
        logits, values, places, logits.stride(0), size, BLOCK=ARGMAX_BLOCK, num_warps=4
    )
    return best_of_parts(values, places)[1]


def best_of_parts(
    found: Tensor, places: Tensor, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of [N, parts] values and the place that belongs to it: [N] each.

    keep: a column and the rows' slots in it, where the places go as well
    """
    rows, parts = found.shape
    values = torch.empty(rows, device=found.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=found.device)
    launcher(pick_largest, (rows,))(
        found,
        places,
        values,
        tokens,
        *((tokens, tokens) if keep is None else keep),
        parts,
        KEEP=keep is not None,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=8 if parts > 1024 else 1,
        **pdl_options(found),
    )
    return values, tokens
