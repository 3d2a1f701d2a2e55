"""The operations of fused.py that begin a sublayer of a decode step: projections and attention."""

from __future__ import annotations

import triton
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels.asking_kernel import ask_and_attend
from launcher_scripts.kernels.attention_shapes import SHORT_CONTEXT
from launcher_scripts.kernels.dot_products import dot_parts, dot_product, fits
from launcher_scripts.kernels.fused_rows import attention_launch, store_kv
from launcher_scripts.kernels.int8_kernels import dense
from launcher_scripts.kernels.operands import (
    Heads,
    Hidden,
    LayerCache,
    Linear,
    RelativeBias,
    StepRows,
)
from launcher_scripts.kernels.row_products import early, operands_of, row_heads, row_product

HELD_BY_A_PROGRAM = 1 << 16  # numbers of a weight


def project_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    rows: StepRows,
    cache: LayerCache,
) -> Tensor:
    """See reference.project_heads."""
    if x.operand.shape[0] == 1:
        return row_heads(x, linear, heads, rotary, rows, cache)
    qkv = many_rows(x.operand, linear)
    return store_kv(qkv, heads, rows.turns(rotary), rows.starts + rows.positions, cache)


def attend_own(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    rows: StepRows,
    cache: LayerCache,
    longest: int,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
) -> Tensor:
    """See reference.attend_own. One row's projection stores keys and values, several rows' not:
    there the attention does."""
    alone, parts = x.operand.shape[0] == 1, 1
    if alone:
        query = row_heads(x, linear, heads, rotary, rows, cache)
    else:
        query, parts = _few_rows_in_parts(x.operand, linear, "heads")
    return attention_launch(
        query,
        heads,
        cache,
        (rows.starts, rows.lengths, rows.positions),
        longest,
        slopes,
        scale,
        relative,
        fresh=True,
        launch=early(query),
        store=not alone,
        parts=parts,
        rotary=None if alone else rotary,
    )


def attend_source(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rows: StepRows,
    cache: LayerCache,
    longest: int,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
) -> Tensor:
    """See reference.attend_source. A head whose part of the weight is small asks for itself."""
    if _asks_itself(x, linear, heads, longest):
        return _ask_and_attend(x, linear, heads, rows, cache, scale, relative)
    if x.operand.shape[0] == 1:
        query, parts = project_hidden(x, linear), 1
    else:
        query, parts = _few_rows_in_parts(x.operand, linear, "query")
    return attention_launch(
        query,
        heads,
        cache,
        (rows.source_starts, rows.source_lengths, rows.positions),
        longest,
        None,
        scale,
        relative,
        fresh=False,
        launch=early(query),
        parts=parts,
    )


def _asks_itself(x: Hidden, linear: Linear, heads: Heads, longest: int) -> bool:
    """Whether one kernel per head is faster than a projection and an attention."""
    alone = x.operand.shape[0] == 1 and heads.group == 1 and not linear.in_bytes
    held = triton.next_power_of_2(heads.head_size) * triton.next_power_of_2(x.operand.shape[1])
    return alone and held <= HELD_BY_A_PROGRAM and longest <= SHORT_CONTEXT


def _ask_and_attend(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rows: StepRows,
    cache: LayerCache,
    scale: float | None,
    relative: RelativeBias | None,
) -> Tensor:
    operand = x.operand
    size, in_size = heads.head_size, operand.shape[1]
    out = operand.new_empty(1, heads.num_heads * size)
    known = operands_of(operand, x.moments, linear)
    del known["scales"]
    ask_and_attend[(heads.num_heads,)](
        operand,
        weight=linear.weight,
        keys=cache.keys,
        values=cache.values,
        starts=rows.source_starts,
        lengths=rows.source_lengths,
        positions=rows.positions,
        bias=operand if relative is None else relative.table,
        out=out,
        pool_tokens=cache.keys.shape[1],
        scale=size**-0.5 if scale is None else scale,
        reach=0 if relative is None else relative.reach,
        IN=in_size,
        HEADS=heads.num_heads,
        SIZE=size,
        ROWS=triton.next_power_of_2(size),
        BLOCK=max(8, triton.next_power_of_2(in_size)),
        TILE=128,
        RELATIVE=relative is not None,
        num_warps=16,
        num_stages=1,
        **known,
        **early(operand),
    )
    return out


def _few_rows_in_parts(x: Tensor, linear: Linear, kind: str) -> tuple[Tensor, int]:
    """linear(x) for more than one row, its norm aside; and of how many parts it is the sum."""
    if fits(x):
        parts = dot_parts(x, linear, kind)
        return parts, parts.shape[0]
    return many_rows(x, linear), 1


def many_rows(x: Tensor, linear: Linear) -> Tensor:
    """linear(x) as cuBLAS has it, its norm aside."""
    linear = dense(linear)
    return functional.linear(x, linear.weight, linear.bias)


def project_hidden(x: Hidden, linear: Linear) -> Tensor:
    """See reference.project_hidden."""
    if fits(x.operand):
        return dot_product(x.operand, linear, "plain")
    if x.operand.shape[0] > 1:
        return many_rows(x.operand, linear)
    out = x.operand.new_empty(1, linear.weight.shape[0])
    row_product(x.operand, linear, out, "plain", moments=x.moments, launch=early(out))
    return out
