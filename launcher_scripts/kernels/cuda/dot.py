"""A weight times a few rows on the matrix units, in the Triton language: steps of several rows.

The weight's rows are the tall side of each product, the rows of x the narrow one, so that a weight
is read once however few rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.gemv_tile import activate, scales_of
from launcher_scripts.kernels.cuda.int8 import dot_digits, load_piece
from launcher_scripts.kernels.cuda.norm import standardize


@triton.jit
def _fetch(starts, first, last, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Ask for the first AHEAD pieces of a weight's rows, so that they are in the second cache
    when they are needed: one address of every 128 bytes."""
    line: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, BLOCK // line) * line
    for piece in tl.static_range(AHEAD):
        columns = tl.minimum(first + piece * BLOCK + lines, last - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [starts + columns[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _dot(
    x,
    starts,
    held,
    first,
    last,
    count,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """float32 [ROWS, BATCH]: rows of the weight times the rows of x, over columns first..last-1.

    starts, held: [ROWS, 1], where the weight's rows start, and which there are
    """
    columns = tl.arange(0, BLOCK)
    batch = tl.arange(0, BATCH)
    product = tl.zeros([ROWS, BATCH], tl.float32)
    weights = starts + columns[None, :]
    places = x + batch[None, :] * IN + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        inside = (batch < count)[None, :] & (column + columns < IN)[:, None]
        piece = tl.load(places + column, mask=inside, other=0.0)
        product = tl.dot(tile, piece, product, input_precision="ieee")
    return product


@triton.jit
def _halves(product, ROWS: tl.constexpr, BATCH: tl.constexpr):
    """The first and the second half of the rows."""
    return tl.split(tl.permute(tl.reshape(product, [2, ROWS // 2, BATCH]), [1, 2, 0]))


@triton.jit
def dot_rows(
    x,
    steps,
    weight,
    gate_weight,
    scales,
    gate_scales,
    offsets,
    gate_offsets,
    out,
    largest,
    places,
    count,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LARGEST: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """out = act(W x + b) * (W2 x + b2) for `count` rows of x, the parts as the flags say.

    x and steps are what split_rows makes of x where the weights are int8.
    Of the ROWS that a program multiplies, half are the gate's with GATED. With SPLITS > 1 the parts
    over the columns go to out [SPLITS, count, OUT], to be summed. With LARGEST nothing but the
    largest of the program's values and its place is kept, for each row. With EARLY the weight's
    first AHEAD pieces are on their way before x is there.
    """
    part = tl.program_id(0)
    split = tl.program_id(1)
    own: tl.constexpr = ROWS // 2 if GATED else ROWS
    rows = part * own + tl.arange(0, own)
    batch = tl.arange(0, BATCH)
    share: tl.constexpr = ((IN + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
    first = split * share
    last = tl.minimum(first + share, IN)
    lines = tl.arange(0, ROWS)[:, None]
    held = part * own + lines % own < OUT
    place = tl.minimum(part * own + lines % own, OUT - 1).to(tl.int64) * IN
    starts = weight + place
    if GATED:
        starts = tl.where(lines < own, starts, gate_weight + place)
    if EARLY:
        gdc_launch_dependents()
        _fetch(starts, first, last, AHEAD, BLOCK)
        gdc_wait()
    even: tl.constexpr = OUT % own == 0 and IN % BLOCK == 0
    if weight.dtype.element_ty == tl.int8:
        value = dot_digits(x, steps, starts, held, first, last, count, IN, even, ROWS, BLOCK, BATCH)
    else:
        value = _dot(x, starts, held, first, last, count, IN, even, ROWS, BLOCK, BATCH)
    if GATED:
        value, gate = _halves(value, ROWS, BATCH)
    value *= scales_of(scales, weight, rows, OUT)[:, None]
    if OFFSET:
        offset = tl.load(offsets + rows, mask=(rows < OUT) & (split == 0), other=0.0)
        value += offset.to(tl.float32)[:, None]
    value = activate(value, ACTIVATION)
    if GATED:
        gate *= scales_of(gate_scales, gate_weight, rows, OUT)[:, None]
        if OFFSET:
            gate += tl.load(gate_offsets + rows, mask=rows < OUT, other=0.0)[:, None]
        value = value * gate
    if LARGEST:
        value = tl.where((rows < OUT)[:, None], value, -float("inf"))
        top, at = tl.max(value, 0, return_indices=True)
        target = batch * tl.num_programs(0) + part
        tl.store(largest + target, top, mask=batch < count)
        tl.store(places + target, part * own + at, mask=batch < count)
    else:
        target = out + (split * count + batch[None, :]) * OUT + rows[:, None]
        mask = (rows < OUT)[:, None] & (batch < count)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_and_normalize(
    parts,
    offsets,
    residual,
    gain,
    bias,
    exact,
    operand,
    row_stats,
    count,
    size,
    eps,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    STATS_PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row of residual + the sum of parts + offsets, and the same normalized (or,
    with NORM 0, in the operand's type). STATS_PARTS: the only row's is the operand that
    norm.py describes, without the norm's bias; its statistics go to row_stats."""
    if EARLY:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    held = tl.zeros([BLOCK], tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    if NORM > 0:
        held = tl.load(gain + columns, mask=inside, other=0.0)
    if NORM == 1 and STATS_PARTS == 0:
        shift = tl.load(bias + columns, mask=inside, other=0.0)
    if OFFSET:
        added = tl.load(offsets + columns, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(residual + row * size + columns, mask=inside, other=0.0) + added
    for part in tl.static_range(PARTS):
        place = parts + (part * count + row) * size + columns
        values += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(exact + row * size + columns, values, mask=inside)
    if NORM > 0:
        values = standardize(values, inside, row_stats, size, eps, NORM, STATS_PARTS, BLOCK)
        values = values * held + shift
    tl.store(operand + row * size + columns, values.to(operand.dtype.element_ty), mask=inside)
