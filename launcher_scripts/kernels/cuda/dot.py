"""A weight times a few rows on the matrix units, in the Triton language: steps of several rows.

The weight's rows are the tall side of each product, the rows of x the narrow one, so that a weight
is read once however few rows there are.

A weight in bytes times a few rows on the matrix units, in the Triton language.

The matrix units multiply bytes with bytes of the same type, and making wider numbers of the weights
first takes more time than reading them. So each row of x gets a scale (step) of its own, and every
number of it becomes a high and a low byte. Their products are summed apart.

int8:  an int16 in two parts, of which the sums are exact. The steps, the largest of a row over
       32639, are finer than bfloat16 for all but the smallest values.
e4m3:  the low byte is what the high one lacks, eight times. Together they have the eight bits of
       bfloat16; float16, which has more, is not split.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.common.quantization import FOUR_BITS, Quantization
from launcher_scripts.kernels.cuda.compiling import (
    DotTile,
    dot_tile,
    launcher,
    pdl_options,
    traits_of,
)
from launcher_scripts.kernels.cuda.elementwise import (
    ACTIVATION_CODES,
    BYTES,
    activate,
    activate_gated,
    best_of_parts,
    of_four_bits,
    prefetch,
    scales_of,
)
from launcher_scripts.kernels.cuda.lora import add_deltas, lora_arguments, prefetch_up
from launcher_scripts.kernels.cuda.packed import LINE_COLUMNS, add_packed, scales_at
from launcher_scripts.kernels.operands import Hidden, Linear

INT8_BASE = tl.constexpr(256)  # of the high bytes, where the low ones have 1
INT8_MAX = tl.constexpr(127 * 256 + 127)
FP8_BASE = tl.constexpr(8)
FP8_MAX = tl.constexpr(440 * 8)  # a rounded quotient by 448 could be more than e4m3 holds


@triton.jit
def split_rows(
    x,
    hi_lo,
    steps,
    size,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row of x [N, size] as (base * high + low) * step.

    hi_lo: bytes [2, N, size], the high ones first;  steps: float32 [N]
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    max_abs = tl.max(tl.abs(values), 0)
    max_abs = tl.where(max_abs > 0, max_abs, 1.0)
    if hi_lo.dtype.element_ty == tl.int8:
        step = max_abs / INT8_MAX
        rounded = tl.floor(values / step + 0.5).to(tl.int32)
        high = (rounded + INT8_BASE // 2) >> 8
        low = rounded - high * INT8_BASE
    else:
        step = max_abs / FP8_MAX
        rounded = values / step
        high = of_four_bits(rounded / FP8_BASE)
        low = rounded - high * FP8_BASE
    target = hi_lo + row * size + columns
    tl.store(target, high.to(hi_lo.dtype.element_ty), mask=mask)
    lows = tl.num_programs(0).to(tl.int64) * size
    tl.store(target + lows, low.to(hi_lo.dtype.element_ty), mask=mask)
    tl.store(steps + row, step)


@triton.jit
def load_piece(weights, held, EVEN: tl.constexpr):
    """Some columns of a weight's rows, which are read once."""
    if EVEN:
        tile = tl.load(weights, eviction_policy="evict_first")
    else:
        tile = tl.load(weights, mask=held, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def dot_hi_lo(
    hi_lo,
    steps,
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
    """float32 [ROWS, BATCH]: rows of a weight in bytes times those of x, over columns
    first..last-1; the weight's scales are not applied.

    starts, held: [ROWS, 1], where the weight's rows start, and which there are
    """
    is_int8: tl.constexpr = hi_lo.dtype.element_ty == tl.int8
    sum_type: tl.constexpr = tl.int32 if is_int8 else tl.float32
    columns = tl.arange(0, BLOCK)
    batch = tl.arange(0, BATCH)
    high = tl.zeros([ROWS, BATCH], sum_type)
    low = tl.zeros([ROWS, BATCH], sum_type)
    weights = starts + columns[None, :]
    offsets = hi_lo + batch[None, :] * IN + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        mask = (batch < count)[None, :] & (column + columns < IN)[:, None]
        highs = tl.load(offsets + column, mask=mask, other=0.0)
        lows = tl.load(offsets + count * IN + column, mask=mask, other=0.0)
        if is_int8:
            high = tl.dot(tile, highs, high, out_dtype=tl.int32)
            low = tl.dot(tile, lows, low, out_dtype=tl.int32)
        else:  # the matrix units add e4m3 in fewer bits than float32 has
            high += tl.dot(tile, highs)
            low += tl.dot(tile, lows)
    step = tl.load(steps + batch, mask=batch < count, other=0.0)[None, :]
    base: tl.constexpr = INT8_BASE if is_int8 else FP8_BASE
    return (high.to(tl.float32) * base + low.to(tl.float32)) * step


def splits(x: Tensor, quantization: Quantization | None) -> bool:
    """Return whether x [N, in] is split for weights that are so quantized."""
    return quantization == "int8" or (quantization == "fp8" and x.dtype == torch.bfloat16)


def split_hi_lo(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N, in] as a weight of `dtype` is multiplied with: hi_lo [2, N, in] of it, steps [N]."""
    count, size = x.shape
    hi_lo = torch.empty(2, count, size, dtype=dtype, device=x.device)
    steps = torch.empty(count, device=x.device)
    block = triton.next_power_of_2(size)
    warps = max(1, min(32, block // 512))
    launcher(split_rows, (count,))(
        x, hi_lo, steps, size, BLOCK=block, num_warps=warps, **pdl_options(x)
    )
    return hi_lo, steps


MAX_ROWS = 64
MIN_BATCH = 16  # the narrow side of a matrix product


@triton.jit
def _prefetch_pieces(starts, first, last, PREFETCH: tl.constexpr, BLOCK: tl.constexpr):
    """Prefetch the first PREFETCH pieces of a weight's rows."""
    line: tl.constexpr = BYTES * 8 // starts.dtype.element_ty.primitive_bitwidth
    if PREFETCH > 0:  # a piece of four bits may have less than a line
        lines = tl.arange(0, BLOCK // line) * line
        for piece in tl.static_range(PREFETCH):
            columns = tl.minimum(first + piece * BLOCK + lines, last - 1)
            prefetch(starts + columns[None, :])


@triton.jit
def add_pieces(
    inputs,
    valid,
    starts,
    held,
    first,
    last,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """float32 [ROWS, BATCH]: rows of a weight times rows of inputs, over columns first..last-1;
    scales are not applied. A weight in bytes takes the type of the inputs, which holds its numbers.

    inputs, given: [1, BATCH], where the inputs' rows start, and which there are
    starts, held: [ROWS, 1], the same of the weight's
    """
    columns = tl.arange(0, BLOCK)
    product = tl.zeros([ROWS, BATCH], tl.float32)
    weights = starts + columns[None, :]
    offsets = inputs + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        piece = tl.load(offsets + column, mask=valid & (column + columns < IN)[:, None], other=0.0)
        if tile.dtype != piece.dtype:
            tile = tile.to(tl.float32).to(piece.dtype)  # twice as fast as at once
        product = tl.dot(tile, piece, product, input_precision="ieee")
    return product


@triton.jit
def halves(product, ROWS: tl.constexpr, BATCH: tl.constexpr):
    """The first and the second half of the rows."""
    return tl.split(tl.permute(tl.reshape(product, [2, ROWS // 2, BATCH]), [1, 2, 0]))


@triton.jit
def _store_largest(value, largest, places, row, present, part, batch, count):
    """Each batch row's largest of the present values from `row` on, and its place."""
    value = tl.where(present[:, None], value, -float("inf"))
    top, at = tl.max(value, 0, return_indices=True)
    target = batch * tl.num_programs(0) + part
    tl.store(largest + target, top, mask=batch < count)
    tl.store(places + target, row + at, mask=batch < count)


@triton.jit(do_not_specialize_on_alignment=["adapters"])
def dot_rows(
    x,
    steps,
    weight,
    gate_weight,
    scales,
    gate_scales,
    offsets,
    gate_offsets,
    lora_up,
    lora_inner,
    adapters,
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
    PREFETCH: tl.constexpr,
    LORA: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """out = act(W x + b) * (W2 x + b2) for `count` rows of x, the parts as the flags say.

    x and steps may be what split_rows makes of x, where the weights are bytes.
    Of the ROWS that a program multiplies, half are the gate's with GATED. With SPLITS > 1 the parts
    over the columns go to out [SPLITS, count, OUT], to be summed. With LARGEST nothing but the
    largest of the program's values and its place is kept, for each row. With USE_PDL the weight's
    first PREFETCH pieces are prefetched before gdc_wait. LORA: what lora_arguments says of the LoRA
    of both products.
    """
    part = tl.program_id(0)
    split = tl.program_id(1)
    span: tl.constexpr = ROWS // 2 if GATED else ROWS
    row = part * span
    rows = row + tl.arange(0, span)
    batch = tl.arange(0, BATCH)
    share: tl.constexpr = ((IN + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
    first = split * share
    last = tl.minimum(first + share, IN)
    lines = tl.arange(0, ROWS)[:, None]
    local = row + lines % span < OUT
    line_rows = tl.minimum(row + lines % span, OUT - 1).to(tl.int64)
    packed: tl.constexpr = weight.dtype.element_ty == tl.uint8
    position = line_rows * (IN // 2 if packed else IN)
    starts = weight + position
    if GATED:
        starts = tl.where(lines < span, starts, gate_weight + position)
    if USE_PDL:
        gdc_launch_dependents()
        _prefetch_pieces(starts, first, last, PREFETCH, BLOCK)
        prefetch_up(lora_up, adapters, row, split, count, OUT, GATED, LORA, SPLITS, span)
        gdc_wait()
    even: tl.constexpr = OUT % span == 0 and IN % BLOCK == 0
    inputs, valid = x + batch[None, :] * IN, (batch < count)[None, :]
    if packed:
        kind: tl.constexpr = scales.dtype.element_ty
        at = scales_at(scales, gate_scales, line_rows, lines < span, IN, GATED)
        value = add_packed(
            inputs, valid, starts, at, local, first, share, IN, even, BLOCK, kind, USE_PDL
        )
    elif x.dtype.element_ty.primitive_bitwidth == 8:
        value = dot_hi_lo(x, steps, starts, local, first, last, count, IN, even, ROWS, BLOCK, BATCH)
    else:
        value = add_pieces(inputs, valid, starts, local, first, last, IN, even, ROWS, BLOCK, BATCH)
    if GATED:
        value, gate = halves(value, ROWS, BATCH)
    value *= scales_of(scales, weight, rows, OUT)[:, None]
    if OFFSET:
        offset = tl.load(offsets + rows, mask=(rows < OUT) & (split == 0), other=0.0)
        value += offset.to(tl.float32)[:, None]
    value = add_deltas(
        value, lora_up, lora_inner, adapters, row, split, count, LORA, SPLITS, span, BATCH
    )
    if GATED:
        gate *= scales_of(gate_scales, gate_weight, rows, OUT)[:, None]
        if OFFSET:
            gate += tl.load(gate_offsets + rows, mask=rows < OUT, other=0.0)[:, None]
        gate = add_deltas(
            gate, lora_up, lora_inner, adapters, OUT + row, split, count, LORA, SPLITS, span, BATCH
        )
        value = activate_gated(value, gate, ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    if LARGEST:
        _store_largest(value, largest, places, row, rows < OUT, part, batch, count)
    else:
        target = out + (split * count + batch[None, :]) * OUT + rows[:, None]
        mask = (rows < OUT)[:, None] & (batch < count)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def fits(x: Tensor) -> bool:
    """Return whether x [N, in] goes through here: more rows and float32 are for cuBLAS."""
    return 1 < x.shape[0] <= MAX_ROWS and x.dtype != torch.float32


def _tile_of(linear: Linear, kind: str) -> DotTile:
    tile = dot_tile(kind, linear.weight.shape[0], linear.in_size, linear.quantization)
    return (
        tile.dividing(linear.in_size, LINE_COLUMNS.value)
        if linear.quantization in FOUR_BITS
        else tile
    )


def dot_product(
    x: Tensor,
    linear: Linear,
    kind: str,
    *,
    gate: Linear | None = None,
    activation: str | None = None,
) -> Tensor:
    """act(linear(x)), times gate(x) where there is one: [N, out]; norms are not looked at."""
    out = x.new_empty(x.shape[0], linear.weight.shape[0])
    tile = _tile_of(linear, kind)._replace(splits=1)
    _launch(x, linear, tile, linear.weight.shape[0], out=out, gate=gate, activation=activation)
    return out


def dot_parts(x: Tensor, linear: Linear, kind: str) -> Tensor:
    """linear(x), perhaps in parts that whoever reads it sums: [P, N, out]; norms are not looked at.

    One part has the type of x, several have float32.
    """
    out_size, tile = linear.weight.shape[0], _tile_of(linear, kind)
    dtype = x.dtype if tile.splits == 1 else torch.float32
    parts = x.new_empty(tile.splits, x.shape[0], out_size, dtype=dtype)
    _launch(x, linear, tile, out_size, out=parts)
    return parts


def dot_summands(x: Tensor, linear: Linear, kind: str = "add") -> Tensor:
    """linear(x) without its bias, in parts to be summed: float32 [P, N, out]."""
    out_size, tile = linear.weight.shape[0], _tile_of(linear, kind)
    parts = torch.empty(tile.splits, x.shape[0], out_size, device=x.device)
    _launch(x, replace(linear, bias=None), tile, out_size, out=parts)
    return parts


def dot_largest(
    x: Hidden, head: Linear, held: int, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """reference.largest for a few rows."""
    tile = _tile_of(head, "largest")._replace(splits=1)
    count, parts = x.operand.shape[0], triton.cdiv(held, tile.rows)
    maxima = torch.empty(count, parts, device=x.operand.device)
    indices = torch.empty(count, parts, dtype=torch.int32, device=x.operand.device)
    _launch(x.operand, head, tile, held, largest=(maxima, indices))
    return best_of_parts(maxima, indices, keep)


def _launch(
    x: Tensor,
    linear: Linear,
    tile: DotTile,
    out_size: int,
    *,
    out: Tensor | None = None,
    gate: Linear | None = None,
    activation: str | None = None,
    largest: tuple[Tensor, Tensor] | None = None,
) -> None:
    maxima, indices = (x, x) if largest is None else largest
    split = splits(x, linear.quantization)
    operand, steps = split_hi_lo(x, linear.weight.dtype) if split else (x, x)
    gate_bias = None if gate is None else gate.bias
    batch = max(MIN_BATCH, triton.next_power_of_2(x.shape[0]))
    if linear.quantization in FOUR_BITS:
        tile = tile._replace(warps=2 * tile.warps if batch > 32 else tile.warps)  # for sums
    tile = tile.fitting(batch, linear.weight.element_size(), traits_of(x.device).shared_bytes)
    tile_rows = tile.rows if gate is None else tile.rows // 2
    launcher(dot_rows, (triton.cdiv(out_size, tile_rows), tile.splits))(
        operand,
        steps=steps,
        weight=linear.weight,
        gate_weight=linear.weight if gate is None else gate.weight,
        scales=x if linear.scale is None else linear.scale,
        gate_scales=x if gate is None or gate.scale is None else gate.scale,
        offsets=x if linear.bias is None else linear.bias,
        gate_offsets=x if gate_bias is None else gate_bias,
        out=x if out is None else out,
        largest=maxima,
        places=indices,
        count=x.shape[0],
        OUT=out_size,
        IN=linear.in_size,
        OFFSET=linear.bias is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        LARGEST=largest is not None,
        SPLITS=tile.splits,
        PREFETCH=tile.prefetch,
        ROWS=tile.rows,
        BLOCK=tile.block,
        BATCH=batch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **lora_arguments(x, linear),
        **pdl_options(x),
    )
