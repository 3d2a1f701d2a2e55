"""Products of a weight with a few rows: how operands become launches of dot.py."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import traits_of
from launcher_scripts.kernels.cuda.dot import add_and_normalize, dot_rows
from launcher_scripts.kernels.cuda.int8 import split_rows
from launcher_scripts.kernels.cuda.row_products import (
    ACTIVATION_CODES,
    best_of_parts,
    early,
    empty_stats,
    norm_code,
    whole_row_parts,
)
from launcher_scripts.kernels.cuda.tiles import DotTile, dot_tile
from launcher_scripts.kernels.operands import Hidden, Linear, Norm

MOST_ROWS = 64
SMALLEST_BATCH = 16  # the narrow side of a matrix product


def fits(x: Tensor) -> bool:
    """Whether x [N, in] goes through here: more rows and float32 are for cuBLAS."""
    return 1 < x.shape[0] <= MOST_ROWS and x.dtype != torch.float32


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
    tile = dot_tile(kind, *linear.weight.shape, linear.in_bytes)._replace(splits=1)
    _launch(x, linear, tile, linear.weight.shape[0], out=out, gate=gate, activation=activation)
    return out


def dot_parts(x: Tensor, linear: Linear, kind: str) -> Tensor:
    """linear(x), perhaps in parts that whoever reads it sums: [P, N, out]; norms are not looked at.

    One part has the type of x, several have float32.
    """
    out_size, in_size = linear.weight.shape
    tile = dot_tile(kind, out_size, in_size, linear.in_bytes)
    dtype = x.dtype if tile.splits == 1 else torch.float32
    parts = x.new_empty(tile.splits, x.shape[0], out_size, dtype=dtype)
    _launch(x, linear, tile, out_size, out=parts)
    return parts


def dot_add(x: Tensor, linear: Linear, onto: Hidden, norm_of_next: Norm) -> Hidden:
    """reference.accumulate for a few rows: parts of the product, then their sum and its norm."""
    dtype = onto.operand.dtype
    return add_parts(_parts(x, linear), linear.bias, onto.exact, norm_of_next, dtype)


def dot_partial(x: Tensor, linear: Linear) -> Tensor:
    """reference.partial_product for a few rows."""
    return _parts(x, linear).sum(0)


def _parts(x: Tensor, linear: Linear) -> Tensor:
    """linear(x) without its bias, in parts to be summed: float32 [P, N, out]."""
    out_size, in_size = linear.weight.shape
    tile = dot_tile("add", out_size, in_size, linear.in_bytes)
    parts = torch.empty(tile.splits, x.shape[0], out_size, device=x.device)
    _launch(x, replace(linear, bias=None), tile, out_size, out=parts)
    return parts


def add_parts(
    parts: Tensor,
    bias: Tensor | None,
    onto: Tensor,
    norm_of_next: Norm | None,
    dtype: torch.dtype,
) -> Hidden:
    """onto [N, hidden] plus the sum of parts [P, N, hidden] and a bias, as a projection behind the
    norm wants it in its type: normalized, but one row without the norm's bias."""
    count, size = onto.shape
    exact, operand = torch.empty_like(onto), torch.empty_like(onto, dtype=dtype)
    code = norm_code(norm_of_next)
    prescaled = code > 0 and count == 1
    stats_parts = whole_row_parts(size) if prescaled else 0
    row_stats = empty_stats(stats_parts, onto.device) if prescaled else None
    gain = onto if norm_of_next is None else norm_of_next.weight
    shift = None if norm_of_next is None else norm_of_next.bias
    block = triton.next_power_of_2(size)
    launcher(add_and_normalize, (count,))(
        parts,
        onto if bias is None else bias,
        onto,
        gain,
        gain if shift is None else shift,
        exact,
        operand,
        onto if row_stats is None else row_stats,
        count,
        size,
        0.0 if norm_of_next is None else norm_of_next.eps,
        PARTS=parts.shape[0],
        OFFSET=bias is not None,
        NORM=code,
        STATS_PARTS=stats_parts,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **early(onto),
    )
    return Hidden(exact, operand, row_stats)


def dot_largest(
    x: Hidden, head: Linear, held: int, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """reference.largest for a few rows."""
    tile = dot_tile("largest", *head.weight.shape, head.in_bytes)._replace(splits=1)
    count, parts = x.operand.shape[0], triton.cdiv(held, tile.rows)
    found = torch.empty(count, parts, device=x.operand.device)
    places = torch.empty(count, parts, dtype=torch.int32, device=x.operand.device)
    _launch(x.operand, head, tile, held, largest=(found, places))
    return best_of_parts(found, places, keep)


def split_digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, in] as an int8 weight is multiplied with: digits int8 [2, N, in], steps [N]."""
    count, size = x.shape
    digits = torch.empty(2, count, size, dtype=torch.int8, device=x.device)
    steps = torch.empty(count, device=x.device)
    block = triton.next_power_of_2(size)
    warps = max(1, min(32, block // 512))
    launcher(split_rows, (count,))(x, digits, steps, size, BLOCK=block, num_warps=warps, **early(x))
    return digits, steps


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
    given, steps = split_digits(x) if linear.in_bytes else (x, x)
    gate_bias = None if gate is None else gate.bias
    batch = max(SMALLEST_BATCH, triton.next_power_of_2(x.shape[0]))
    tile = tile.fitting(batch, linear.in_bytes, traits_of(x.device).shared_bytes)
    own = tile.rows if gate is None else tile.rows // 2
    launcher(dot_rows, (triton.cdiv(out_size, own), tile.splits))(
        given,
        steps,
        linear.weight,
        linear.weight if gate is None else gate.weight,
        x if linear.scale is None else linear.scale,
        x if gate is None or gate.scale is None else gate.scale,
        x if linear.bias is None else linear.bias,
        x if gate_bias is None else gate_bias,
        x if out is None else out,
        found,
        places,
        x.shape[0],
        OUT=out_size,
        IN=linear.weight.shape[1],
        OFFSET=linear.bias is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        LARGEST=largest is not None,
        SPLITS=tile.splits,
        AHEAD=tile.ahead,
        ROWS=tile.rows,
        BLOCK=tile.block,
        BATCH=batch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early(x),
    )
