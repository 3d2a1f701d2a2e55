"""The operations of reference.py for CUDA, most of them as one kernel in the Triton language.

A step of one row is bound by reading the weights: there each projection is one kernel that
multiplies, adds and activates (gemv_kernel.py), behind a norm of its own. Steps of more rows leave
the products to cuBLAS, which reads the weights once for all rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import inbox_products, int8_kernels
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.dot_products import (
    add_parts,
    dot_add,
    dot_largest,
    dot_partial,
    dot_product,
    fits,
)
from launcher_scripts.kernels.cuda.embedding import begin_rows
from launcher_scripts.kernels.cuda.fused_products import logits, mlp_up, project, project_add
from launcher_scripts.kernels.cuda.fused_prompts import prompt_attention
from launcher_scripts.kernels.cuda.fused_rows import (
    argmax,
    decode_attention,
    embed,
    norm,
    store_kv,
)
from launcher_scripts.kernels.cuda.fused_spans import attend_spans, gated
from launcher_scripts.kernels.cuda.fused_steps import (
    attend_own,
    attend_source,
    many_rows,
    project_heads,
    project_hidden,
)
from launcher_scripts.kernels.cuda.row_products import (
    early,
    empty_stats,
    fold_norm,
    norm_code,
    row_accumulate,
    row_largest,
    row_product,
    whole_row_parts,
)
from launcher_scripts.kernels.operands import (
    EmbeddingTables,
    Hidden,
    Linear,
    Norm,
    Ranks,
    RowColumns,
    StepRows,
)

__all__ = [
    "argmax",
    "attend_own",
    "attend_source",
    "attend_spans",
    "decode_attention",
    "embed",
    "logits",
    "mlp_up",
    "norm",
    "project",
    "project_add",
    "project_heads",
    "project_hidden",
    "prompt_attention",
    "store_kv",
]

ACTIVATIONS = reference.ACTIVATIONS

dense = int8_kernels.dense
add_residual = reference.add_residual
rotary_table = reference.rotary_table
turned = reference.turned
norm_heads = reference.norm_heads
context_attention = reference.context_attention
source_attention = reference.source_attention
source_attention_weights = reference.source_attention_weights


def prepare(linear: Linear) -> Linear:
    """See reference.prepare. A norm is folded into its projection for steps of one row."""
    return replace(linear, folded=fold_norm(linear))


def begin_step(
    slots: Tensor,
    columns: RowColumns,
    history: Tensor,
    tables: EmbeddingTables,
    norm_of_next: Norm | None,
    *,
    sources: bool = False,
) -> tuple[Hidden, StepRows]:
    """See reference.begin_step."""
    rows, size, dtype = slots.shape[0], tables.tokens.shape[1], tables.tokens.dtype
    exact = torch.empty(rows, size, device=slots.device)
    prescaled = rows == 1 and norm_of_next is not None
    alike = dtype == torch.float32 and not prescaled
    rounded = exact if alike else exact.new_empty(rows, size, dtype=dtype)
    parts = whole_row_parts(size) if prescaled else 0
    row_stats = empty_stats(parts, slots.device) if prescaled else None
    made = torch.empty(5, rows, dtype=torch.int64, device=slots.device)
    starts, positions, lengths, source_starts, source_lengths = made
    launcher(begin_rows, (rows,))(
        slots,
        columns.token,
        columns.start,
        columns.length,
        columns.source_start,
        columns.source_length,
        history,
        tables.tokens,
        tables.tokens if tables.positions is None else tables.positions,
        starts,
        positions,
        lengths,
        source_lengths,
        source_starts,
        exact,
        rounded,
        norm_of_next.weight if prescaled else exact,
        row_stats if prescaled else exact,
        tables.first_id,
        tables.tokens.shape[0],
        columns.padding,
        size,
        norm_of_next.eps if prescaled else 0.0,
        SOURCES=sources,
        POSITIONS=tables.positions is not None,
        ROUNDED=rounded is not exact,
        PRESCALED=norm_code(norm_of_next) if prescaled else 0,
        PARTS=parts,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
    )
    found = StepRows(starts, positions, lengths)
    if sources:
        found = StepRows(starts, positions, lengths, source_starts, source_lengths)
    if rows == 1:
        return Hidden(exact, rounded, row_stats), found
    return hidden(exact, norm_of_next, dtype), found


def hidden(exact: Tensor, norm_of_next: Norm | None, dtype: torch.dtype) -> Hidden:
    """See reference.hidden. One row's projections have their norms folded in."""
    if norm_of_next is None:
        return Hidden(exact, exact.to(dtype))
    if exact.shape[0] == 1:
        return add_parts(exact[None][:0], None, exact, norm_of_next, dtype)
    return Hidden(exact, norm(exact, norm_of_next, dtype))


def expand(x: Hidden, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.expand."""
    kind = "up" if gate is None else "gated"
    if fits(x.operand):
        return dot_product(x.operand, up, kind, gate=gate, activation=activation)
    if x.operand.shape[0] > 1:
        inner = many_rows(x.operand, up)
        if gate is None:
            return ACTIVATIONS[activation](inner)
        return gated(inner, many_rows(x.operand, gate), activation)
    out = x.operand.new_empty(1, up.weight.shape[0])
    row_product(x, up, out, kind, gate=gate, activation=activation, launch=early(out))
    return out


def accumulate(x: Tensor, linear: Linear, onto: Hidden, norm_of_next: Norm | None) -> Hidden:
    """See reference.accumulate."""
    if fits(x):
        return dot_add(x, linear, onto, norm_of_next)
    if x.shape[0] > 1 or not _foreseen(onto, norm_of_next):
        added = many_rows(x, replace(linear, bias=None))
        return add_parts(added[None], linear.bias, onto.exact, norm_of_next, onto.operand.dtype)
    return row_accumulate(x, linear, onto, norm_of_next)


def _foreseen(onto: Hidden, norm_of_next: Norm | None) -> bool:
    """Whether one row's hidden states say how those that come after it are to be prescaled."""
    return norm_of_next is None or onto.row_stats is not None


def choose(x: Hidden, head: Linear, held: int, columns: RowColumns, slots: Tensor) -> Tensor:
    """See reference.choose."""
    return largest(x, head, held, (columns.token, slots))[1]


def accumulate_over_ranks(
    x: Tensor, linear: Linear, onto: Hidden, norm_of_next: Norm | None, ranks: Ranks
) -> Hidden:
    """See reference.accumulate_over_ranks."""
    inboxes = ranks.inboxes
    fits_inboxes = inboxes is not None and inbox_products.fits(x, linear, inboxes)
    if fits_inboxes and _foreseen(onto, norm_of_next):
        inbox_products.send_product(x, linear, inboxes)
        return inbox_products.receive_sum(linear.bias, onto, norm_of_next, inboxes)
    return add_sum(ranks.tp_sum(partial_product(x, linear)), linear.bias, onto, norm_of_next)


def largest_of_ranks(values: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """See reference.largest_of_ranks."""
    inboxes = ranks.inboxes
    if inboxes is not None and values.shape[0] <= inbox_products.most_rows(inboxes):
        return inbox_products.exchange_largest(values, ids, inboxes)
    return reference.largest_of_ranks(values, ids, ranks)


def partial_product(x: Tensor, linear: Linear) -> Tensor:
    """See reference.partial_product."""
    alone = replace(linear, bias=None, norm=None)
    if x.shape[0] == 1:
        out = torch.empty(1, linear.weight.shape[0], device=x.device)
        row_product(Hidden(x, x), alone, out, "add", launch=early(x))
        return out
    return dot_partial(x, alone) if fits(x) else logits(x, alone)


def add_sum(total: Tensor, bias: Tensor | None, onto: Hidden, norm_of_next: Norm | None) -> Hidden:
    """See reference.add_sum."""
    return add_parts(total[None], bias, onto.exact, norm_of_next, onto.operand.dtype)


def largest(
    x: Hidden, head: Linear, held: int, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.largest. keep: a column and the rows' slots, where the places go as well."""
    if x.operand.shape[0] == 1:
        return row_largest(x, head, held, keep)
    if fits(x.operand):
        return dot_largest(x, head, held, keep)
    whole = logits(x.operand, Linear(head.weight, head.bias))[:, :held]
    places = argmax(whole)
    if keep is not None:
        keep[0].index_copy_(0, keep[1], places)
    return whole.gather(1, places[:, None])[:, 0], places
