"""Products of a weight with one row: how operands become launches of gemv.py."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import traits_of
from launcher_scripts.kernels.cuda.embedding import pick_largest
from launcher_scripts.kernels.cuda.gemv import gemv, gemv_largest
from launcher_scripts.kernels.cuda.gemv_heads import gemv_heads
from launcher_scripts.kernels.cuda.tiles import row_tile
from launcher_scripts.kernels.operands import (
    FoldedNorm,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    StepRows,
)
from launcher_scripts.kernels.quantization import dequantized

NORM_CODES = {"layernorm": 1, "rmsnorm": 2}
ACTIVATION_CODES = {None: 0, "gelu": 1, "gelu_erf": 2, "relu": 3, "silu": 4, "squared_relu": 5}
FOLDED_AT_ONCE = 1 << 26
WHOLE_ROW_PARTS = 64


def early(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one before it has ended."""
    return (
        {"EARLY": True, "launch_pdl": True}
        if traits_of(tensor.device).overlaps
        else {"EARLY": False}
    )


def norm_code(norm: Norm | None) -> int:
    """What kernels know a norm by; 0 is none."""
    return 0 if norm is None else NORM_CODES[norm.kind]


def empty_stats(parts: int, device: torch.device) -> Tensor:
    """Statistics of a row made in so many parts; see norm.py."""
    return torch.empty(4 + 2 * parts, device=device)


def whole_row_parts(size: int) -> int:
    """In how many parts a kernel that has a whole row [size] leaves its statistics."""
    return min(WHOLE_ROW_PARTS, triton.next_power_of_2(size))


def parts_of(row_stats: Tensor) -> int:
    """In how many parts the row with these statistics was made."""
    return row_stats.numel() // 2 - 2


def part_eps(norm: Norm | None, size: int, parts: int) -> float:
    """A norm's eps for all values of one of the parts of a row [size]."""
    return 0.0 if norm is None else norm.eps * size / parts


def fold_norm(linear: Linear) -> FoldedNorm | None:
    """What the linear's kernels need of its norm beside the row's statistics."""
    norm = linear.norm
    if norm is None:
        return None
    sums, offsets = None, None
    if norm.kind == "layernorm":
        sums = _times(linear, norm.weight.float())
    if norm.bias is not None:
        offsets = _times(linear, norm.bias.float())
    if linear.bias is not None:
        offsets = linear.bias.float() + (0 if offsets is None else offsets)
    return FoldedNorm(sums, offsets)


def _times(linear: Linear, vector: Tensor) -> Tensor:
    """Its weight @ vector in float32, a few rows at a time: a copy of all would be large."""
    rows = max(1, FOLDED_AT_ONCE // linear.weight.shape[1])
    parts = linear.weight.split(rows)
    scales = [None] * len(parts) if linear.scale is None else linear.scale.split(rows)
    return torch.cat([dequantized(*part) @ vector for part in zip(parts, scales, strict=True)])


def _offsets(linear: Linear) -> Tensor | None:
    """What the linear adds to its product, its norm's part included."""
    return linear.bias if linear.folded is None else linear.folded.offsets


def _operands(hidden: Hidden, linear: Linear) -> dict[str, object]:
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
    onto: Hidden | None = None,
    rounded: Tensor | None = None,
    norm_of_next: Norm | None = None,
    launch: dict[str, bool],
) -> Tensor | None:
    """x [1, in] through a projection to out [1, out]; see gemv.

    onto: what the result is added to, with row_stats where there is a norm_of_next
    norm_of_next: the result goes to `rounded` for a projection behind that norm; returns the
        result's row_stats
    """
    operand = x.operand
    out_size, in_size = linear.weight.shape
    tile = row_tile(kind, out_size, in_size, linear.in_bytes)
    programs = triton.cdiv(out_size, tile.rows)
    found = None if norm_of_next is None else empty_stats(programs, out.device)
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
        residual=operand if onto is None else onto.exact,
        residual_stats=operand if found is None else onto.row_stats,
        gain=operand if norm_of_next is None else norm_of_next.weight,
        out=out,
        rounded=operand if rounded is None else rounded,
        new_row_stats=operand if found is None else found,
        part_eps=part_eps(norm_of_next, out_size, programs),
        OUT=out_size,
        IN=in_size,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        RESIDUAL=onto is not None,
        ROUNDED=rounded is not None,
        PRESCALED=norm_code(norm_of_next),
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **_operands(x, linear),
        **launch,
    )
    return found


def row_accumulate(x: Tensor, linear: Linear, onto: Hidden, norm_of_next: Norm | None) -> Hidden:
    """reference.accumulate for one row."""
    exact = torch.empty_like(onto.exact)
    alike = x.dtype == torch.float32 and norm_of_next is None
    operand = exact if alike else torch.empty_like(onto.operand)
    row_stats = row_product(
        Hidden(x, x),
        linear,
        exact,
        "add",
        onto=onto,
        rounded=None if alike else operand,
        norm_of_next=norm_of_next,
        launch=early(x),
    )
    return Hidden(exact, operand, row_stats)


def row_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    rows: StepRows,
    cache: LayerCache,
) -> Tensor:
    """reference.project_heads for one row."""
    operand = x.operand
    out_size, in_size = linear.weight.shape
    tile = row_tile("heads", out_size, in_size, linear.in_bytes)
    query = operand.new_empty(1, heads.num_heads, heads.head_size)
    cosines, sines = (operand, operand) if rotary is None else rotary
    launcher(gemv_heads, (triton.cdiv(out_size // 2, tile.rows),))(
        operand,
        weight=linear.weight,
        query=query,
        keys=cache.keys,
        values=cache.values,
        starts=rows.starts,
        positions=rows.positions,
        cosines=cosines,
        sines=sines,
        pool_tokens=cache.keys.shape[1],
        IN=in_size,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **_operands(x, linear),
        **early(operand),
    )
    return query


def row_largest(
    x: Hidden,
    head: Linear,
    held: int,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.largest for one row."""
    operand = x.operand
    in_size = head.weight.shape[1]
    tile = row_tile("largest", head.weight.shape[0], in_size, head.in_bytes)
    parts = triton.cdiv(held, tile.rows)
    found = torch.empty(parts, device=operand.device)
    places = torch.empty(parts, dtype=torch.int32, device=operand.device)
    launcher(gemv_largest, (parts,))(
        operand,
        weight=head.weight,
        largest=found,
        places=places,
        OUT=held,
        IN=in_size,
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **_operands(x, head),
        **early(operand),
    )
    return best_of_parts(found[None], places[None], keep)


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
        **early(found),
    )
    return values, tokens
