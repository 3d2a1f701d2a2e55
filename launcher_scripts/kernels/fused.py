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
from torch.nn import functional

from launcher_scripts.kernels import int8_kernels, reference
from launcher_scripts.kernels.attention_kernels import attend, attention_shape
from launcher_scripts.kernels.operands import (
    EmbeddingTables,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    RelativeBias,
    RowColumns,
    StepRows,
)
from launcher_scripts.kernels.row_kernels import (
    block_argmax,
    look_up,
    normalize,
    rotate_and_store,
)
from launcher_scripts.kernels.row_products import (
    NORM_CODES,
    best_of_parts,
    early,
    fold_norm,
    row_heads,
    row_largest,
    row_product,
)
from launcher_scripts.kernels.step_kernels import begin_rows

ACTIVATIONS = reference.ACTIVATIONS
ARGMAX_BLOCK = 1024
ALONE = {"EARLY": False}

dense = int8_kernels.dense
add_residual = reference.add_residual
rotary_table = reference.rotary_table
context_attention = reference.context_attention
source_attention = reference.source_attention
source_attention_weights = reference.source_attention_weights


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """See reference.embed."""
    size = table.shape[1]
    out = torch.empty(ids.shape[0], size, device=table.device)
    look_up[(ids.shape[0],)](
        ids, table, out, first_id, table.shape[0], size, BLOCK=triton.next_power_of_2(size)
    )
    return out


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """See reference.norm."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    normalize[(rows,)](
        x,
        weights.weight,
        weights.weight if weights.bias is None else weights.bias,
        out,
        size,
        weights.eps,
        KIND=NORM_CODES[weights.kind],
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return out


def project(x: Tensor, linear: Linear) -> Tensor:
    """See reference.project."""
    linear = dense(linear)
    if x.shape[0] == 1:
        return _row(x, linear, linear.weight.dtype, "plain")
    return functional.linear(_normalized(x, linear), linear.weight, linear.bias)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """See reference.project_add."""
    linear = dense(linear)
    if x.shape[0] == 1:
        return _row(x, linear, torch.float32, "add", residual=residual)
    return residual + functional.linear(x, linear.weight, linear.bias)


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.mlp_up."""
    up, gate = dense(up), gate and dense(gate)
    if x.shape[0] == 1:
        kind = "up" if gate is None else "gated"
        without = None if gate is None else Linear(gate.weight, gate.bias)
        return _row(x, up, up.weight.dtype, kind, gate=without, activation=activation)
    normalized = _normalized(x, up)
    hidden = ACTIVATIONS[activation](functional.linear(normalized, up.weight, up.bias))
    if gate is None:
        return hidden
    return hidden * functional.linear(normalized, gate.weight, gate.bias)


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """See reference.store_kv."""
    tokens = qkv.shape[0]
    query = torch.empty(
        tokens, heads.num_heads, heads.head_size, dtype=qkv.dtype, device=qkv.device
    )
    cosines, sines = (qkv, qkv) if rotary is None else rotary
    rotate_and_store[(tokens, heads.num_heads + 2 * heads.num_kv_heads)](
        qkv,
        query,
        cache.keys,
        cache.values,
        slots,
        cosines,
        sines,
        cache.keys.shape[1],
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        BLOCK=triton.next_power_of_2(heads.head_size),
        num_warps=1,
    )
    return query


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
    positions: Tensor | None = None,
    fresh: bool | None = None,
) -> Tensor:
    """See reference.decode_attention. Long contexts are split over programs and merged."""
    rows, num_heads, size = query.shape
    splits, tile, warps = attention_shape(longest)
    out = query.new_empty(rows, num_heads * size)
    # [rows, heads, splits]: unnormalized outputs, then largest score and sum of weights
    partial = torch.empty(rows, num_heads, splits, size, device=query.device)
    weights = torch.empty(rows, num_heads, splits, 2, device=query.device)
    arrivals = cache.arrivals
    if arrivals is None:
        arrivals = torch.zeros(rows * num_heads, dtype=torch.int32, device=query.device)
    attend[(rows, num_heads, splits)](
        query,
        cache.keys,
        cache.values,
        starts,
        lengths,
        query if slopes is None else slopes,
        lengths if positions is None else positions,
        query if relative is None else relative.table,
        out,
        partial,
        weights,
        arrivals,
        cache.keys.shape[1],
        size**-0.5 if scale is None else scale,
        0 if relative is None else relative.reach,
        HEADS=num_heads,
        GROUP=num_heads // cache.keys.shape[0],
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SPLITS=splits,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        ALIBI=slopes is not None,
        RELATIVE=relative is not None,
        FRESH=bool(fresh),
        TILE=tile,
        num_warps=warps,
        **(ALONE if fresh is None else early(query)),
    )
    return out


def logits(x: Tensor, head: Linear) -> Tensor:
    """See reference.logits."""
    if x.shape[0] == 1:
        return _row(x, head, torch.float32, "plain")
    normalized = _normalized(x, head)
    if normalized.dtype == torch.float32 or not x.is_cuda:
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(normalized.float(), head.weight.float(), bias)
    out = torch.mm(normalized, head.weight.t(), out_dtype=torch.float32)
    return out if head.bias is None else out + head.bias


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax. Two kernels: of blocks, then of the blocks' results."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    values = torch.empty(rows, blocks, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    block_argmax[(rows, blocks)](
        logits, values, places, logits.stride(0), size, BLOCK=ARGMAX_BLOCK, num_warps=4
    )
    return best_of_parts(values, places)[1]


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.weight.dtype)
    return norm(x, linear.norm, linear.weight.dtype)


def _row(x: Tensor, linear: Linear, dtype: torch.dtype, kind: str, **more: object) -> Tensor:
    """One row through a projection behind a norm of its own: [1, out] of `dtype`."""
    out = torch.empty(1, linear.weight.shape[0], dtype=dtype, device=x.device)
    alone = Linear(linear.weight, linear.bias)
    row_product(_normalized(x, linear), alone, out, kind, launch=ALONE, **more)
    return out


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
    rounded = exact if dtype == torch.float32 else exact.new_empty(rows, size, dtype=dtype)
    made = torch.empty(5, rows, dtype=torch.int64, device=slots.device)
    starts, positions, lengths, source_starts, source_lengths = made
    begin_rows[(rows,)](
        slots,
        columns.token,
        columns.start,
        columns.length,
        columns.source,
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
        tables.first_id,
        tables.tokens.shape[0],
        columns.padding,
        size,
        SOURCES=sources,
        POSITIONS=tables.positions is not None,
        ROUNDED=rounded is not exact,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
    )
    found = StepRows(starts, positions, lengths)
    if sources:
        found = StepRows(starts, positions, lengths, source_starts, source_lengths)
    if rows == 1:
        return Hidden(exact, rounded), found
    return hidden(exact, norm_of_next, dtype), found


def hidden(exact: Tensor, norm_of_next: Norm | None, dtype: torch.dtype) -> Hidden:
    """See reference.hidden. One row is rounded only: its projections have their norms folded in."""
    if exact.shape[0] == 1 or norm_of_next is None:
        return Hidden(exact, exact.to(dtype))
    return Hidden(exact, norm(exact, norm_of_next, dtype))


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
    if rotary is not None:
        rotary = (rotary[0][rows.positions], rotary[1][rows.positions])
    qkv = functional.linear(x.operand, linear.weight, linear.bias)
    return store_kv(qkv, heads, rotary, rows.starts + rows.positions, cache)


def project_hidden(x: Hidden, linear: Linear) -> Tensor:
    """See reference.project_hidden."""
    if x.operand.shape[0] > 1:
        return functional.linear(x.operand, linear.weight, linear.bias)
    out = x.operand.new_empty(1, linear.weight.shape[0])
    row_product(x.operand, linear, out, "plain", launch=early(out))
    return out


def expand(x: Hidden, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.expand."""
    if x.operand.shape[0] > 1:
        return reference.expand(x, up, gate, activation)
    out = x.operand.new_empty(1, up.weight.shape[0])
    kind = "up" if gate is None else "gated"
    row_product(x.operand, up, out, kind, gate=gate, activation=activation, launch=early(out))
    return out


def accumulate(x: Tensor, linear: Linear, onto: Hidden, norm_of_next: Norm | None) -> Hidden:
    """See reference.accumulate."""
    if x.shape[0] > 1:
        return hidden(project_add(x, linear, onto.exact), norm_of_next, onto.operand.dtype)
    exact = torch.empty_like(onto.exact)
    rounded = None if x.dtype == torch.float32 else torch.empty_like(onto.operand)
    row_product(x, linear, exact, "add", residual=onto.exact, rounded=rounded, launch=early(x))
    return Hidden(exact, exact if rounded is None else rounded)


def largest(x: Hidden, head: Linear, held: int) -> tuple[Tensor, Tensor]:
    """See reference.largest."""
    if x.operand.shape[0] == 1:
        return row_largest(x, head, held)
    whole = logits(x.operand, Linear(head.weight, head.bias))[:, :held]
    places = argmax(whole)
    return whole.gather(1, places[:, None])[:, 0], places
