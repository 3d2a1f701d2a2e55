"""LoRA of a few rows, each with an adapter of its own, in the Triton language.

What one row takes of the matrices is read once, in two kernels: A x, whose inputs several programs
share, and B A x, added where it belongs. A row without an adapter reads nothing. The matrices do
not depend on the kernel before, so their first pieces are fetched before it has ended.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.activation import ACTIVATION_CODES, activate
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.dot import MOST_ROWS
from launcher_scripts.kernels.operands import LoRA

INPUTS = 512  # of A that a program takes
TILE = 4096  # numbers of B that a program takes, where ranks are small
RANKS = 16  # of A that a program takes
OUTPUTS = 512  # the most outputs of these


@triton.jit(do_not_specialize=["rows"])
def shrink(
    x,
    adapters,
    down,
    parts,
    rows,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: what BLOCK inputs of a row x [IN] add to BLOCK_R results of its adapter's
    matrix down [RANKS, IN]; they go to parts [pieces of IN, rows, RANKS].
    """
    row, piece = tl.program_id(0), tl.program_id(2)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inputs = piece * BLOCK + tl.arange(0, BLOCK)
    adapter = tl.load(adapters + row)
    held = (ranks < RANKS) & (adapter >= 0)
    inside = inputs < IN
    place = down + (adapter * RANKS + ranks)[:, None] * IN + inputs[None, :]
    weights = tl.load(place, mask=held[:, None] & inside[None, :], other=0.0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row.to(tl.int64) * IN + inputs, mask=inside & (adapter >= 0), other=0.0)
    total = tl.sum(weights.to(tl.float32) * values.to(tl.float32)[None, :], 1)
    tl.store(parts + (piece * rows + row) * RANKS + ranks, total, mask=held)


@triton.jit
def expanded(
    weights,
    parts,
    row,
    rows,
    first,
    held,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """weights [BLOCK_R, BLOCK] of an adapter's B times RANK sums of the parts from `first` on."""
    ranks = tl.arange(0, BLOCK_R)[:, None]
    pieces = tl.arange(0, BLOCK_P)[None, :]
    place = parts + (pieces * rows + row) * RANKS + first + ranks
    inner = tl.load(place, mask=(ranks < RANK) & (pieces < PIECES) & held, other=0.0)
    return tl.sum(weights.to(tl.float32) * tl.sum(inner, 1)[:, None], 0)


@triton.jit(do_not_specialize=["rows"])
def expand_add(
    out,
    adapters,
    up,
    parts,
    rows,
    OUT: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK outputs of one row, of one of up to three blocks, of which the second
    and the third begin at SECOND and THIRD; each has RANK sums of its own.
    """
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    ranks, columns = tl.arange(0, BLOCK_R), start + tl.arange(0, BLOCK)
    adapter = tl.load(adapters + row)
    held, inside = adapter >= 0, columns < OUT
    place = up + (adapter * RANK + ranks)[:, None] * OUT + columns[None, :]
    mask = (ranks < RANK)[:, None] & inside[None, :] & held
    weights = tl.load(place, mask=mask, other=0.0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = ((start >= SECOND).to(tl.int32) + (start >= THIRD).to(tl.int32)) * RANK
    delta = expanded(weights, parts, row, rows, first, held, RANK, RANKS, PIECES, BLOCK_R, BLOCK_P)
    target = out + row.to(tl.int64) * OUT + columns
    value = tl.load(target, mask=inside & held, other=0.0).to(tl.float32) + delta
    tl.store(target, value.to(out.dtype.element_ty), mask=inside & held)


@triton.jit(do_not_specialize=["rows"])
def expand_activate(
    inner,
    gate,
    adapters,
    up,
    parts,
    rows,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK activations of one row, in the place of `inner`."""
    row = tl.program_id(0)
    ranks, columns = tl.arange(0, BLOCK_R), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    adapter = tl.load(adapters + row)
    held, inside = adapter >= 0, columns < OUT
    width: tl.constexpr = 2 * OUT if GATED else OUT
    place = up + (adapter * RANK + ranks)[:, None] * width + columns[None, :]
    mask = (ranks < RANK)[:, None] & inside[None, :] & held
    weights = tl.load(place, mask=mask, other=0.0)
    if GATED:
        others = tl.load(place + OUT, mask=mask, other=0.0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    target = row.to(tl.int64) * OUT + columns
    value = tl.load(inner + target, mask=inside, other=0.0).to(tl.float32)
    value += expanded(weights, parts, row, rows, 0, held, RANK, RANKS, PIECES, BLOCK_R, BLOCK_P)
    value = activate(value, ACTIVATION)
    if GATED:
        factor = tl.load(gate + target, mask=inside, other=0.0).to(tl.float32)
        factor += expanded(
            others, parts, row, rows, RANK, held, RANK, RANKS, PIECES, BLOCK_R, BLOCK_P
        )
        value *= factor
    tl.store(inner + target, value.to(inner.dtype.element_ty), mask=inside)


def add_lora(out: Tensor, x: Tensor, adapters: Tensor, lora: LoRA) -> Tensor:
    """See reference.add_lora. Many rows go through A of every adapter."""
    if x.shape[0] > MOST_ROWS:
        return reference.add_lora(out, x, adapters, lora)
    parts = shrunk(x, adapters, lora)
    size, block = out.shape[1], _outputs_of(lora)
    ends = (lora.widths[0], sum(lora.widths[:2])) if len(lora.widths) > 1 else (size, size)
    launcher(expand_add, (x.shape[0], triton.cdiv(size, block)))(
        out,
        adapters,
        lora.up,
        parts,
        x.shape[0],
        OUT=size,
        SECOND=ends[0],
        THIRD=ends[1],
        BLOCK=block,
        **_sizes(lora, parts),
        **pdl_options(out),
    )
    return out


def activate_with_lora(
    up: Tensor,
    gate: Tensor | None,
    x: Tensor,
    adapters: Tensor,
    lora: LoRA,
    activation: str,
) -> Tensor:
    """See reference.activate_with_lora."""
    if x.shape[0] > MOST_ROWS:
        return reference.activate_with_lora(up, gate, x, adapters, lora, activation)
    parts, size = shrunk(x, adapters, lora), up.shape[1]
    block = _share(lora)
    launcher(expand_activate, (x.shape[0], triton.cdiv(size, block)))(
        up,
        up if gate is None else gate,
        adapters,
        lora.up,
        parts,
        x.shape[0],
        OUT=size,
        GATED=gate is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        BLOCK=block,
        **_sizes(lora, parts),
        **pdl_options(up),
    )
    return up


def shrunk(x: Tensor, adapters: Tensor, lora: LoRA) -> Tensor:
    """A x of each row's adapter, float32 [pieces, N, blocks * rank], to be summed over the pieces;
    of rows without one anything.
    """
    (rows, size), ranks = x.shape, lora.down.shape[1]
    block = min(INPUTS, triton.next_power_of_2(size))
    parts = torch.empty(triton.cdiv(size, block), rows, ranks, device=x.device)
    at_once = min(RANKS, triton.next_power_of_2(ranks))
    launcher(shrink, (rows, triton.cdiv(ranks, at_once), parts.shape[0]))(
        x,
        adapters,
        lora.down,
        parts,
        rows,
        IN=size,
        RANKS=ranks,
        BLOCK_R=at_once,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x),
    )
    return parts


def _sizes(lora: LoRA, parts: Tensor) -> dict[str, int]:
    """What the kernels that read `parts` are compiled for."""
    rank = lora.up.shape[1]
    return {
        "RANK": rank,
        "RANKS": parts.shape[2],
        "PIECES": parts.shape[0],
        "BLOCK_R": triton.next_power_of_2(rank),
        "BLOCK_P": triton.next_power_of_2(parts.shape[0]),
        "num_warps": 4,
    }


def _share(lora: LoRA) -> int:
    """Outputs that a program takes of B."""
    rank: int = triton.next_power_of_2(lora.up.shape[1])
    return min(OUTPUTS, max(16, TILE // rank))


def _outputs_of(lora: LoRA) -> int:
    """The same where each program's outputs are of one block: a power of two."""
    share = _share(lora)
    if len(lora.widths) == 1:
        return share
    common = gcd(*lora.widths)
    return min(share, common & -common)
