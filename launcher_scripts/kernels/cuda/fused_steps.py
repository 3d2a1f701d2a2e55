"""The operations of fused.py that begin a sublayer of a decode step: projections and attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels.cuda.dot_products import dot_parts, dot_product, fits
from launcher_scripts.kernels.cuda.fused_rows import attention_launch, norm, store_kv
from launcher_scripts.kernels.cuda.int8_kernels import dense
from launcher_scripts.kernels.cuda.row_products import early, row_heads, row_product
from launcher_scripts.kernels.operands import (
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    RelativeBias,
    StepRows,
)
from launcher_scripts.kernels.reference_rotary import norm_heads


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
    softcap: float | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See reference.attend_own. One row's projection stores keys and values, several rows' not:
    there the attention does, unless norms come between."""
    alone, parts = x.operand.shape[0] == 1, 1
    stored = alone or norms is not None
    if norms is not None:
        qkv = norm_heads(project_hidden(x, linear), heads, norms, norm)
        query = store_kv(qkv, heads, rows.turns(rotary), rows.starts + rows.positions, cache)
    elif alone:
        query = row_heads(x, linear, heads, rotary, rows, cache)
    else:
        query, parts = _few_rows_in_parts(x.operand, linear, "heads")
    return attention_launch(
        query,
        heads,
        cache,
        (*rows.attended, rows.positions),
        longest,
        slopes,
        scale,
        relative,
        fresh=True,
        launch=early(query),
        store=not stored,
        parts=parts,
        rotary=None if stored else rotary,
        softcap=softcap,
        state=x if alone else None,
        norm=linear.norm if alone else None,
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
    """See reference.attend_source."""
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
    row_product(x, linear, out, "plain", launch=early(out))
    return out
