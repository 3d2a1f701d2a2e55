"""Attention of several new tokens per sequence, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference, reference_attention
from launcher_scripts.kernels.cuda.attention_tile import (
    LOG2_E,
    MIN_SIDE,
    capped,
    reached,
    tile_blocks,
    tile_tokens,
)
from launcher_scripts.kernels.cuda.compiling import (
    HOPPER,
    has_gluon,
    launcher,
    pdl_options,
    traits_of,
)
from launcher_scripts.kernels.cuda.elementwise import for_products, in_halves
from launcher_scripts.kernels.operands import (
    QUERIES_PER_TILE,
    SPAN_QUERIES,
    WIDEST_PROMPT_HEAD,
    AttentionScores,
    Heads,
    LayerCache,
    Spans,
    VarlenBatch,
)


@triton.jit
def _pieces(base, tokens, features, count, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """[tokens, features] of one head, zeros outside the row's `count` tokens."""
    mask = (tokens < count)[:, None] & (features < SIZE)[None, :]
    where = base + tokens[:, None].to(tl.int64) * WIDTH + features[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _scores(query, key, queries, keys, count, bias, scale, reach, RELATIVE: tl.constexpr):
    """float32 [queries, keys], whose powers of two the softmax wants; -inf from `count` keys on."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    if RELATIVE:
        scores += tl.load(bias + reached(keys[None, :] - queries[:, None], reach)) * LOG2_E
    return tl.where((keys < count)[None, :], scores, -float("inf"))


@triton.jit
def attend_blocks(
    qkv,
    blocks,
    bias,
    out,
    scale,
    reach,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RELATIVE: tl.constexpr,
    USE_PDL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: one head of QUERIES tokens of one row, as a line of `blocks` says.

    The softmax runs along with the sum (Dao 2023), in float32 and by powers of two. Only lines
    without tokens leave nothing behind.
    """
    if USE_PDL:
        gdc_launch_dependents()
    line = blocks + tl.program_id(0) * 3
    head = tl.program_id(1)
    start = tl.load(line)
    count = tl.load(line + 1).to(tl.int32)
    first = tl.load(line + 2).to(tl.int32)
    if first >= count:
        return
    width: tl.constexpr = 3 * HEADS * SIZE
    features = tl.arange(0, BLOCK)
    queries = first + tl.arange(0, QUERIES)
    base = qkv + start * width + head * SIZE
    bias += head * (2 * reach + 1)
    if USE_PDL:
        gdc_wait()
    query = _pieces(base, queries, features, count, width, SIZE)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK], tl.float32)
    for past in tl.range(0, count, KEYS):
        keys = past + tl.arange(0, KEYS)
        key = _pieces(base + HEADS * SIZE, keys, features, count, width, SIZE)
        value = _pieces(base + 2 * HEADS * SIZE, keys, features, count, width, SIZE)
        scores = _scores(query, key, queries, keys, count, bias, scale, reach, RELATIVE)
        m_new = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    target = out + (start + queries[:, None]) * (HEADS * SIZE) + head * SIZE + features[None, :]
    mask = (queries < count)[:, None] & (features < SIZE)[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_spans(
    qkv: Tensor,
    heads: Heads,
    spans: Spans,
    scores: AttentionScores,
    *,
    window: int = 0,
) -> Tensor:
    """See reference.attend_spans."""
    if window or scores.softcap is not None or heads.num_kv_heads != heads.num_heads:
        return reference_attention.attend_spans(qkv, heads, spans, scores, window=window)
    relative = scores.relative
    out = qkv.new_empty(qkv.shape[0], heads.num_heads * heads.head_size)
    launcher(attend_blocks, (spans.blocks.shape[0], heads.num_heads))(
        qkv,
        spans.blocks,
        spans.blocks if relative is None else relative.table,
        out,
        scores.scale,
        0 if relative is None else relative.reach,
        HEADS=heads.num_heads,
        SIZE=heads.head_size,
        BLOCK=max(MIN_SIDE, triton.next_power_of_2(heads.head_size)),
        RELATIVE=relative is not None,
        QUERIES=SPAN_QUERIES,
        KEYS=64 if qkv.dtype != torch.float32 else 32,
        num_warps=4,
        num_stages=1,
        **pdl_options(qkv),
    )
    return out


WIDE_HEAD = 128  # wider ones take more registers and shared memory
FEWEST_LONE_HEADS = 128  # programs of Hopper's kernel, about one a multiprocessor


@triton.jit(do_not_specialize=["pool_tokens"])
def attend_prompts(
    query,
    keys,
    values,
    table,
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
    BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program: half a tile of one row's queries (see VarlenBatch.tiles) and one head.

    The softmax runs along with the sum, in float32 and by powers of two (Dao et al. 2022). Keys
    that all queries of the tile may see need no mask.

    WINDOW: how many tokens a query sees, its own included; 0: all.  SOFTCAP: of scores; 0: none
    """
    tile, before = tiles + tl.program_id(0) // 2 * 4, tl.program_id(0) % 2 * QUERIES
    tokens = tl.load(tile + 1).to(tl.int32)
    head = tl.program_id(1)
    first = tl.load(tile) + before
    start = tl.load(tile + 2)
    past = tl.load(tile + 3).to(tl.int32) + before
    count = tl.minimum(tokens - before, QUERIES)
    number = tl.arange(0, QUERIES)
    features = tl.arange(0, BLOCK)
    mask = (number < tl.abs(tokens) - before)[:, None] & (features < SIZE)[None, :]
    offset = ((first + number)[:, None] * HEADS + head) * SIZE + features[None, :]
    if count <= 0:  # these only fill the step up
        tl.store(out + offset, tl.zeros([QUERIES, BLOCK], out.dtype.element_ty), mask=mask)
        return
    rows = tl.load(query + offset, mask=mask, other=0.0).to(tl.float32)
    rows = for_products(rows, keys.dtype.element_ty, query.dtype.element_ty)
    cache = keys, values, (head // GROUP) * pool_tokens.to(tl.int64) * SIZE
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
        lower, upper = tile_blocks(table, start + begin, begin < end, TILE, BLOCK_TOKENS)
        for token in range(begin, end, TILE):
            located = tile_tokens(lower, upper, start + token, TILE, BLOCK_TOKENS)
            following = token + TILE
            lower, upper = tile_blocks(
                table, start + following, following < end, TILE, BLOCK_TOKENS
            )
            m, total, acc = _add_keys(
                *(m, total, acc, rows, cache, located, token, past + number, past + count),
                *(scale, (slope, bias, reach), ALIBI, RELATIVE, WINDOW, SOFTCAP, masked == 1),
                *(SIZE, BLOCK, TILE, PRECISION, PTX),
            )
    if WINDOW > 0:  # rows past the last query may see nothing
        total = tl.maximum(total, 1e-30)
    result = acc / total[:, None]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(
    m,
    total,
    acc,
    rows,
    cache,
    located,
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

    cache: keys, values, where the head begins in them;  located: the tile's tokens there
    gains: slope, bias, reach of scores
    """
    keys, values, pool = cache
    slope, bias, max_distance = gains
    tokens = token + tl.arange(0, TILE)
    features = tl.arange(0, BLOCK)
    where = pool + located[:, None] * SIZE + features[None, :]
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
            scores += tl.load(bias + reached(distance, max_distance)) * LOG2_E
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


def _has_wide_tiles(query: Tensor, cache: LayerCache, scores: AttentionScores, window: int) -> bool:
    """Return whether hopper_attention takes these heads: of 16 bits, with scores as they are; it
    copies keys and values block by block. Heads with keys of their own need many tokens, since few
    give it too few programs."""
    if traits_of(query.device).capability != HOPPER or not has_gluon():
        return False
    tokens, num_heads, size = query.shape
    plain = scores.slopes is None and scores.sinks is None and scores.relative is None
    in_pairs = num_heads // cache.keys.shape[0] % 2 == 0
    return (
        query.dtype == cache.keys.dtype != torch.float32
        and cache.aligned
        and size in (64, 128)
        and (in_pairs or tokens // QUERIES_PER_TILE * num_heads >= FEWEST_LONE_HEADS)
        and plain
        and not window
        and scores.softcap is None
    )


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
    if _has_wide_tiles(query, cache, scores, window):
        from launcher_scripts.kernels.cuda.hopper_attention import group_attention

        return group_attention(query, cache, spans.tiles, scores.scale)
    slopes, relative, sinks = scores.slopes, scores.relative, scores.sinks
    out = query.new_empty(tokens, num_heads * size)
    wide = size > WIDE_HEAD
    exact = query.dtype == torch.float32
    empty = cache.arrivals if cache.arrivals is not None else spans.tiles
    launcher(attend_prompts, (2 * spans.tiles.shape[0], num_heads))(
        query,
        cache.keys,
        cache.values,
        cache.entries,
        spans.tiles,
        empty if slopes is None else slopes,
        empty if sinks is None else sinks,
        empty if relative is None else relative.table,
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
        QUERIES=QUERIES_PER_TILE // 2,
        TILE=(16 if wide else 32) if exact else 64,
        BLOCK_TOKENS=cache.block_tokens,
        PRECISION="ieee" if exact else "tf32",
        PTX=traits_of(query.device).runs_ptx,
        num_warps=8 if wide else 4,
        num_stages=1 if exact else 2 if wide else 3,
    )
    return out
