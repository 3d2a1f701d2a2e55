"""LoRA of a few rows, each with an adapter of its own, in the Triton language.

A x of the rows' adapters is a kernel before the projection's. The projection's own kernel adds B
times that: it reads the rows of B that belong to its outputs. A and B do not depend on the kernel
before, so both kernels ask for them before it has ended. A row without an adapter reads neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.cuda.elementwise import prefetch_if
from launcher_scripts.kernels.cuda.norm import load_row_stats, norm_code, norm_terms, parts_of
from launcher_scripts.kernels.operands import Linear

TILE = 8192  # numbers of A that a program takes at once
MAX_INPUTS = 16384  # of a row of A that a program takes at once
# Columns of B that are multiplied at once, for each row of the batch. The rows' adapters say where
# they are, so few loads are under way at a time: many columns at once take fewer waits.
DEPTH = tl.constexpr(8)
MAX_LOCAL = tl.constexpr(8192)  # columns times rows
PREFETCHED = tl.constexpr(256)  # columns of B that are prefetched at once
LINE = tl.constexpr(64)  # numbers of B that one prefetch brings: 128 bytes


@triton.jit(do_not_specialize_on_alignment=["adapters"])
def shrink(
    x,
    row_stats,
    gain,
    bias,
    adapters,
    down,
    inner,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_R results of a row x [IN] times its adapter's A [RANKS, IN], to inner,
    float32 [rows, RANKS]; zeros where the row has no adapter.

    NORM: the only row is the operand that norm.py describes, of which gain and bias are missing
    """
    row = tl.program_id(0)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK)
    adapter = tl.load(adapters + row)
    mask = ((ranks < RANKS) & (adapter >= 0))[:, None]
    weights = down + (adapter * RANKS + ranks)[:, None] * IN + columns[None, :]
    tile = tl.load(weights, mask=mask & (columns < IN)[None, :], other=0.0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    mean, scale = norm_terms(total, squares, IN, NORM)
    result = tl.zeros([BLOCK_R], tl.float32)
    for first in tl.static_range(0, IN, BLOCK):
        positions = first + columns
        in_bounds = positions < IN
        if first > 0:
            tile = tl.load(weights + first, mask=mask & in_bounds[None, :], other=0.0)
        values = tl.load(x + row.to(tl.int64) * IN + positions, mask=in_bounds, other=0.0).to(
            tl.float32
        )
        if NORM == 1:
            values -= mean * tl.load(gain + positions, mask=in_bounds, other=0.0)
            values = values * scale + tl.load(bias + positions, mask=in_bounds, other=0.0)
        result += tl.sum(tile.to(tl.float32) * values[None, :], 1)
    if NORM == 2:
        result *= scale
    target = inner + row * RANKS + ranks
    tl.store(target, result, mask=ranks < RANKS)


@triton.jit
def _block_of(outputs, LORA: tl.constexpr):
    """Return which of up to three blocks outputs belong to; each block has rows of A of its own."""
    return (outputs >= LORA[2]).to(tl.int32) + (outputs >= LORA[3]).to(tl.int32)


@triton.jit
def load_up(up, adapters, outputs, others, mask, LORA: tl.constexpr, PAIRED: tl.constexpr):
    """B of the only row's adapter for the outputs [ROWS], and for others with PAIRED: each [ROWS,
    rank as a power of two]."""
    tile, other = 0.0, 0.0
    if LORA is not None:
        adapter = tl.load(adapters)
        tile = _load_up(up, adapter, outputs, mask, LORA)
        if PAIRED:
            other = _load_up(up, adapter, others, mask, LORA)
    return tile, other


@triton.jit
def _load_up(up, adapter, outputs, in_bounds, LORA: tl.constexpr):
    WIDTH: tl.constexpr = LORA[0]
    RANK: tl.constexpr = LORA[1]
    ranks = tl.arange(0, triton.next_power_of_2(RANK))[None, :]
    mask = in_bounds[:, None] & (ranks < RANK) & (adapter >= 0)
    return tl.load(up + (adapter * RANK + ranks) * WIDTH + outputs[:, None], mask=mask, other=0.0)


@triton.jit
def load_inner(inner, outputs, others, mask, LORA: tl.constexpr, PAIRED: tl.constexpr):
    """Load the factors of both results of `load_up`: those of `shrink`, in the same shapes."""
    values, other = 0.0, 0.0
    if LORA is not None:
        values = _load_inner(inner, outputs, mask, LORA)
        if PAIRED:
            other = _load_inner(inner, others, mask, LORA)
    return values, other


@triton.jit
def _load_inner(inner, outputs, mask, LORA: tl.constexpr):
    RANK: tl.constexpr = LORA[1]
    ranks = tl.arange(0, triton.next_power_of_2(RANK))[None, :]
    offset = (_block_of(outputs, LORA) * RANK)[:, None] + ranks
    return tl.load(inner + offset, mask=mask[:, None] & (ranks < RANK), other=0.0)


@triton.jit
def add_delta(value, tile, values, LORA: tl.constexpr):
    """value [ROWS] plus what the only row's adapter adds."""
    if LORA is not None:
        value += tl.sum(tile.to(tl.float32) * values, 1)
    return value


@triton.jit
def _steps_of(first, count, LORA: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """Return the number of steps of DEPTH columns through B of all `count` rows for one block;
    and the first step, and the one after the last, for the blocks of the ROWS outputs from
    `first` on."""
    steps = tl.cdiv(count * LORA[1], DEPTH)
    last = tl.minimum(first + ROWS, LORA[0]) - 1
    return steps, _block_of(first, LORA) * steps, (_block_of(last, LORA) + 1) * steps


@triton.jit
def _columns_of(step, steps, adapters, count, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """The columns [DEPTH] of a step: their row, the row's adapter, and which one of its ranks."""
    columns = step % steps * DEPTH + tl.arange(0, DEPTH)
    row = columns // RANK
    return row, tl.load(adapters + row, mask=row < count, other=-1), columns % RANK


@triton.jit
def prefetch_up(
    up,
    adapters,
    first,
    split,
    count,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    LORA: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Prefetch into L2 what add_deltas reads of B for the outputs from `first` on, and for those of
    the gate with GATED."""
    if LORA is not None:
        WIDTH: tl.constexpr = LORA[0]
        RANK: tl.constexpr = LORA[1]
        steps, begin, end = _steps_of(first, count, LORA, PREFETCHED, ROWS)
        for step in tl.range(begin + split, end, SPLITS):
            _, adapter, rank = _columns_of(step, steps, adapters, count, RANK, PREFETCHED)
            columns = up + (adapter * RANK + rank) * WIDTH + first
            for line in tl.static_range(0, ROWS, LINE):
                prefetch_if(columns + tl.minimum(line, OUT - 1 - first), adapter >= 0)
                if GATED:
                    prefetch_if(columns + OUT + tl.minimum(line, OUT - 1 - first), adapter >= 0)


@triton.jit
def add_deltas(
    value,
    up,
    inner,
    adapters,
    first,
    split,
    count,
    LORA: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """value [ROWS, BATCH], the outputs from `first` on of `count` rows, plus one of SPLITS shares
    of B times the results of `shrink`.

    The columns of B of all rows are side by side, [ROWS, count * rank], and each row has zeros but
    for its own results: it is one product of matrices.
    """
    if LORA is not None:
        WIDTH: tl.constexpr = LORA[0]
        RANK: tl.constexpr = LORA[1]
        blocks: tl.constexpr = 1 + (LORA[2] < WIDTH) + (LORA[3] < WIDTH)
        even: tl.constexpr = WIDTH % ROWS == 0 and LORA[2] % ROWS == 0 and LORA[3] % ROWS == 0
        outputs = (first + tl.arange(0, ROWS))[:, None]
        batch = tl.arange(0, BATCH)[None, :]
        depth: tl.constexpr = min(DEPTH * BATCH, MAX_LOCAL // BATCH)
        steps, begin, end = _steps_of(first, count, LORA, depth, ROWS)
        for step in tl.range(begin + split, end, SPLITS):
            block = step // steps
            row, adapter, rank = _columns_of(step, steps, adapters, count, RANK, depth)
            mask = (adapter >= 0)[None, :]
            if not even:
                mask &= (outputs < WIDTH) & (_block_of(outputs, LORA) == block)
            weights = up + (adapter * RANK + rank)[None, :] * WIDTH + outputs
            tile = tl.load(weights, mask=mask, other=0.0)
            offset = (row * blocks + block) * RANK + rank
            values = tl.load(inner + offset, mask=row < count, other=0.0)
            row_values = tl.where(row[:, None] == batch, values.to(tile.dtype)[:, None], 0.0)
            value = tl.dot(tile, row_values, value)
    return value


def lora_arguments(x: Tensor, linear: Linear, row_stats: Tensor | None = None) -> dict[str, object]:
    """Arguments about LoRA of a product's kernel, for which A x is made first; x [N, in] stands for
    what there is not.

    LORA: outputs and rank of B, and where its second and third block begin; None without LoRA
    row_stats: where x is the operand of one row whose norm is folded; see norm.py
    """
    if linear.lora is None:
        return {"lora_up": x, "lora_inner": x, "adapters": x, "LORA": None}
    lora, adapters = linear.lora.lora, linear.lora.adapters
    rank, width = lora.up.shape[1:]
    return {
        "lora_up": lora.up,
        "lora_inner": _shrunk(x, linear, lora.down, adapters, row_stats),
        "adapters": adapters,
        "LORA": (width, rank, lora.widths[0], sum(lora.widths[:2])),
    }


def _shrunk(
    x: Tensor, linear: Linear, down: Tensor, adapters: Tensor, row_stats: Tensor | None
) -> Tensor:
    """A x of each row's adapter, float32 [N, blocks * rank]; see shrink."""
    (rows, size), ranks = x.shape, down.shape[1]
    norm = None if linear.folded is None or row_stats is None else linear.norm
    parts = 1 if norm is None else parts_of(row_stats)
    gain = x if norm is None else norm.weight
    bias = None if norm is None else norm.bias
    inner = torch.empty(rows, ranks, device=x.device)
    block = min(MAX_INPUTS, triton.next_power_of_2(size))
    at_once = min(max(1, TILE // block), triton.next_power_of_2(ranks))
    launcher(shrink, (rows, triton.cdiv(ranks, at_once)))(
        x,
        x if norm is None else row_stats,
        gain,
        gain if bias is None else bias,
        adapters,
        down,
        inner,
        IN=size,
        RANKS=ranks,
        NORM=norm_code(norm),
        PARTS=parts,
        SPREAD=triton.next_power_of_2(parts),
        BLOCK_R=at_once,
        BLOCK=block,
        num_warps=8 if block * at_once > TILE else 4,
        **pdl_options(x),
    )
    return inner
