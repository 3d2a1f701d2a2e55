"""The operations of ops.py for CUDA, most of them one kernel in the Triton language.

Reading the weights takes most of a decode step's time, so each projection is one kernel with its
norm, bias and activation: gemv.py for one row, dot.py for a few. cuBLAS multiplies more rows; see
many_rows.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.beams import rank_beams as rank_beams
from launcher_scripts.kernels.cuda.beams import reorder_beams as reorder_beams
from launcher_scripts.kernels.cuda.compiling import NO_PDL, pdl_options, traits_of
from launcher_scripts.kernels.cuda.convolution import step_short_conv as step_short_conv
from launcher_scripts.kernels.cuda.decode_attention import attention_launch
from launcher_scripts.kernels.cuda.decode_attention import decode_attention as decode_attention
from launcher_scripts.kernels.cuda.delta_scans import scan_delta as scan_delta
from launcher_scripts.kernels.cuda.dot import (
    MAX_ROWS,
    dot_largest,
    dot_parts,
    dot_product,
    dot_summands,
    fits,
)
from launcher_scripts.kernels.cuda.elementwise import argmax as argmax
from launcher_scripts.kernels.cuda.elementwise import gated
from launcher_scripts.kernels.cuda.embedding import begin_step as begin_step
from launcher_scripts.kernels.cuda.embedding import copy_to_host as copy_to_host
from launcher_scripts.kernels.cuda.embedding import embed as embed
from launcher_scripts.kernels.cuda.experts import mixture as mixture
from launcher_scripts.kernels.cuda.experts import pick_experts
from launcher_scripts.kernels.cuda.gemv import row_accumulate, row_largest, row_product
from launcher_scripts.kernels.cuda.latent_attention import attend_latents as attend_latents
from launcher_scripts.kernels.cuda.latent_attention import store_latents as store_latents
from launcher_scripts.kernels.cuda.many_rows import (
    activated_product,
    dense,
    many_rows,
    multiplies_fp8,
    products,
)
from launcher_scripts.kernels.cuda.norm import add_parts, fold_norm
from launcher_scripts.kernels.cuda.norm import hidden as hidden
from launcher_scripts.kernels.cuda.norm import norm as norm
from launcher_scripts.kernels.cuda.peer_buffers import (
    exchange_largest,
    max_exchanged_rows,
    receive_sum,
    send_product,
)
from launcher_scripts.kernels.cuda.peer_rows import fits_buffers, send_parts, send_sums
from launcher_scripts.kernels.cuda.prompt_attention import attend_spans as attend_spans
from launcher_scripts.kernels.cuda.prompt_attention import prompt_attention as prompt_attention
from launcher_scripts.kernels.cuda.qkv import row_heads
from launcher_scripts.kernels.cuda.qkv import store_kv as store_kv
from launcher_scripts.kernels.cuda.recurrence import step_delta as step_delta
from launcher_scripts.kernels.cuda.recurrence import step_mamba2 as step_mamba2
from launcher_scripts.kernels.cuda.sampling import process as process
from launcher_scripts.kernels.cuda.sampling import sample as sample
from launcher_scripts.kernels.cuda.scans import scan_mamba2 as scan_mamba2
from launcher_scripts.kernels.operands import (
    AttentionScores,
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    PeerBuffers,
    Ranks,
    RotaryTable,
    Router,
    RowColumns,
    StepRows,
)

add_residual = reference.add_residual
apply_rotary = reference.apply_rotary
context_attention = reference.context_attention
rotary_table = reference.rotary_table
source_attention = reference.source_attention
source_attention_weights = reference.source_attention_weights

scan_short_conv = reference.scan_short_conv


def prepare(linear: Linear) -> Linear:
    """See reference.prepare. A norm is folded into its projection for steps of one row."""
    return replace(linear, folded=fold_norm(linear))


def project(x: Tensor, linear: Linear) -> Tensor:
    """See reference.project."""
    if x.shape[0] == 1:
        return _row(x, linear, linear.dtype, "plain")
    return _several_rows(_normalized(x, linear), linear)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """See reference.project_add."""
    if x.shape[0] == 1:
        return _row(x, linear, torch.float32, "add", residual=Hidden(residual, residual))
    return residual + _several_rows(x, linear)


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.mlp_up."""
    if x.shape[0] == 1:
        kind = "up" if gate is None else "gated"
        without = None if gate is None else gate.without_norm()
        return _row(x, up, up.dtype, kind, gate=without, activation=activation)
    if up.lora is not None:
        return expand(Hidden(x, _normalized(x, up)), up, gate, activation)
    return _many_expanded(_normalized(x, up), up, gate, activation)


def logits(x: Tensor, head: Linear) -> Tensor:
    """See reference.logits."""
    if x.shape[0] == 1:
        return _row(x, head, torch.float32, "plain")
    normalized = _normalized(x, head)
    if multiplies_fp8(normalized, head):
        return many_rows(normalized, head).float()
    head = dense(head)
    if normalized.dtype == torch.float32 or not traits_of(x.device).adds_in_float32:
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(normalized.float(), head.weight.float(), bias)
    out = torch.mm(normalized, head.weight.t(), out_dtype=torch.float32)
    return out if head.bias is None else out + head.bias


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """See reference.route; no kernel knows groups of experts, or sparse mixers."""
    if router.score_function == "sparsemixer" or router.groups is not None:
        return reference.route(x, router)
    linear = replace(router.linear, bias=None)
    if fits(x):
        router_logits = dot_summands(x, linear, "router")
    elif x.shape[0] == 1:
        router_logits = torch.empty(1, 1, linear.weight.shape[0], device=x.device)
        row_product(Hidden(x, x), linear, router_logits[0], "plain", launch=pdl_options(x))
    else:
        router_logits = logits(x, linear)[None]
    return pick_experts(router_logits, router)


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.dtype)
    return norm(x, linear.norm, linear.dtype)


def _several_rows(x: Tensor, linear: Linear) -> Tensor:
    """linear(x) for more than one row, its norm aside. With adapters few rows go through dot.py,
    which reads their own alone.
    """
    if linear.lora is not None and fits(x):
        return dot_product(x, linear, "plain")
    return many_rows(x, linear)


def _row(x: Tensor, linear: Linear, dtype: torch.dtype, kind: str, **more: Any) -> Tensor:
    """One row through a projection behind a norm of its own: [1, out] of `dtype`."""
    out = torch.empty(1, linear.weight.shape[0], dtype=dtype, device=x.device)
    operand = _normalized(x, linear)
    row_product(Hidden(x, operand), linear.without_norm(), out, kind, launch=NO_PDL, **more)
    return out


def project_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: RotaryTable | None,
    rows: StepRows,
    cache: LayerCache,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See reference.project_heads."""
    if x.operand.shape[0] == 1 and norms is None:
        return row_heads(x, linear, heads, rotary, rows, cache)
    qkv = project_hidden(x, linear)
    return store_kv(qkv, heads, rotary, rows.cache_tokens, cache, norms, positions=rows.positions)


def attend_own(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: RotaryTable | None,
    rows: StepRows,
    cache: LayerCache,
    longest: int,
    scores: AttentionScores,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See reference.attend_own. One row's projection stores keys and values, several rows' not:
    there the attention does, unless norms come between or rows attend to one another."""
    is_single, parts = x.operand.shape[0] == 1, 1
    stored = is_single or norms is not None or rows.in_sequence
    if stored:
        query = project_heads(x, linear, heads, rotary, rows, cache, norms)
    else:
        query, parts = _few_rows_in_parts(x.operand, linear, "heads")
    return attention_launch(
        query,
        heads,
        cache,
        (*rows.attended, rows.positions),
        longest,
        scores,
        dtype=x.operand.dtype,
        fresh=True,
        launch=NO_PDL if rows.in_sequence else pdl_options(query),
        store=not stored,
        parts=parts,
        rotary=None if stored else rotary,
        state=x if is_single else None,
        norm=linear.norm if is_single else None,
    )


def attend_source(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rows: StepRows,
    cache: LayerCache,
    longest: int,
    scores: AttentionScores,
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
        (*rows.source, rows.positions),
        longest,
        scores,
        dtype=x.operand.dtype,
        fresh=False,
        launch=pdl_options(query),
        parts=parts,
    )


def _few_rows_in_parts(x: Tensor, linear: Linear, kind: str) -> tuple[Tensor, int]:
    """linear(x) for more than one row, its norm aside; and of how many parts it is the sum."""
    if fits(x):
        parts = dot_parts(x, linear, kind)
        return parts, parts.shape[0]
    return many_rows(x, linear), 1


def project_hidden(x: Hidden, linear: Linear) -> Tensor:
    """See reference.project_hidden."""
    if fits(x.operand):
        return dot_product(x.operand, linear, "plain")
    if x.operand.shape[0] > 1:
        return many_rows(x.operand, linear)
    out = x.operand.new_empty(1, linear.weight.shape[0])
    row_product(x, linear, out, "plain", launch=pdl_options(out))
    return out


def expand(x: Hidden, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.expand."""
    kind = "up" if gate is None else "gated"
    if fits(x.operand):
        return dot_product(x.operand, up, kind, gate=gate, activation=activation)
    if x.operand.shape[0] > 1:
        return _many_expanded(x.operand, up, gate, activation)
    out = x.operand.new_empty(1, up.weight.shape[0])
    row_product(x, up, out, kind, gate=gate, activation=activation, launch=pdl_options(out))
    return out


def _many_expanded(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """expand of more rows than dot.py takes, norms aside."""
    if gate is None:
        return activated_product(x, up, activation)
    inner, factors = products(x, (up, gate))
    return gated(inner, factors, activation)


def accumulate(x: Tensor, linear: Linear, residual: Hidden, norm_of_next: Norm | None) -> Hidden:
    """See reference.accumulate."""
    dtype = residual.operand.dtype
    if fits(x):
        return add_parts(dot_summands(x, linear), linear.bias, residual.exact, norm_of_next, dtype)
    if x.shape[0] > 1 or not _has_expected(residual, norm_of_next):
        product = partial_product if x.shape[0] == 1 and linear.lora is not None else many_rows
        added = product(x, replace(linear, bias=None))
        return add_parts(added[None], linear.bias, residual.exact, norm_of_next, dtype)
    return row_accumulate(x, linear, residual, norm_of_next)


def _has_expected(residual: Hidden, norm_of_next: Norm | None) -> bool:
    """Return whether one row's hidden states say how those that come after it are to be
    prescaled."""
    return norm_of_next is None or residual.row_stats is not None


def choose(x: Hidden, head: Linear, held: int, columns: RowColumns, slots: Tensor) -> Tensor:
    """See reference.choose."""
    return largest(x, head, held, (columns.token, slots))[1]


def accumulate_over_ranks(
    x: Tensor, linear: Linear, residual: Hidden, norm_of_next: Norm | None, ranks: Ranks
) -> Hidden:
    """See reference.accumulate_over_ranks."""
    buffers = _buffers_for(x.shape[0], linear.weight.shape[0], ranks)
    if buffers is not None and x.shape[0] == 1 and _has_expected(residual, norm_of_next):
        send_product(x, linear, buffers)
        return receive_sum(linear.bias, residual, norm_of_next, buffers)
    parts = _summands(x, linear) if buffers else product_over_ranks(x, linear, ranks)[None]
    dtype = residual.operand.dtype
    return _add_over_ranks(parts, linear.bias, residual.exact, norm_of_next, dtype, buffers)


def accumulate_parts(
    parts: Tensor, residual: Hidden, norm_of_next: Norm | None, ranks: Ranks
) -> Hidden:
    """See reference.accumulate_parts. Ranks add many rows up in the compute type."""
    rows, size = residual.exact.shape
    dtype, buffers = residual.operand.dtype, _buffers_for(rows, size, ranks)
    if ranks.tp_size > 1 and buffers is None:
        total = parts.sum(0)
        parts = ranks.tp_sum(total.to(dtype) if rows > MAX_ROWS else total)[None]
    return _add_over_ranks(parts, None, residual.exact, norm_of_next, dtype, buffers)


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """See reference.sum_over_ranks."""
    buffers = _buffers_for(x.shape[0], x.shape[1], ranks)
    if buffers is None:
        return ranks.tp_sum(x)
    return _add_over_ranks(x[None], None, None, None, torch.float32, buffers).exact


def _add_over_ranks(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_of_next: Norm | None,
    dtype: torch.dtype,
    buffers: PeerBuffers | None,
) -> Hidden:
    """add_parts, over the ranks where there are peer buffers."""
    if buffers is not None:
        send_parts(parts, buffers)
        send_sums(parts.shape[1], parts.shape[2], buffers)
    return add_parts(parts, bias, residual, norm_of_next, dtype, buffers)


def _buffers_for(rows: int, size: int, ranks: Ranks) -> PeerBuffers | None:
    """The ranks' peer buffers, where sums [rows, size] go through them."""
    buffers = ranks.peer_buffers
    if buffers is None or rows > MAX_ROWS or not fits_buffers(rows, size, buffers):
        return None
    return buffers


def largest_of_ranks(values: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """See reference.largest_of_ranks."""
    buffers = ranks.peer_buffers
    if buffers is not None and values.shape[0] <= max_exchanged_rows(buffers):
        return exchange_largest(values, ids, buffers)
    return reference.largest_of_ranks(values, ids, ranks)


def partial_product(x: Tensor, linear: Linear) -> Tensor:
    """See reference.partial_product."""
    product = replace(linear, bias=None, norm=None)
    if x.shape[0] == 1:
        out = torch.empty(1, linear.weight.shape[0], device=x.device)
        row_product(Hidden(x, x), product, out, "add", launch=pdl_options(x))
        return out
    if fits(x):
        return dot_summands(x, product).sum(0)
    return reference.added_lora([logits(x, replace(product, lora=None))], x, linear.lora)[0]


def _summands(x: Tensor, linear: Linear) -> Tensor:
    """partial_product(x, linear) in parts to be summed, float32 [P, N, out]."""
    return dot_summands(x, linear) if fits(x) else partial_product(x, linear)[None]


def product_over_ranks(x: Tensor, linear: Linear, ranks: Ranks) -> Tensor:
    """See reference.product_over_ranks. Ranks add many rows up in the compute type: from a MiB of
    float32 on, half the bytes over NCCL take no longer than all of them through shared memory.
    """
    if x.shape[0] > MAX_ROWS and ranks.tp_size > 1:
        return ranks.tp_sum(many_rows(x, replace(linear, bias=None)))
    buffers = _buffers_for(x.shape[0], linear.weight.shape[0], ranks)
    if buffers is not None:
        parts = _summands(x, linear)
        return _add_over_ranks(parts, None, None, None, torch.float32, buffers).exact
    return ranks.tp_sum(partial_product(x, linear))


def largest(
    x: Hidden, head: Linear, held: int, keep: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.largest. keep: a column and the rows' slots, where the places go as well."""
    if x.operand.shape[0] == 1:
        return row_largest(x, head, held, keep)
    if fits(x.operand):
        return dot_largest(x, head, held, keep)
    all_logits = logits(x.operand, Linear(head.weight, head.bias))[:, :held]
    indices = argmax(all_logits)
    if keep is not None:
        keep[0].index_copy_(0, keep[1], indices)
    return all_logits.gather(1, indices[:, None])[:, 0], indices
