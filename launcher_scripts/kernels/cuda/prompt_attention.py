"""Attention of the new tokens of several rows over the key/value cache, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.attention_tile import LOG2_E, MIN_SIDE, capped, reached
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import traits_of
from launcher_scripts.kernels.cuda.e4m3 import for_products, in_halves
from launcher_scripts.kernels.operands import (
    QUERIES_PER_TILE,
    WIDEST_PROMPT_HEAD,
    AttentionScores,
    LayerCache,
    VarlenBatch,
)

WIDE_HEAD = 128  # wider ones take more registers and shared memory


@triton.jit(do_not_specialize=["pool_tokens"])
def attend_prompts(
    query,
    keys,
    values,
    tiles,
    slopes,
    sinks,
    bias,
    out,
    pool_tokens,
    scale,
    reach,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    RELATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program: a tile of one row's queries (see VarlenBatch.tiles) and one head.

    The softmax runs along with the sum, in float32 and by powers of two (Dao et al. 2022). Keys
    that all queries of the tile may see need no mask.

    WINDOW: how many tokens a query sees, its own included; 0: all.  SOFTCAP: of scores; 0: none
    """
    tile = tiles + tl.program_id(0) * 4
    count = tl.load(tile + 1).to(tl.int32)
    head = tl.program_id(1)
    first = tl.load(tile)
    start = tl.load(tile + 2)
    past = tl.load(tile + 3).to(tl.int32)
    number = tl.arange(0, QUERIES)
    features = tl.arange(0, BLOCK)
    asked = (number < tl.abs(count))[:, None] & (features < SIZE)[None, :]
    place = ((first + number)[:, None] * HEADS + head) * SIZE + features[None, :]
    if count <= 0:  # these only fill the step up
        tl.store(out + place, tl.zeros([QUERIES, BLOCK], out.dtype.element_ty), mask=asked)
        return
    rows = tl.load(query + place, mask=asked, other=0.0).to(tl.float32)
    rows = for_products(rows, keys.dtype.element_ty, query.dtype.element_ty)
    pool = ((head // GROUP) * pool_tokens.to(tl.int64) + start) * SIZE
    slope = tl.load(slopes + head) * LOG2_E if ALIBI else 0.0
    bias += head * (2 * reach + 1) if RELATIVE else 0
    m = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        m, total = m * 0 + tl.load(sinks + head) * LOG2_E, total + 1
    acc = tl.zeros([QUERIES, BLOCK], tl.float32)
    seen_by_any = tl.maximum(past + 1 - WINDOW, 0) // TILE * TILE if WINDOW > 0 else 0
    seen_by_all = seen_by_any if WINDOW > 0 else (past + 1) // TILE * TILE
    for masked in tl.static_range(2):
        begin, end = (seen_by_any, seen_by_all) if masked == 0 else (seen_by_all, past + count)
        for token in range(begin, end, TILE):
            m, total, acc = _add_keys(
                *(m, total, acc, rows, (keys, values, pool), token, past + number, past + count),
                *(scale, (slope, bias, reach), ALIBI, RELATIVE, WINDOW, SOFTCAP, masked == 1),
                *(SIZE, BLOCK, TILE, PRECISION, PTX),
            )
    if WINDOW > 0:  # rows past the last query may see nothing
        total = tl.maximum(total, 1e-30)
    result = acc / total[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=asked)


@triton.jit
def _add_keys(
    m,
    total,
    acc,
    rows,
    cache,
    token,
    positions,
    last,
    scale,
    gains,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """The sums with one tile of keys more; `last`: how many keys there are.

    cache: keys, values, where the row's begin in them;  gains: slope, bias, reach of scores
    """
    keys, values, pool = cache
    slope, bias, reach = gains
    tokens = token + tl.arange(0, TILE)
    features = tl.arange(0, BLOCK)
    where = pool + tokens[:, None] * SIZE + features[None, :]
    mask = (features < SIZE)[None, :]
    if MASKED:
        mask = mask & (tokens < last)[:, None]
    key = in_halves(_load(keys + where, mask, MASKED or SIZE < BLOCK), PTX).to(rows.dtype)
    scores = tl.dot(rows, tl.trans(key), input_precision=PRECISION)
    factor = scale * LOG2_E
    if MASKED or ALIBI or RELATIVE or SOFTCAP > 0:
        scores = capped(scores * factor, SOFTCAP * LOG2_E)
        if ALIBI:
            scores += slope * (tokens[None, :] - positions[:, None]).to(tl.float32)
        if RELATIVE:
            distance = tokens[None, :] - positions[:, None]
            scores += tl.load(bias + reached(distance, reach)) * LOG2_E
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
    else:  # scores are scaled by the multiply-add that subtracts their maximum
        m_new = tl.maximum(m, tl.max(scores, 1) * factor)
        p = tl.exp2(scores * factor - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    value = in_halves(_load(values + where, mask, MASKED or SIZE < BLOCK), PTX).to(rows.dtype)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """Copies without a mask are wider, and need no zeros."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)


def prompt_attention(
    query: Tensor,
    cache: LayerCache,
    spans: VarlenBatch,
    scores: AttentionScores,
    *,
    window: int = 0,
) -> Tensor:
    """See reference.prompt_attention."""
    tokens, num_heads, size = query.shape
    if spans.tiles is None or size > WIDEST_PROMPT_HEAD:
        return reference.prompt_attention(query, cache, spans, scores, window=window)
    slopes, relative, sinks = scores.slopes, scores.relative, scores.sinks
    out = query.new_empty(tokens, num_heads * size)
    wide = size > WIDE_HEAD
    exact = query.dtype == torch.float32
    nothing = cache.arrivals if cache.arrivals is not None else spans.tiles
    launcher(attend_prompts, (spans.tiles.shape[0], num_heads))(
        query,
        cache.keys,
        cache.values,
        spans.tiles,
        nothing if slopes is None else slopes,
        nothing if sinks is None else sinks,
        nothing if relative is None else relative.table,
        out,
        cache.keys.shape[1],
        scores.scale,
        0 if relative is None else relative.reach,
        HEADS=num_heads,
        GROUP=num_heads // cache.keys.shape[0],
        SIZE=size,
        BLOCK=max(MIN_SIDE, triton.next_power_of_2(size)),
        ALIBI=slopes is not None,
        SINKS=sinks is not None,
        RELATIVE=relative is not None,
        WINDOW=window,
        SOFTCAP=scores.softcap or 0.0,
        QUERIES=QUERIES_PER_TILE,
        TILE=(16 if wide else 32) if exact else 64,
        PRECISION="ieee" if exact else "tf32",
        PTX=traits_of(query.device).runs_ptx,
        num_warps=8 if wide else 4,
        num_stages=1 if exact else 2 if wide else 3,
    )
    return out
