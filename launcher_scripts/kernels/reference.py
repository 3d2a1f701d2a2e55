"""The operations of a transformer in plain torch: their definition, and the CPU implementation.

N is the number of tokens of a step, B of rows. The residual stream x is float32 [N, hidden];
everything else has the type of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.common.quantization import CLAMP, FOUR_BITS, SLOPE
from launcher_scripts.kernels import reference_attention, reference_recurrence, reference_sampling
from launcher_scripts.kernels.operands import (
    AttentionScores,
    EmbeddingTables,
    ExpertMLPs,
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    Ranks,
    RotaryTable,
    Router,
    RowColumns,
    RowLoRA,
    StepRows,
    XIELUCurve,
    locate,
)
from launcher_scripts.kernels.quantization import dequantized, saturated

attend_spans = reference_attention.attend_spans
attend_latents = reference_attention.attend_latents
store_latents = reference_attention.store_latents
context_attention = reference_attention.context_attention
decode_attention = reference_attention.decode_attention
norm_heads = reference_attention.norm_heads
norm_values = reference_attention.norm_values
apply_rotary = reference_attention.apply_rotary
rotary_table = reference_attention.rotary_table
prompt_attention = reference_attention.prompt_attention
source_attention = reference_attention.source_attention
source_attention_weights = reference_attention.source_attention_weights
rank_beams = reference_sampling.rank_beams
reorder_beams = reference_sampling.reorder_beams
scan_short_conv = reference_recurrence.scan_short_conv
step_short_conv = reference_recurrence.step_short_conv
scan_mamba2, step_mamba2 = reference_recurrence.scan_mamba2, reference_recurrence.step_mamba2
scan_delta, step_delta = reference_recurrence.scan_delta, reference_recurrence.step_delta
process = reference_sampling.process
sample = reference_sampling.sample

EXACT_IDS = 1 << 24  # float32 holds every smaller integer; ids travel beside the logits
FEW_TOKENS = 64  # that experts take all together
CLAMPED_SWIGLU = "clamped_swiglu"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "squared_relu": lambda x: functional.relu(x).square(),
    CLAMPED_SWIGLU: lambda x: x * torch.sigmoid(SLOPE * x),
}


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of `table` for ids [N]: float32 [N, hidden].

    `table` holds the ids from `first_id` on; other ids give zeros, so that the sum over the
    ranks that share a vocabulary is the whole lookup.
    """
    local = ids - first_id
    mask = (local >= 0) & (local < table.shape[0])
    rows = functional.embedding(local.clamp(0, table.shape[0] - 1), table)
    return torch.where(mask[:, None], rows.float(), 0.0)


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """Layer or RMS norm of x [N, hidden], statistics in float32."""
    x = x.float()
    if weights.kind == "layernorm":
        out = functional.layer_norm(x, x.shape[-1:], weights.weight, weights.bias, weights.eps)
    else:
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + weights.eps) * weights.weight
    return out.to(dtype)


def product(x: Tensor, linear: Linear, dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b of x [N, in], and what adapters add, the norm aside: [N, out] of the compute type,
    or of another one.

    A weight in bytes is multiplied as it is, in float32, and each output by its scale after that;
    one of four bits is dequantized.
    """
    return products(x, (linear,), dtype)[0]


def products(
    x: Tensor, linears: Sequence[Linear], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The same of several linears, of which the first one's adapters add to all."""
    outs = [_product(x, linear, dtype) for linear in linears]
    return added_lora(outs, x, linears[0].lora)


def _product(x: Tensor, linear: Linear, dtype: torch.dtype | None) -> Tensor:
    weight, bias = linear.weight, linear.bias
    if linear.scale is None and dtype is None:
        return functional.linear(x, weight, bias)
    if linear.quantization in FOUR_BITS:
        weight = dequantized(weight, linear.scale, linear.dtype)
    result = functional.linear(x.float(), weight.float())
    if linear.scale is not None and linear.quantization not in FOUR_BITS:
        result *= linear.scale
    if bias is not None:
        result += bias
    return result.to(dtype or linear.dtype)


def project(x: Tensor, linear: Linear) -> Tensor:
    """linear(norm(x)), or linear(x) where it has no norm: [N, out]."""
    return product(_normalized(x, linear), linear)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """residual + linear(x): float32 [N, hidden]."""
    return residual + product(x, linear)


def partial_product(x: Tensor, linear: Linear) -> Tensor:
    """linear(x) without its bias: float32 [N, hidden], to be summed over ranks."""
    return logits(x, replace(linear, bias=None, norm=None))


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of every rank's float32 x [N, hidden]."""
    return ranks.tp_sum(x)


def product_over_ranks(x: Tensor, linear: Linear, ranks: Ranks) -> Tensor:
    """linear(x) without its bias where every rank has a part of x [N, in] and of the weight's
    columns: [N, hidden] in float32, or in the compute type.
    """
    return ranks.tp_sum(partial_product(x, linear))


def accumulate_over_ranks(
    x: Tensor, linear: Linear, residual: Hidden, norm_of_next: Norm | None, ranks: Ranks
) -> Hidden:
    """accumulate where every rank has a part of x [N, in] and of the weight's columns."""
    exact = add_residual(product_over_ranks(x, linear, ranks), linear.bias, residual.exact)
    return hidden(exact, norm_of_next, residual.operand.dtype)


def add_residual(partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + partial + bias: float32 [N, hidden], after the sum over ranks."""
    total = residual + partial
    return total if bias is None else total + bias


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """act(up(norm(x))), times gate(norm(x)) where the MLP is gated: [N, ffn]."""
    normalized = _normalized(x, up)
    inner, *factors = products(normalized, (up,) if gate is None else (up, gate))
    return activated(inner, factors[0] if factors else None, activation)


def activated(x: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """act(x), times the gate where there is one."""
    if activation == CLAMPED_SWIGLU and gate is not None:
        x, gate = x.clamp(max=CLAMP), gate.clamp(-CLAMP, CLAMP) + 1
    hidden = ACTIVATIONS[activation](x)
    return hidden if gate is None else hidden * gate


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """The experts that x [N, hidden] goes through, int64 [N, per_token], the best first, and their
    weights, float32 of the same shape.
    """
    router_logits = logits(x, router.linear)
    if router.score_function == "sparsemixer":
        return _sparse_mixture(router_logits, router)
    scores = (
        router_logits.sigmoid() if router.score_function == "sigmoid" else router_logits.softmax(-1)
    )
    ranks = scores if router.bias is None else scores + router.bias
    ranks = router.groups.inside(ranks) if router.groups else ranks
    selected = ranks.topk(router.per_token, -1).indices
    weights = scores.gather(-1, selected)
    if router.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return selected, weights * router.scaling_factor


def _sparse_mixture(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """See Router.score_function.  logits: [N, experts]"""
    remaining, selected, weights = logits, [], []
    for _ in range(router.per_token):
        top, expert = remaining.max(-1, keepdim=True)
        far = (top - logits) / logits.abs().maximum(top) > 2 * router.jitter
        scores = remaining.masked_fill(far, float("-inf")).softmax(-1)
        selected.append(expert)
        weights.append(scores.gather(-1, expert))
        remaining = remaining.scatter(-1, expert, float("-inf"))
    return torch.cat(selected, -1), torch.cat(weights, -1) * router.scaling_factor


def xielu(x: Tensor, curve: XIELUCurve) -> Tensor:
    """The activation with these parameters: the shape and type of x."""
    wide = x.float()
    positive = functional.softplus(curve.positive)
    negative = curve.beta + functional.softplus(curve.negative)
    below = (torch.expm1(wide.minimum(curve.eps)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + curve.beta * wide).to(x.dtype)


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMLPs) -> Tensor:
    """Return the experts' output for x [N, hidden], in parts to be summed: float32 [P, N, hidden].

    chosen, weights: as `route` gives them

    Few tokens go through an expert together with those that did not choose it: products of other
    shapes may round differently, and a token's result must not depend on the others.
    """
    total = torch.zeros(x.shape, device=x.device)
    every = torch.arange(len(x), device=x.device)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        inputs = every if len(x) <= FEW_TOKENS else tokens
        gate = None if experts.gate is None else _expert(experts.gate, expert)
        inner = mlp_up(x[inputs], _expert(experts.up, expert), gate, experts.activation)
        result = project(inner, _expert(experts.down, expert)).float()
        result = result[torch.isin(inputs, tokens)] * weights[tokens, slots, None]
        total.index_add_(0, tokens, result)
    return total[None]


def _expert(linear: Linear, expert: int) -> Linear:
    """One expert's part of a linear of all, without its norm."""
    bias, scale = (None if part is None else part[expert] for part in (linear.bias, linear.scale))
    return replace(linear, weight=linear.weight[expert], bias=bias, scale=scale, norm=None)


def accumulate_parts(
    parts: Tensor, residual: Hidden, norm_of_next: Norm | None, ranks: Ranks
) -> Hidden:
    """Hidden states plus the sum of all ranks' parts [P, N, hidden], ready for a projection that
    has the norm."""
    exact = residual.exact + ranks.tp_sum(parts.sum(0))
    return hidden(exact, norm_of_next, residual.operand.dtype)


def added_lora(outs: list[Tensor], x: Tensor, chosen: RowLoRA | None) -> list[Tensor]:
    """Each of outs [N, out] plus its part of lora_delta of x [N, in]."""
    if chosen is None:
        return outs
    deltas = lora_delta(x, chosen).chunk(len(outs), 1)
    return [out + delta for out, delta in zip(outs, deltas, strict=True)]


def lora_delta(x: Tensor, chosen: RowLoRA) -> Tensor:
    """B A x of each row's adapter for x [N, in]: [N, out], zeros for a row without one.

    The rows go through A of every adapter, so what is launched does not depend on their choice.
    """
    lora, adapters = chosen.lora, chosen.adapters
    count, rank = lora.up.shape[:2]
    inner = functional.linear(x, lora.down.flatten(0, 1)).unflatten(1, (count, -1, rank))
    is_adapter = adapters[:, None] == torch.arange(count, device=x.device)
    inner = torch.where(is_adapter[:, :, None, None], inner, 0.0)  # [N, adapters, blocks, rank]
    ups = lora.up.flatten(0, 1).split(lora.widths, dim=1)
    parts = [inner[:, :, block].flatten(1) @ up for block, up in enumerate(ups)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def logits(x: Tensor, head: Linear) -> Tensor:
    """Next-token logits, float32 [N, vocab of this rank], accumulated in float32."""
    return product(_normalized(x, head), head, torch.float32)


def prepare(linear: Linear) -> Linear:
    """The linear with what an implementation wants to know beforehand."""
    return linear


def begin_step(
    slots: Tensor,
    columns: RowColumns,
    history: Tensor,
    tables: EmbeddingTables,
    norm_of_next: Norm | None,
    *,
    sources: bool = False,
) -> tuple[Hidden, StepRows]:
    """Feed every row's last token: its embedding as hidden states [B, hidden], and the rows.

    The ids of the rows in slots [B] go to the history [cache tokens], and the rows grow by one
    token, but for the padding slot. Ids that other ranks hold give zeros (see embed).
    """
    ids, starts, positions = (
        column[slots] for column in (columns.token, columns.start, columns.length)
    )
    slots_of_tokens = locate(columns.table, starts + positions)
    history[slots_of_tokens] = ids
    columns.length.index_add_(0, slots, (slots != columns.padding).long())
    x = embed(ids, tables.tokens, tables.first_id)
    if tables.positions is not None:
        x = x + embed(positions, tables.positions, 0)
    rows = StepRows(starts, positions, positions + 1, located=slots_of_tokens)
    if sources:
        source = columns.source_start[slots], columns.source_length[slots].clamp(min=1)
        rows = replace(rows, source_starts=source[0], source_lengths=source[1])
    return hidden(x, norm_of_next, tables.tokens.dtype), rows


def hidden(exact: Tensor, norm_of_next: Norm | None, dtype: torch.dtype) -> Hidden:
    """Float32 [N, hidden] as the next projection, which has that norm, reads it."""
    operand = exact.to(dtype) if norm_of_next is None else norm(exact, norm_of_next, dtype)
    return Hidden(exact, operand)


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: RotaryTable | None,
    slots: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Normalize and rotate queries and keys of qkv [N, q + k + v]; put keys and values at cache
    tokens slots [N].

    Rotary positions rotate the first dimensions of a head by halves (Su et al. 2021, in the form of
    GPT-NeoX). The cache may have another type than qkv; see quantization.saturated. Returns the
    queries [N, heads, head_size].
    """
    qkv = norm_heads(qkv, heads, norms, norm)
    tokens = qkv.shape[0]
    split = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    parts: tuple[Tensor, ...] = qkv.view(tokens, -1, heads.head_size).split(split, dim=1)
    query, key, value = parts
    if rotary is not None:
        query, key = (reference_attention.rotated(part, *rotary) for part in (query, key))
        query = query.to(qkv.dtype)
    dtype = cache.keys.dtype
    cache.keys[:, slots] = saturated(key, dtype).transpose(0, 1)  # [kv_heads, N, head_size]
    cache.values[:, slots] = saturated(value, dtype).transpose(0, 1)
    return query


def project_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: RotaryTable | None,
    rows: StepRows,
    cache: LayerCache,
    norms: HeadNorms | None = None,
) -> Tensor:
    """store_kv of project: queries [B, heads, head_size], keys and values in the cache.

    rotary: of every position;  norms: of every head's queries and keys, before they are rotated
    """
    qkv = project_hidden(x, linear)
    return store_kv(qkv, heads, rows.rotary(rotary), rows.cache_tokens, cache, norms)


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
    """project_heads, then decode_attention of the rows to their own tokens: [B, heads * size]."""
    return decode_attention(
        project_heads(x, linear, heads, rotary, rows, cache, norms),
        cache,
        *rows.attended,
        longest,
        scores,
        positions=rows.positions,
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
    """project_hidden, then decode_attention of the rows to the encoder's inputs: [B, heads * size].

    `longest` bounds the inputs' tokens.
    """
    query = project_hidden(x, linear)
    return decode_attention(
        query.view(query.shape[0], heads.num_heads, heads.head_size),
        cache,
        *rows.source,
        longest,
        scores,
        positions=rows.positions,
        fresh=False,
    )


def project_hidden(x: Hidden, linear: Linear) -> Tensor:
    """linear of the normalized hidden states: [B, out]."""
    return product(x.operand, linear)


def expand(x: Hidden, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """mlp_up of the normalized hidden states: [B, ffn]."""
    return mlp_up(x.operand, up.without_norm(), gate and gate.without_norm(), activation)


def accumulate(x: Tensor, linear: Linear, residual: Hidden, norm_of_next: Norm | None) -> Hidden:
    """Hidden states plus linear(x), ready for a projection that has the norm."""
    exact = project_add(x, linear, residual.exact)
    return hidden(exact, norm_of_next, residual.operand.dtype)


def largest(x: Hidden, head: Linear, held: int) -> tuple[Tensor, Tensor]:
    """The largest of a row's first `held` logits, float32 [B], and the first place, int64 [B]."""
    all_logits = logits(x.operand, Linear(head.weight, head.bias))[:, :held]
    indices = argmax(all_logits)
    return all_logits.gather(1, indices[:, None])[:, 0], indices


def choose(x: Hidden, head: Linear, held: int, columns: RowColumns, slots: Tensor) -> Tensor:
    """The places of `largest`, int64 [B], which become the last tokens of the rows in slots [B]."""
    tokens = largest(x, head, held)[1]
    columns.token.index_copy_(0, slots, tokens)
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """The largest logit's id of every row, int64 [N]; the lowest id of equal ones."""
    return logits.argmax(-1)


def copy_to_host(
    tokens: Tensor, slots: Tensor, memory: Tensor, written: Tensor, padding: int
) -> None:
    """Write the tokens of the rows in `slots`, both int64 [N], as the next line of page-locked
    memory, int64 [lines, rows], as far as they fit; after the last line comes the first.

    written: int64 [1], counts the lines;  padding: a slot of no row. Where the first row is none,
             nothing is written or counted
    """
    if slots[0] != padding:
        line = memory[int(written) % memory.shape[0]]
        count = min(tokens.shape[0], line.shape[0])
        line[:count].copy_(tokens[:count])
        written += 1


def largest_of_ranks(values: Tensor, ids: Tensor, ranks: Ranks) -> Tensor:
    """The id of every row's largest value, int64 [N], the lowest id of equal ones.

    Every rank has the logits of its part of the vocabulary. It finds its own largest, and the ranks
    exchange (value, id), a few bytes instead of the vocabulary.

    values, ids: this rank's largest logits, float32 [N], and their ids, int64 [N] below EXACT_IDS;
                 -inf where it has none
    """
    everyone = ranks.tp_stack(torch.stack([values, ids.float()]))  # [tp, 2, N]
    # The first of equal values is the lowest rank's, which holds the lowest ids.
    winner = everyone[:, 0].argmax(0, keepdim=True)  # [1, N]
    return everyone[:, 1].gather(0, winner)[0].long()


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.dtype)
    return norm(x, linear.norm, linear.dtype)
