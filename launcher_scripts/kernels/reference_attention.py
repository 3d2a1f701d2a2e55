"""The attentions of reference.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels.operands import (
    SPAN_QUERIES,
    AttentionScores,
    HeadNorms,
    Heads,
    LayerCache,
    Norm,
    RelativeBias,
    RotaryTable,
    Spans,
    VarlenBatch,
    locate,
)
from launcher_scripts.kernels.quantization import saturated

QUERIES_AT_ONCE = 512


def norm_heads(
    qkv: Tensor,
    heads: Heads,
    norms: HeadNorms | None,
    norm: Callable[[Tensor, Norm, torch.dtype], Tensor],
) -> Tensor:
    """qkv [N, q + k + v] with every head's query and key normalized by `norm`, where there are
    norms."""
    if norms is None:
        return qkv
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    query, key, value = qkv.unflatten(1, (-1, heads.head_size)).split(sizes, 1)
    query, key = (
        norm(part.reshape(-1, len(weights.weight)).contiguous(), weights, qkv.dtype).view_as(part)
        for part, weights in ((query, norms.query), (key, norms.key))
    )
    result = torch.cat((query, key, value), 1).flatten(1)
    return result if norms.scales is None else (result * norms.scales).to(qkv.dtype)


def norm_values(
    qkv: Tensor, heads: Heads, weights: Norm, norm: Callable[[Tensor, Norm, torch.dtype], Tensor]
) -> Tensor:
    """The same with every head's values normalized."""
    width = heads.num_kv_heads * heads.head_size
    values = qkv[:, -width:].reshape(-1, heads.head_size)
    normed = norm(values, weights, qkv.dtype).view(-1, width)
    return torch.cat([qkv[:, :-width], normed], dim=1)


def rotary_table(positions: Tensor, frequencies: Tensor) -> RotaryTable:
    """The table of positions [N], by the speeds of rotary_size / 2 pairs."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(qkv: Tensor, heads: Heads, rotary: RotaryTable) -> Tensor:
    """qkv [N, (heads + 2 * kv_heads) * head_size] with its queries and keys rotated, as store_kv
    does.
    """
    parts = qkv.unflatten(1, (-1, heads.head_size))
    count = heads.num_heads + heads.num_kv_heads
    turned = rotated(parts[:, :count], *rotary).to(qkv.dtype)
    return torch.cat((turned, parts[:, count:]), 1).flatten(1)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """float32"""
    half = cosines.shape[-1]
    first, second, remaining = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    parts = (first * cosines - second * sines, second * cosines + first * sines, remaining)
    return torch.cat(parts, dim=-1)


def context_attention(
    query: Tensor,
    cache: LayerCache,
    start: int,
    past: int,
    scores: AttentionScores,
    *,
    window: int = 0,
    source: int = 0,
) -> Tensor:
    """Causal attention of one row's new tokens: [n, heads * head_size].

    query [n, heads, head_size] holds positions past..past+n-1; the row's keys and values are
    already in the cache from address `start` on. With a `window` each token attends to itself and
    the window - 1 before it; 0: to all. All attend to the `source` tokens right before, too.
    """
    at_once = QUERIES_AT_ONCE if window else max(query.shape[0], 1)
    outputs = []
    for piece in query.split(at_once):
        first = max(0, past - window + 1) if window else 0  # keys before it are seen by none
        bias = _causal_bias(piece, past, first, scores, window)
        total = past + piece.shape[0]
        spans = [cache.of_row(start + first, start + total)]
        if source:
            if bias is None:
                bias = query.new_full((1, total, total), float("-inf")).float().triu(1)
            bias = functional.pad(bias, (source, 0))
            spans = [cache.of_row(start - source, start), *spans]
        key, value = (
            _for_heads(torch.cat([part[:, span] for span in spans], 1), query)
            for part in (cache.keys, cache.values)
        )
        outputs.append(_attended(piece, key, value, bias, scores))
        past = total
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _causal_bias(
    query: Tensor, past: int, first: int, scores: AttentionScores, window: int
) -> Tensor | None:
    """Return the biases of query [n, heads, head_size] on keys first..past+n-1: float32 [heads or
    1, n, T]; None if is_causal is enough.
    """
    new, slopes, relative = query.shape[0], scores.slopes, scores.relative
    if slopes is None and relative is None and not past and not window:
        return None
    keys = torch.arange(first, past + new, device=query.device)
    distance = keys - torch.arange(past, past + new, device=query.device)[:, None]  # [n, T], k - q
    bias = torch.zeros_like(distance, dtype=torch.float32)[None]
    if slopes is not None:
        bias = slopes[:, None, None] * distance
    if relative is not None:
        bias = bias + _relative_scores(relative, past, new, past + new)[..., first:]
    outside = distance > 0
    if window:
        outside = outside | (distance <= -window)
    return bias.masked_fill(outside, float("-inf"))


def _attended(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scores: AttentionScores
) -> Tensor:
    """Causal where there is no bias; key and value [heads, T, head_size]: [n, heads * size]."""
    new, heads, _ = query.shape
    if scores.softcap is None and scores.sinks is None:
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=None if bias is None else bias.to(query.dtype).expand(1, heads, new, -1),
            is_causal=bias is None,
            scale=scores.scale,
        )[0]
    else:
        products = query.transpose(0, 1).float() @ key.float().transpose(-1, -2)
        if bias is None:
            bias = torch.full((new, new), float("-inf"), device=query.device).triu(1)
        sinks = None if scores.sinks is None else scores.sinks[:, None, None]
        weights = _softmax(_scaled(products, scores) + bias, sinks)
        out = (weights @ value.float()).to(query.dtype)
    return out.transpose(0, 1).reshape(new, -1)


def _scaled(products: Tensor, scores: AttentionScores) -> Tensor:
    """float32 q.k, scaled and capped."""
    products = products * scores.scale
    if scores.softcap is None:
        return products
    return scores.softcap * torch.tanh(products / scores.softcap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of float32 scores [..., T], with sinks [..., 1] if there are any."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]


def prompt_attention(
    query: Tensor,
    cache: LayerCache,
    spans: VarlenBatch,
    scores: AttentionScores,
    *,
    window: int = 0,
) -> Tensor:
    """context_attention of several rows, query [N, heads, head_size]: [N, heads * head_size].

    Tokens after those of the last row only fill a step up; anything may come out for them.
    """
    out = torch.empty_like(query).flatten(1)
    position = 0
    for start, past, count in spans.spans:
        chunk = slice(position, position + count)
        position += count
        out[chunk] = context_attention(query[chunk], cache, start, past, scores, window=window)
    return out


def source_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: AttentionScores,
    *,
    first: int = 0,
    window: int = 0,
) -> Tensor:
    """Attention of rows of one length to all of their keys: [B, n, heads * head_size].

    query [B, n, heads, head_size] holds positions first..first+n-1; key and value are
    [B, kv_heads, T, head_size]. With a `window` only so many keys around a query count, of an even
    number one more behind it than before.
    Slopes and sinks of the scores are not looked at. Queries go in pieces where there is a bias,
    which takes heads * n * T numbers.
    """
    outputs = []
    key, value = _for_all_heads(key, query), _for_all_heads(value, query)
    is_plain = scores.relative is None and not window and scores.softcap is None
    at_once = query.shape[1] if is_plain else QUERIES_AT_ONCE
    for start, part in enumerate(query.split(at_once, dim=1)):
        bias = _source_bias(part, key, scores, first + start * at_once, window)
        if scores.softcap is not None:
            weights = _source_scores(part, key, bias, scores).softmax(-1)
            out = (weights @ value.float()).to(query.dtype)
            outputs.append(out.transpose(1, 2).flatten(2))
            continue
        out = functional.scaled_dot_product_attention(
            part.transpose(1, 2),
            key,
            value,
            attn_mask=None if bias is None else bias.to(query.dtype)[None],
            scale=scores.scale,
        )
        outputs.append(out.transpose(1, 2).flatten(2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _for_all_heads(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values [B, kv_heads, T, head_size] in the query's type, with those of every head of
    the query."""
    part = part.to(query.dtype)
    group = query.shape[2] // part.shape[1]
    return part if group == 1 else part.repeat_interleave(group, dim=1)


def _source_bias(
    query: Tensor, key: Tensor, scores: AttentionScores, first: int, window: int
) -> Tensor | None:
    """Return the biases of the scores of positions first.., float32 [heads or 1, n, T]."""
    queries, keys = query.shape[1], key.shape[2]
    bias = None
    if scores.relative is not None:
        bias = _relative_scores(scores.relative, first, queries, keys)
    if not window:
        return bias
    positions = torch.arange(first, first + queries, device=query.device)
    distance = torch.arange(keys, device=query.device) - positions[:, None]
    outside = (2 * distance - (window + 1) % 2).abs() >= window
    if bias is None:
        bias = torch.zeros(1, queries, keys, device=query.device)
    return bias.masked_fill(outside, float("-inf"))


def _source_scores(
    query: Tensor, key: Tensor, bias: Tensor | None, scores: AttentionScores
) -> Tensor:
    """float32 [B, heads, n, T]"""
    values = _scaled(query.transpose(1, 2).float() @ key.transpose(-1, -2).float(), scores)
    return values if bias is None else values + bias


def attend_spans(
    qkv: Tensor,
    heads: Heads,
    spans: Spans,
    scores: AttentionScores,
    *,
    window: int = 0,
) -> Tensor:
    """source_attention of rows to all of their own tokens: [N, heads * head_size].

    qkv [N, (heads + 2 * kv_heads) * head_size] holds the rows one after the other.
    """
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    rows = [(start, count) for start, count, first in spans.blocks.tolist() if count and not first]
    out = qkv.new_empty(qkv.shape[0], heads.num_heads * heads.head_size)
    for count, run in itertools.groupby(rows, key=lambda row: row[1]):
        starts = [start for start, _ in run]
        tokens = slice(starts[0], starts[-1] + count)
        group = qkv[tokens].view(len(starts), count, sum(sizes), heads.head_size)
        query, key, value = group.split(sizes, dim=2)  # [B, n, heads, size]
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        attended = source_attention(query, key, value, scores, window=window)
        out[tokens] = attended.flatten(0, 1)
    return out


def source_attention_weights(
    query: Tensor, key: Tensor, scores: AttentionScores, *, window: int = 0
) -> Tensor:
    """Return the weights of the keys in source_attention: float32 [B, heads, n, T]."""
    key = _for_all_heads(key, query)
    bias = _source_bias(query, key, scores, 0, window)
    return _source_scores(query, key, bias, scores).softmax(-1)


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scores: AttentionScores,
    *,
    positions: Tensor | None = None,
    fresh: bool | None = None,  # noqa: ARG001 - of interest to kernels that overlap
) -> Tensor:
    """Attention of one new token per row: [B, heads * head_size].

    query [B, heads, head_size]; row b attends to the lengths[b] tokens from address starts[b] on,
    its own included where they are its own. `longest` bounds the lengths. A relative bias counts
    from the rows' positions [B].

    `fresh` may be given in a step that began with begin_step: whether its rows' last tokens were
    stored in it. Everything else was there before: a kernel can read it before the one before it
    has ended.
    """
    rows, num_heads, head_size = query.shape
    offsets = torch.arange(longest, device=query.device)
    tokens = torch.where(offsets < lengths[:, None], starts[:, None] + offsets, starts[:, None])
    tokens = locate(cache.table, tokens)
    group = num_heads // cache.keys.shape[0]
    key = cache.keys[:, tokens].float()  # [kv_heads, B, T, head_size]
    value = cache.values[:, tokens].float()
    grouped = query.float().view(rows, -1, group, head_size).transpose(0, 1)  # [kv, B, g, D]
    values = _scaled(grouped @ key.transpose(-1, -2), scores)  # [kv, B, g, T]
    if scores.slopes is not None:
        distance = offsets - (lengths[:, None] - 1)  # [B, T]
        values = values + scores.slopes.view(-1, 1, group, 1) * distance[None, :, None]
    if (relative := scores.relative) is not None:
        if positions is None:
            raise ValueError("a relative bias needs the positions of the rows")
        distance = (offsets - positions[:, None]).clamp(-relative.reach, relative.reach)
        bias = relative.table[:, distance + relative.reach]  # [heads, B, T]
        values = values + bias.unflatten(0, (-1, group)).transpose(1, 2)
    values = values.masked_fill((offsets >= lengths[:, None])[None, :, None], float("-inf"))
    sinks = None if scores.sinks is None else scores.sinks.view(-1, 1, group, 1)
    out = _softmax(values, sinks) @ value  # [kv, B, g, D]
    return out.transpose(0, 1).reshape(rows, -1).to(query.dtype)


def attend_joined_spans(
    query: Tensor,
    cache: LayerCache,
    spans: Sequence[tuple[Tensor, Tensor, int]],
    scores: AttentionScores,
) -> Tensor:
    """decode_attention where a row attends to several runs of its tokens.

    spans: of each run the rows' first addresses, lengths and what bounds these; only scale and
           softcap of the scores are looked at
    """
    rows, num_heads, size = query.shape
    tokens, seen = [], []
    for starts, lengths, longest in spans:
        offsets = torch.arange(longest, device=query.device)
        seen.append(offsets < lengths[:, None])
        tokens.append(torch.where(seen[-1], starts[:, None] + offsets, starts[:, None]))
    indices, visible = locate(cache.table, torch.cat(tokens, 1)), torch.cat(seen, 1)
    key, value = cache.keys[:, indices].float(), cache.values[:, indices].float()
    grouped = query.float().view(rows, len(key), -1, size).transpose(0, 1)  # [kv, B, g, D]
    values = _scaled(grouped @ key.transpose(-1, -2), scores)
    weights = values.masked_fill(~visible[None, :, None], float("-inf")).softmax(-1)
    return (weights @ value).transpose(0, 1).reshape(rows, num_heads * size).to(query.dtype)


def store_latents(
    query: Tensor,
    latent: Tensor,
    norm: Norm,
    rotary: RotaryTable | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """Queries [N, heads, head_size] whose last part has turned, perhaps where they were.

    latent [N, rank + turning size] holds the latent vectors, not yet normalized, and the parts of
    keys that turn; both go to the cache tokens slots [N].  rotary: of the tokens
    """
    rank, dtype = norm.weight.shape[0], latent.dtype
    vectors, turning = latent.float().split((rank, latent.shape[1] - rank), 1)
    if norm.kind == "layernorm":
        vectors = functional.layer_norm(vectors, (rank,), norm.weight, norm.bias, norm.eps)
    else:
        vectors = functional.rms_norm(vectors, (rank,), norm.weight, norm.eps)
    if rotary is not None:
        still, turned = query.split((query.shape[2] - turning.shape[1], turning.shape[1]), 2)
        query = torch.cat((still, rotated(turned, *rotary).to(query.dtype)), 2)
        turning = rotated(turning[:, None], *rotary)[:, 0]
    keys = cache.keys
    keys[0, slots] = saturated(torch.cat((vectors, turning), 1).to(dtype), keys.dtype)
    return query


def attend_latents(
    query: Tensor,
    up: Tensor,
    cache: LayerCache,
    rows: tuple[Tensor, Tensor, int],
    scores: AttentionScores,
    *,
    positions: Tensor | None = None,
    lora: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one new token per row to latent vectors: [B, heads * value size].

    query [B, heads, head_size]: as store_latents gives it
    up:   [heads * (key + value), rank], each head's key, without the part that turns, and value
    rows: starts, lengths and what bounds them;  lora: what adapters of the rows add to `up`: down
          [B, a, rank] and what it goes up to, [B, a, heads, key] and [B, a, heads, value]
    """
    heads, rank = query.shape[1], up.shape[1]
    turning = cache.keys.shape[-1] - rank
    still, turned = query.split((query.shape[2] - turning, turning), 2)
    halves = up.unflatten(0, (heads, -1))  # [heads, key + value, rank]
    keys, values = halves.split((still.shape[2], halves.shape[1] - still.shape[2]), 1)
    absorbed = torch.einsum("bhk,hkr->bhr", still, keys)
    if lora is not None:
        down, of_keys, of_values = lora
        absorbed = absorbed + torch.einsum("bhk,bahk,bar->bhr", still, of_keys, down)
    summed = decode_attention(
        torch.cat((absorbed, turned), 2),
        replace(cache, values=cache.keys[..., :rank]),
        *rows,
        scores,
        positions=positions,
    ).unflatten(1, (heads, rank))
    out = torch.einsum("bhr,hvr->bhv", summed, values)
    if lora is not None:
        out = out + torch.einsum("bhr,bar,bahv->bhv", summed, down, of_values)
    return out.flatten(1)


def _relative_scores(relative: RelativeBias, first: int, queries: int, keys: int) -> Tensor:
    """The bias of queries first..first+queries-1 on keys 0..keys-1: [heads, queries, keys].

    A score depends on k - q alone, so each query's row is a window of one line of distances.
    """
    nearest, farthest = keys - first, first + queries - 1
    distances = torch.arange(-farthest, nearest, device=relative.table.device)
    distance_indices = distances.clamp(-relative.reach, relative.reach) + relative.reach
    return relative.table[:, distance_indices].unfold(-1, keys, 1).flip(1)


def _for_heads(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values [kv_heads, T, head_size] in the query's type, repeated so that every query
    head has its own."""
    part = part.to(query.dtype)
    return part.repeat_interleave(query.shape[1] // part.shape[0], dim=0)


def span_blocks(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """The blocks of rows with `counts` tokens, which follow each other."""
    starts = itertools.accumulate(counts, initial=0)
    return [
        (start, count, first)
        for start, count in zip(starts, counts, strict=False)
        for first in range(0, count, SPAN_QUERIES)
    ]
