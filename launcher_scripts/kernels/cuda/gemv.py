"""Matrix times vector in the Triton language: what a step of one row consists of.

With USE_PDL (programmatic dependent launch) a kernel starts while the one before it still runs. It
loads its first weights, which no kernel writes, before gdc_wait, and that one's results after it.

A few rows of a weight times a vector: the inside of the gemv kernels.

The weight is read in wide pieces, each once.

A weight in bytes is q * scale of its row. One instruction makes float16 of two e4m3. None makes
numbers of int8 at the speed they are read. But the bits of a small integer are a float32, too,
of that many of its smallest steps of 2^-149; multipliers take those as they are. So the kernel
multiplies the numbers whose bits are q + 128, of which none is negative, with an x made large, and
takes 128 times the sum of x off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options, row_tile
from launcher_scripts.kernels.cuda.elementwise import (
    ACTIVATION_CODES,
    activate,
    activate_gated,
    best_of_parts,
    scales_of,
)
from launcher_scripts.kernels.cuda.lora import add_delta, load_inner, load_up, lora_arguments
from launcher_scripts.kernels.cuda.norm import (
    empty_stats,
    load_expected,
    load_row_stats,
    norm_code,
    norm_terms,
    normalized,
    part_eps,
    parts_of,
    prescale,
)
from launcher_scripts.kernels.cuda.packed import PER_LONG, load_longs, multiply_packed
from launcher_scripts.kernels.operands import Hidden, Linear, Norm

RAISED = tl.constexpr(2.0**80)  # times x: its products with steps of 2^-149 are normal numbers
LOWERED = tl.constexpr(2.0 ** (149 - 80))
ZERO_POINT = tl.constexpr(128)
PER_LOAD = tl.constexpr(8)  # columns a thread holds side by side: 16 bytes of x


@triton.jit
def row_offsets(rows, columns, IN: tl.constexpr):
    """Where columns [1, BLOCK] of the rows are; threads are to hold bytes as they hold x."""
    return tl.max_contiguous(rows[:, None].to(tl.int64) * IN + columns, [1, PER_LOAD])


@triton.jit
def load_tile(
    weight, base, rows, columns, first, OUT: tl.constexpr, IN: tl.constexpr, WHOLE: tl.constexpr
):
    """Columns from `first` on of the rows of a weight; zeros outside. WHOLE: none is outside."""
    if WHOLE:
        tile = tl.load(weight + base + first, eviction_policy="evict_first")
    else:
        mask = (rows < OUT)[:, None] & (first + columns < IN)
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def begin(
    weight,
    scales,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the arguments of `multiply` for a weight: its address and that of its scales, some of
    its rows, and their first tile [ROWS, BLOCK]. EVEN: all rows are of the weight."""
    if weight.dtype.element_ty == tl.uint8:
        tile = load_longs(weight, scales, rows, 0, OUT, IN, BLOCK // PER_LONG)
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        base = row_offsets(rows, columns, IN)
        is_exact: tl.constexpr = EVEN and BLOCK <= IN
        tile = load_tile(weight, base, rows, columns, 0, OUT, IN, is_exact)
    return weight, scales, rows, tile


@triton.jit
def _without_sign(tile, PACKED: tl.constexpr):
    """int8 q as q + 128. With PACKED four at a time, as they were loaded: the compiler does not
    see that by itself."""
    if tile.dtype == tl.int8:
        if PACKED:
            tile = tl.inline_asm_elementwise(
                "xor.b32 $0, $1, 0x80808080;", "=r,r", [tile], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            tile = (tile ^ -ZERO_POINT).to(tl.uint8, bitcast=True)
    return tile


@triton.jit
def _eighths(tile, piece, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products summed eight at a time, as the threads hold them; of int8 without a sign, with the
    numbers whose bits they are."""
    if tile.dtype == tl.uint8:
        values = tile.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        values = tile.to(tl.float32)
    return tl.sum(tl.reshape(values * piece, [ROWS, BLOCK // PER_LOAD, PER_LOAD]), 2)


@triton.jit
def multiply(
    x,
    started,
    other_started,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PAIRED: tl.constexpr,
    ROLLED: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """(W x, W' x) of rows that were begun.

    The scales of a weight in bytes are not applied. W' are more rows of the same or another weight,
    with PAIRED. EVEN: all rows are of the weight.
    """
    if started[0].dtype.element_ty == tl.uint8:
        product, other = multiply_packed(x, started, other_started, OUT, IN, PAIRED, PACKED)
    else:
        product, other = _multiply(x, started, other_started, OUT, IN, PAIRED, ROLLED, EVEN, PACKED)
    return product, other


@triton.jit
def _multiply(
    x,
    started,
    other_started,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PAIRED: tl.constexpr,
    ROLLED: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`multiply` of weights that are no packed ones.

    x has the type of a weight that is not in bytes, so that both are held by the threads in the
    same way: another one costs up to a third. With ROLLED a loop fetches the next tile while it
    multiplies one; without, the compiler sees them all.
    """
    weight, _, rows, tile = started
    other_weight, _, other_rows, other_tile = other_started
    ROWS: tl.constexpr = tile.shape[0]
    BLOCK: tl.constexpr = tile.shape[1]
    columns = tl.arange(0, BLOCK)[None, :]
    base = row_offsets(rows, columns, IN)
    other_base = row_offsets(other_rows, columns, IN)
    is_int8: tl.constexpr = weight.dtype.element_ty == tl.int8
    product = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    other = tl.zeros([ROWS, BLOCK // PER_LOAD], tl.float32)
    zeros = tl.zeros([1, BLOCK // PER_LOAD], tl.float32)
    tile = _without_sign(tile, PACKED)
    other_tile = _without_sign(other_tile, PACKED)
    if ROLLED:
        for first in tl.range(0, IN, BLOCK):
            coming = load_tile(weight, base, rows, columns, first + BLOCK, OUT, IN, False)
            coming = _without_sign(coming, PACKED)
            piece = _piece(x, columns, first, IN, IN % BLOCK == 0)
            if is_int8:
                zeros += _eighths(piece, 1.0, 1, BLOCK)
                piece *= RAISED
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, piece, ROWS, BLOCK)
                after = first + BLOCK
                other_tile = load_tile(
                    other_weight, other_base, other_rows, columns, after, OUT, IN, False
                )
                other_tile = _without_sign(other_tile, PACKED)
            tile = coming
    else:
        for first in tl.static_range(0, IN, BLOCK):
            in_bounds = first + BLOCK <= IN
            if first > 0:
                unmasked = EVEN and in_bounds
                tile = load_tile(weight, base, rows, columns, first, OUT, IN, unmasked)
                tile = _without_sign(tile, PACKED)
                if PAIRED:
                    other_tile = load_tile(
                        other_weight, other_base, other_rows, columns, first, OUT, IN, unmasked
                    )
                    other_tile = _without_sign(other_tile, PACKED)
            piece = _piece(x, columns, first, IN, in_bounds)
            if is_int8:
                zeros += _eighths(piece, 1.0, 1, BLOCK)
                piece *= RAISED
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(other_tile, piece, ROWS, BLOCK)
    if is_int8:
        product = product * LOWERED - zeros * ZERO_POINT
        other = other * LOWERED - zeros * ZERO_POINT
    return tl.sum(product, 1), tl.sum(other, 1)


@triton.jit
def _piece(x, columns, first, IN: tl.constexpr, WHOLE: tl.constexpr):
    """Part of x in float32; zeros behind its end. WHOLE: no column is behind it."""
    if WHOLE:
        piece = tl.load(x + first + columns)
    else:
        piece = tl.load(x + first + columns, mask=first + columns < IN, other=0.0)
    return piece.to(tl.float32)


@triton.jit
def vector(values, rows, OUT: tl.constexpr, PRESENT: tl.constexpr):
    """One float32 per row of the weight; zeros where there is no such vector."""
    result = tl.zeros(rows.shape, tl.float32)
    if PRESENT:
        result = tl.load(values + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    return result


@triton.jit(do_not_specialize_on_alignment=["adapters"])
def gemv(
    x,
    row_stats,
    weight,
    gate_weight,
    scales,
    gate_scales,
    offsets,
    gate_offsets,
    sums,
    gate_sums,
    residual,
    residual_stats,
    gain,
    lora_up,
    lora_inner,
    adapters,
    out,
    rounded,
    new_row_stats,
    part_eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRESCALED: tl.constexpr,
    LORA: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + act(W norm(x) + b) * (W2 norm(x) + b2), the parts as the flags say.

    Where there is a norm, x is the operand that norm.py describes. LORA: what lora_arguments says
    of the LoRA of both products. ROUNDED: the result goes to `rounded` as well, in its type; with
    PRESCALED, the code of a norm behind, as the operand for that norm, whose gain is `gain`, and
    its statistics to `new_row_stats`; residual_stats say what to expect; part_eps is for that norm.
    """
    if USE_PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    even: tl.constexpr = OUT % ROWS == 0
    started = begin(weight, scales, rows, OUT, IN, even, BLOCK)
    gate_started = started
    if GATED:
        gate_started = begin(gate_weight, gate_scales, rows, OUT, IN, even, BLOCK)
    row_scale = scales_of(scales, weight, rows, OUT)
    gate_scale = scales_of(gate_scales, gate_weight, rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    gate_offset = vector(gate_offsets, rows, OUT, OFFSET and GATED)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    gate_row_sums = vector(gate_sums, rows, OUT, NORM == 1 and GATED)
    next_gain = vector(gain, rows, OUT, PRESCALED > 0)
    up, gate_up = load_up(lora_up, adapters, rows, OUT + rows, rows < OUT, LORA, GATED)
    if USE_PDL:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    added = vector(residual, rows, OUT, RESIDUAL)
    next_shift, next_unit = load_expected(residual_stats, PRESCALED)
    inner, gate_inner = load_inner(lora_inner, rows, OUT + rows, rows < OUT, LORA, GATED)
    value, gate = multiply(x, started, gate_started, OUT, IN, GATED, ROLLED, even, USE_PDL)
    mean, scale = norm_terms(total, squares, IN, NORM)
    value = normalized(value * row_scale, row_sums, mean, scale, NORM) + offset
    value = add_delta(value, up, inner, LORA)
    if GATED:
        gate = normalized(gate * gate_scale, gate_row_sums, mean, scale, NORM)
        gate = add_delta(gate, gate_up, gate_inner, LORA)
        value = activate_gated(value, gate + gate_offset, ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    value = value + added
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=rows < OUT)
    if ROUNDED:
        if PRESCALED > 0:
            value = prescale(
                value, rows < OUT, next_gain, next_shift, next_unit, new_row_stats, part_eps
            )
        tl.store(rounded + rows, value.to(rounded.dtype.element_ty), mask=rows < OUT)


@triton.jit
def gemv_largest(
    x,
    row_stats,
    weight,
    scales,
    offsets,
    sums,
    largest,
    places,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of ROWS values of W norm(x) + b, and where it is: the first of equal ones."""
    if USE_PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    even: tl.constexpr = OUT % ROWS == 0
    started = begin(weight, scales, rows, OUT, IN, even, BLOCK)
    row_scale = scales_of(scales, weight, rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    if USE_PDL:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    value, _ = multiply(x, started, started, OUT, IN, False, ROLLED, even, USE_PDL)
    mean, scale = norm_terms(total, squares, IN, NORM)
    value = normalized(value * row_scale, row_sums, mean, scale, NORM) + offset
    value = tl.where(rows < OUT, value, -float("inf"))
    top, index = tl.max(value, 0, return_indices=True)
    tl.store(largest + tl.program_id(0), top)
    tl.store(places + tl.program_id(0), tl.program_id(0) * ROWS + index)


def _offsets(linear: Linear) -> Tensor | None:
    """Return the addend of the linear's product, its norm's part included."""
    return linear.bias if linear.folded is None else linear.folded.offsets


def linear_arguments(hidden: Hidden, linear: Linear) -> dict[str, object]:
    """Arguments of a kernel about scales, norm and bias; x stands for what there is not."""
    x, folded, offsets = hidden.operand, linear.folded, _offsets(linear)
    sums = None if folded is None else folded.sums
    parts = 1 if folded is None else parts_of(hidden.row_stats)
    return {
        "scales": x if linear.scale is None else linear.scale,
        "row_stats": x if folded is None else hidden.row_stats,
        "offsets": x if offsets is None else offsets,
        "sums": x if sums is None else sums,
        "NORM": 0 if folded is None else norm_code(linear.norm),
        "PARTS": parts,
        "SPREAD": triton.next_power_of_2(parts),
        "OFFSET": offsets is not None,
    }


def row_product(
    x: Hidden,
    linear: Linear,
    out: Tensor,
    kind: str,
    *,
    gate: Linear | None = None,
    activation: str | None = None,
    residual: Hidden | None = None,
    rounded: Tensor | None = None,
    norm_of_next: Norm | None = None,
    launch: dict[str, bool],
) -> Tensor | None:
    """x [1, in] through a projection to out [1, out]; see gemv.

    residual: what the result is added to, with row_stats where there is a norm_of_next
    norm_of_next: the result goes to `rounded` for a projection behind that norm; returns the
        result's row_stats
    """
    operand = x.operand
    out_size, in_size = linear.weight.shape[0], linear.in_size
    tile = row_tile(kind, out_size, in_size, linear.quantization)
    programs = triton.cdiv(out_size, tile.rows)
    stats = None if norm_of_next is None else empty_stats(programs, out.device)
    other = linear if gate is None else gate
    gate_offsets, gate_folded = _offsets(other), other.folded
    gate_sums = None if gate_folded is None else gate_folded.sums
    launcher(gemv, (programs,))(
        operand,
        weight=linear.weight,
        gate_weight=other.weight,
        gate_scales=operand if other.scale is None else other.scale,
        gate_offsets=operand if gate_offsets is None else gate_offsets,
        gate_sums=operand if gate_sums is None else gate_sums,
        residual=operand if residual is None else residual.exact,
        residual_stats=operand if residual is None or stats is None else residual.row_stats,
        gain=operand if norm_of_next is None else norm_of_next.weight,
        out=out,
        rounded=operand if rounded is None else rounded,
        new_row_stats=operand if stats is None else stats,
        part_eps=part_eps(norm_of_next, out_size, programs),
        OUT=out_size,
        IN=in_size,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        RESIDUAL=residual is not None,
        ROUNDED=rounded is not None,
        PRESCALED=norm_code(norm_of_next),
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **linear_arguments(x, linear),
        **lora_arguments(operand, linear, x.row_stats),
        **launch,
    )
    return stats


def row_accumulate(
    x: Tensor, linear: Linear, residual: Hidden, norm_of_next: Norm | None
) -> Hidden:
    """reference.accumulate for one row."""
    exact = torch.empty_like(residual.exact)
    alike = x.dtype == torch.float32 and norm_of_next is None
    operand = exact if alike else torch.empty_like(residual.operand)
    row_stats = row_product(
        Hidden(x, x),
        linear,
        exact,
        "add",
        residual=residual,
        rounded=None if alike else operand,
        norm_of_next=norm_of_next,
        launch=pdl_options(x),
    )
    return Hidden(exact, operand, row_stats)


def row_largest(
    x: Hidden,
    head: Linear,
    held: int,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.largest for one row."""
    operand = x.operand
    in_size = head.in_size
    tile = row_tile("largest", head.weight.shape[0], in_size, head.quantization)
    parts = triton.cdiv(held, tile.rows)
    maxima = torch.empty(parts, device=operand.device)
    indices = torch.empty(parts, dtype=torch.int32, device=operand.device)
    launcher(gemv_largest, (parts,))(
        operand,
        weight=head.weight,
        largest=maxima,
        places=indices,
        OUT=held,
        IN=in_size,
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **linear_arguments(x, head),
        **pdl_options(operand),
    )
    return best_of_parts(maxima[None], indices[None], keep)
