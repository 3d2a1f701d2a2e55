"""A weight times a few rows on the matrix units, in the Triton language: steps of several rows.

The weight's rows are the tall side of each product, the rows of x the narrow one, so that a weight
is read once however few rows there are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.activation import ACTIVATION_CODES, activate, activate_gated
from launcher_scripts.kernels.cuda.argmax import best_of_parts
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options, traits_of
from launcher_scripts.kernels.cuda.gemv_tile import scales_of
from launcher_scripts.kernels.cuda.hi_lo import dot_hi_lo, load_piece, split_hi_lo, splits
from launcher_scripts.kernels.cuda.lora import add_deltas, lora_arguments, prefetch_up
from launcher_scripts.kernels.cuda.prefetch import BYTES, prefetch
from launcher_scripts.kernels.cuda.tiles import DotTile, dot_tile
from launcher_scripts.kernels.operands import Hidden, Linear

MAX_ROWS = 64
MIN_BATCH = 16  # the narrow side of a matrix product


@triton.jit
def _prefetch_pieces(starts, first, last, PREFETCH: tl.constexpr, BLOCK: tl.constexpr):
    """Prefetch the first PREFETCH pieces of a weight's rows."""
    line: tl.constexpr = BYTES * 8 // starts.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, BLOCK // line) * line
    for piece in tl.static_range(PREFETCH):
        columns = tl.minimum(first + piece * BLOCK + lines, last - 1)
        prefetch(starts + columns[None, :])


@triton.jit
def add_pieces(
    inputs,
    given,
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
    places = inputs + columns[:, None]
    for column in tl.range(first, last, BLOCK):
        tile = load_piece(weights + column, held & (column + columns < IN)[None, :], EVEN)
        piece = tl.load(places + column, mask=given & (column + columns < IN)[:, None], other=0.0)
        if tile.dtype != piece.dtype:
            tile = tile.to(tl.float32).to(piece.dtype)  # twice as fast as at once
        product = tl.dot(tile, piece, product, input_precision="ieee")
    return product


@triton.jit
def halves(product, ROWS: tl.constexpr, BATCH: tl.constexpr):
    """The first and the second half of the rows."""
    return tl.split(tl.permute(tl.reshape(product, [2, ROWS // 2, BATCH]), [1, 2, 0]))


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
    own: tl.constexpr = ROWS // 2 if GATED else ROWS
    row = part * own
    rows = row + tl.arange(0, own)
    batch = tl.arange(0, BATCH)
    share: tl.constexpr = ((IN + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
    first = split * share
    last = tl.minimum(first + share, IN)
    lines = tl.arange(0, ROWS)[:, None]
    held = row + lines % own < OUT
    place = tl.minimum(row + lines % own, OUT - 1).to(tl.int64) * IN
    starts = weight + place
    if GATED:
        starts = tl.where(lines < own, starts, gate_weight + place)
    if USE_PDL:
        gdc_launch_dependents()
        _prefetch_pieces(starts, first, last, PREFETCH, BLOCK)
        prefetch_up(lora_up, adapters, row, split, count, OUT, GATED, LORA, SPLITS, own)
        gdc_wait()
    even: tl.constexpr = OUT % own == 0 and IN % BLOCK == 0
    if x.dtype.element_ty.primitive_bitwidth == 8:
        value = dot_hi_lo(x, steps, starts, held, first, last, count, IN, even, ROWS, BLOCK, BATCH)
    else:
        inputs, given = x + batch[None, :] * IN, (batch < count)[None, :]
        value = add_pieces(inputs, given, starts, held, first, last, IN, even, ROWS, BLOCK, BATCH)
    if GATED:
        value, gate = halves(value, ROWS, BATCH)
    value *= scales_of(scales, weight, rows, OUT)[:, None]
    if OFFSET:
        offset = tl.load(offsets + rows, mask=(rows < OUT) & (split == 0), other=0.0)
        value += offset.to(tl.float32)[:, None]
    value = add_deltas(
        value, lora_up, lora_inner, adapters, row, split, count, LORA, SPLITS, own, BATCH
    )
    if GATED:
        gate *= scales_of(gate_scales, gate_weight, rows, OUT)[:, None]
        if OFFSET:
            gate += tl.load(gate_offsets + rows, mask=rows < OUT, other=0.0)[:, None]
        gate = add_deltas(
            gate, lora_up, lora_inner, adapters, OUT + row, split, count, LORA, SPLITS, own, BATCH
        )
        value = activate_gated(value, gate, ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    if LARGEST:
        value = tl.where((rows < OUT)[:, None], value, -float("inf"))
        top, at = tl.max(value, 0, return_indices=True)
        target = batch * tl.num_programs(0) + part
        tl.store(largest + target, top, mask=batch < count)
        tl.store(places + target, row + at, mask=batch < count)
    else:
        target = out + (split * count + batch[None, :]) * OUT + rows[:, None]
        mask = (rows < OUT)[:, None] & (batch < count)[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def fits(x: Tensor) -> bool:
    """Whether x [N, in] goes through here: more rows and float32 are for cuBLAS."""
    return 1 < x.shape[0] <= MAX_ROWS and x.dtype != torch.float32


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
    tile = dot_tile(kind, *linear.weight.shape, linear.quantization)._replace(splits=1)
    _launch(x, linear, tile, linear.weight.shape[0], out=out, gate=gate, activation=activation)
    return out


def dot_parts(x: Tensor, linear: Linear, kind: str) -> Tensor:
    """linear(x), perhaps in parts that whoever reads it sums: [P, N, out]; norms are not looked at.

    One part has the type of x, several have float32.
    """
    out_size, in_size = linear.weight.shape
    tile = dot_tile(kind, out_size, in_size, linear.quantization)
    dtype = x.dtype if tile.splits == 1 else torch.float32
    parts = x.new_empty(tile.splits, x.shape[0], out_size, dtype=dtype)
    _launch(x, linear, tile, out_size, out=parts)
    return parts


def dot_summands(x: Tensor, linear: Linear, kind: str = "add") -> Tensor:
    """linear(x) without its bias, in parts to be summed: float32 [P, N, out]."""
    out_size, in_size = linear.weight.shape
    tile = dot_tile(kind, out_size, in_size, linear.quantization)
    parts = torch.empty(tile.splits, x.shape[0], out_size, device=x.device)
    _launch(x, replace(linear, bias=None), tile, out_size, out=parts)
    return parts


def dot_largest(
    x: Hidden, head: Linear, held: int, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """reference.largest for a few rows."""
    tile = dot_tile("largest", *head.weight.shape, head.quantization)._replace(splits=1)
    count, parts = x.operand.shape[0], triton.cdiv(held, tile.rows)
    found = torch.empty(count, parts, device=x.operand.device)
    places = torch.empty(count, parts, dtype=torch.int32, device=x.operand.device)
    _launch(x.operand, head, tile, held, largest=(found, places))
    return best_of_parts(found, places, keep)


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
    found, places = (x, x) if largest is None else largest
    split = splits(x, linear.quantization)
    given, steps = split_hi_lo(x, linear.weight.dtype) if split else (x, x)
    gate_bias = None if gate is None else gate.bias
    batch = max(MIN_BATCH, triton.next_power_of_2(x.shape[0]))
    tile = tile.fitting(batch, linear.weight.element_size(), traits_of(x.device).shared_bytes)
    own = tile.rows if gate is None else tile.rows // 2
    launcher(dot_rows, (triton.cdiv(out_size, own), tile.splits))(
        given,
        steps=steps,
        weight=linear.weight,
        gate_weight=linear.weight if gate is None else gate.weight,
        scales=x if linear.scale is None else linear.scale,
        gate_scales=x if gate is None or gate.scale is None else gate.scale,
        offsets=x if linear.bias is None else linear.bias,
        gate_offsets=x if gate_bias is None else gate_bias,
        out=x if out is None else out,
        largest=found,
        places=places,
        count=x.shape[0],
        OUT=out_size,
        IN=linear.weight.shape[1],
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
