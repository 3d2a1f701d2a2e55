"""Attention over a tile of keys and values, in the Triton language.

Attention of one new token per row, with matrix products; for steps of many rows.

The query heads that share keys and values are one side of a product, so these are read once, and
the arithmetic units are left to the softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.elementwise import (
    BYTES,
    cache_token,
    for_products,
    in_halves,
    kept,
    prefetch,
)
from launcher_scripts.kernels.cuda.norm import store_expected

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_SIDE = 16  # of a matrix product


@triton.jit
def tile_blocks(table, first, present, TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Blocks of the tile from address `first` on, for tile_tokens; none is read without `present`.

    A tile that is no larger than a block is in one or two of them. Loops look up the next tile's
    while they wait for this one's tokens.
    """
    if BLOCK_TOKENS >= TILE:
        lower = tl.load(table + first // BLOCK_TOKENS, mask=present, other=0)
        upper = tl.load(table + (first + TILE - 1) // BLOCK_TOKENS, mask=present, other=0)
    elif BLOCK_TOKENS > 0:
        lower = tl.load(table + (first + tl.arange(0, TILE)) // BLOCK_TOKENS, mask=present, other=0)
        upper = lower
    else:
        lower = tl.full((), 0, tl.int32)
        upper = lower
    return lower, upper


@triton.jit
def tile_tokens(lower, upper, first, TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Cache tokens, int64 [TILE], of the tile from address `first` on."""
    tokens = first.to(tl.int64) + tl.arange(0, TILE)
    if BLOCK_TOKENS >= TILE:
        begin = first // BLOCK_TOKENS * BLOCK_TOKENS
        block = tl.where(tokens < begin + BLOCK_TOKENS, lower, upper - 1)
        tokens = block.to(tl.int64) * BLOCK_TOKENS + (tokens - begin)
    elif BLOCK_TOKENS > 0:
        tokens = lower.to(tl.int64) * BLOCK_TOKENS + tokens % BLOCK_TOKENS
    return tokens


@triton.jit
def load_keys_values(
    cache,
    located,
    tokens,
    last,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of some of a row's tokens; zeros from `last` on.

    cache: keys, values, and where the head begins in them;  located: the tokens in it
    """
    keys, values, pool = cache
    features = tl.arange(0, BLOCK)
    where = pool + located[:, None] * SIZE + features[None, :]
    mask = (tokens < last)[:, None] & (features < SIZE)[None, :]
    key = tl.load(keys + where, mask=mask, other=0.0)
    return key, tl.load(values + where, mask=mask, other=0.0)


@triton.jit
def _prefetch(
    keys,
    values,
    pool,
    table,
    first,
    count,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Prefetch `count` of a row's tokens from address `first` on, TOKENS at most."""
    if TOKENS > 0:
        line: tl.constexpr = BYTES * 8 // keys.dtype.element_ty.primitive_bitwidth
        lines: tl.constexpr = TOKENS * BLOCK // line
        number = tl.minimum(tl.arange(0, lines) * line, tl.maximum(count * SIZE - 1, 0))
        token = cache_token(table, first + number // SIZE, BLOCK_TOKENS)
        where = pool + token * SIZE + number % SIZE
        prefetch(keys + where)
        prefetch(values + where)


@triton.jit
def reached(distance, reach):
    """Return the offsets of distances in a table of biases (see RelativeBias)."""
    return tl.minimum(tl.maximum(distance, -reach), reach) + reach


@triton.jit
def bonus_of(
    tokens,
    slope,
    length,
    bias,
    pos,
    reach,
    last,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """Return the bias of a score by its key's distance; -inf from `last` on."""
    mask = tokens < last
    bonus = tl.zeros(tokens.shape, tl.float32)
    if ALIBI:
        bonus += slope * (tokens - (length - 1)).to(tl.float32)
    if RELATIVE:
        bonus += tl.load(bias + reached(tokens - pos, reach), mask=mask, other=0.0)
    return tl.where(mask, bonus, -float("inf"))


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP); 0: the scores."""
    if SOFTCAP > 0:
        decay = tl.exp(-2 / SOFTCAP * tl.abs(scores))  # never overflows
        size = SOFTCAP * (1 - decay) / (1 + decay)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def add_sink(m, total, acc, sink):
    """An online softmax with one score more, which is of no token."""
    m_new = tl.maximum(m, sink)
    alpha = tl.exp(m - m_new)
    total = total * alpha + tl.exp(sink - m_new)
    return m_new, total, acc * (alpha[:, None] if len(acc.shape) == 2 else alpha)


@triton.jit
def add_tile(m, total, acc, key, value, scaled, bonus, SOFTCAP: tl.constexpr):
    scores = capped(tl.sum(key.to(tl.float32) * scaled[None, :], 1), SOFTCAP) + bonus
    m_new = tl.maximum(m, tl.max(scores, 0))
    alpha = tl.exp(m - m_new)
    p = tl.exp(scores - m_new)
    total = total * alpha + tl.sum(p, 0)
    acc = acc * alpha + tl.sum(p[:, None] * value.to(tl.float32), 0)
    return m_new, total, acc


@triton.jit
def summed(source, stride, mask, PARTS: tl.constexpr):
    """Values that a projection left in parts, in float32."""
    out = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        out += tl.load(source + part * stride, mask=mask, other=0.0)
    return out


@triton.jit
def apply_rotary(source, features, held, stride, rotary, PARTS: tl.constexpr, HALF: tl.constexpr):
    """Features of heads that begin at `source`, in float32, the first 2 * HALF rotated.

    held: which features there are;  rotary: cosines and sines of all positions, and the position
    """
    cosines, sines, pos = rotary
    out = summed(source + features, stride, held, PARTS)
    if HALF > 0:
        rotates = features < 2 * HALF
        upper = features >= HALF
        partner = tl.where(upper, features - HALF, features + HALF)
        angle = pos * HALF + tl.where(upper, features - HALF, features)
        other = summed(source + partner, stride, held & rotates, PARTS)
        cosine = tl.load(cosines + angle, mask=rotates, other=1.0)
        sine = tl.load(sines + angle, mask=rotates, other=0.0)
        out = out * cosine + tl.where(upper, other, -other) * sine
    return out


@triton.jit
def part_of(old, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """(old, first and last + 1 of this part of that many tokens, how many parts have any)"""
    share = tl.cdiv(tl.maximum(1, tl.cdiv(old, SPLITS)), TILE) * TILE
    first = split * share
    return old, first, tl.minimum(first + share, old), tl.maximum(1, tl.cdiv(old, share))


@triton.jit
def store_head(target, position, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    features = tl.arange(0, BLOCK)
    where = target + position * SIZE + features
    tl.store(where, values.to(target.dtype.element_ty), mask=features < SIZE)


@triton.jit
def merge_parts(
    partial,
    weights,
    out,
    group,
    parts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Weigh the parts of one row and head by their softmax sums; empty parts weigh nothing.

    The loads bypass L1, which may hold old values of other programs' parts.
    """
    features = tl.arange(0, BLOCK)
    mask = features < SIZE
    splits = tl.arange(0, SPLIT_BLOCK)
    present = splits < parts
    part = group * SPLITS + splits
    m = tl.load(weights + part * 2, mask=present, other=-1e30, cache_modifier=".cg")
    total = tl.load(weights + part * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
    share = tl.exp(m - tl.max(m, 0))
    acc = tl.load(
        partial + part[:, None] * SIZE + features[None, :],
        mask=present[:, None] & mask[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    value = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    store_head(out, group, value, SIZE, BLOCK)


@triton.jit
def merge_if_last(
    partial,
    weights,
    arrivals,
    out,
    group,
    parts,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Merge the parts of GROUP heads of a row, if this program is the last of them to end."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + group, 1, sem="acq_rel")
    if before == parts - 1:
        for member in tl.static_range(GROUP):
            head = group * GROUP + member
            merge_parts(partial, weights, out, head, parts, SIZE, BLOCK, SPLITS, SPLIT_BLOCK)
        tl.store(arrivals + group, 0)


@triton.jit
def newest_token(
    cache,
    offset,
    new,
    stride,
    rotary,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    stores=True,
):
    """The newest token's key and value, in float32.

    cache: keys and values;  place: [BLOCK], where its features are in them
    new:   where a projection left its key and value. With STORE they come from there, and go to
           their places in the cache
    """
    keys, values = cache
    new_key, new_value = new
    features = tl.arange(0, offset.shape[0])
    mask = features < SIZE
    if STORE:
        kind: tl.constexpr = keys.dtype.element_ty
        key = kept(apply_rotary(new_key, features, mask, stride, rotary, PARTS, HALF), kind)
        value = kept(summed(new_value + features, stride, mask, PARTS), kind)
        tl.store(keys + offset, key, mask=mask & stores)
        tl.store(values + offset, value, mask=mask & stores)
    else:
        key = tl.load(keys + offset, mask=mask, other=0.0)
        value = tl.load(values + offset, mask=mask, other=0.0)
    return key.to(tl.float32), value.to(tl.float32)


@triton.jit
def _gains(
    tokens,
    slope,
    length,
    bias,
    pos,
    reach,
    last,
    ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """Return the biases of scores [M, T] by the distance of the tokens [T]; -inf from `last` on."""
    gains = tl.where(tokens < last, 0.0, -float("inf"))[None, :]
    if ALIBI:
        gains = gains + slope[:, None] * (tokens - (length - 1)).to(tl.float32)[None, :]
    if RELATIVE:
        offset = reached(tokens - pos, reach)
        gains = gains + tl.load(bias[:, None] + offset[None, :])
    return gains


@triton.jit
def _add_tokens(
    m,
    total,
    acc,
    key,
    value,
    query,
    scale,
    gains,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    key, value = in_halves(key, PTX).to(query.dtype), in_halves(value, PTX).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    scores = capped(scores, SOFTCAP) + gains
    m_new = tl.maximum(m, tl.max(scores, 1))
    alpha = tl.exp(m - m_new)
    p = tl.exp(scores - m_new[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit(do_not_specialize=["pool_tokens"])
def attend_grouped(
    query,
    keys,
    values,
    table,
    starts,
    lengths,
    slopes,
    sinks,
    positions,
    bias,
    out,
    partial,
    weights,
    arrivals,
    cosines,
    sines,
    row_stats,
    pool_tokens,
    scale,
    reach,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    RELATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    USE_PDL: tl.constexpr,
    FRESH: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program: one row, GROUP query heads (padded to MEMBERS), one of SPLITS parts.

    See decode_attention.attend; the query is rounded to the compute type, or as loads.py says, and
    so are the weights of the values.
    """
    if USE_PDL:
        gdc_launch_dependents()
    if NORM > 0 and tl.program_id(2) == SPLITS:
        store_expected(row_stats, tl.program_id(1) == 0, STATE, NORM, STATE_PARTS, USE_PDL)
        return
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    old, first, last, parts = part_of(length - (1 if FRESH else 0), split, SPLITS, TILE)
    if first > 0 and first >= old:
        return
    pool, start = group * pool_tokens.to(tl.int64) * SIZE, tl.load(starts + row)
    pos = tl.load(positions + row).to(tl.int32) if RELATIVE or HALF > 0 else 0
    members, features = tl.arange(0, MEMBERS), tl.arange(0, BLOCK)
    heads = group * GROUP + tl.minimum(members, GROUP - 1)
    slope = tl.load(slopes + heads) if ALIBI else 0.0
    group_bias = bias + heads * (2 * reach + 1) if RELATIVE else 0
    lower, upper = tile_blocks(table, start + first, first < last, TILE, BLOCK_TOKENS)
    newest = pool + cache_token(table, start + old, BLOCK_TOKENS) * SIZE if FRESH else pool
    if USE_PDL:
        _prefetch(
            *(keys, values, pool, table, start + first, last - first),
            *(PREFETCH, SIZE, BLOCK, BLOCK_TOKENS),
        )
        gdc_wait()
    width: tl.constexpr = (HEADS + (2 * (HEADS // GROUP) if STORE else 0)) * SIZE
    queries, stride = query + row * width, tl.num_programs(0) * width
    mask = (features < SIZE)[None, :] & (members < GROUP)[:, None]
    source, rotary = queries + heads[:, None] * SIZE, (cosines, sines, pos)
    exact = apply_rotary(source, features[None, :], mask, stride, rotary, PARTS, HALF)
    rounded = for_products(exact, keys.dtype.element_ty, out.dtype.element_ty)
    total = tl.zeros([MEMBERS], tl.float32)
    m, acc = total - 1e30, tl.zeros([MEMBERS, BLOCK], tl.float32)
    if FRESH and split == 0:
        new = queries + (HEADS + group) * SIZE, queries + (HEADS + HEADS // GROUP + group) * SIZE
        key, value = newest_token(
            (keys, values), newest + features, new, stride, rotary, STORE, PARTS, SIZE, HALF
        )
        m = capped(tl.sum(exact * key[None, :], 1) * scale, SOFTCAP)
        if RELATIVE:
            m += tl.load(group_bias + reached(old - pos, reach))
        total += 1.0
        acc += value[None, :]
    if SINKS and split == 0:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + heads))
    for tile in range(first, last, TILE):
        tokens = tile + tl.arange(0, TILE)
        gains = _gains(tokens, slope, length, group_bias, pos, reach, last, ALIBI, RELATIVE)
        located = tile_tokens(lower, upper, start + tile, TILE, BLOCK_TOKENS)
        key, value = load_keys_values((keys, values, pool), located, tokens, last, SIZE, BLOCK)
        following = tile + TILE
        lower, upper = tile_blocks(table, start + following, following < last, TILE, BLOCK_TOKENS)
        m, total, acc = _add_tokens(
            m, total, acc, key, value, rounded, scale, gains, SOFTCAP, PRECISION, PTX
        )
    _finish_group(
        *(partial, weights, arrivals, out, row * (HEADS // GROUP) + group, split, parts),
        *(acc, m, total, MEMBERS, GROUP, SIZE, BLOCK, SPLITS, SPLIT_BLOCK),
    )


@triton.jit
def _finish_group(
    partial,
    weights,
    arrivals,
    out,
    pair,
    split,
    parts,
    acc,
    m,
    total,
    MEMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Store the outputs of a group; those of parts, which the last one to end merges."""
    members, features = tl.arange(0, MEMBERS), tl.arange(0, BLOCK)
    mask = (features < SIZE)[None, :] & (members < GROUP)[:, None]
    offset = pair * GROUP + tl.minimum(members, GROUP - 1)
    if SPLITS == 1:
        target = out + offset[:, None] * SIZE + features[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        part = offset * SPLITS + split
        tl.store(partial + part[:, None] * SIZE + features[None, :], acc, mask=mask)
        tl.store(weights + part * 2, m, mask=members < GROUP)
        tl.store(weights + part * 2 + 1, total, mask=members < GROUP)
        merge_if_last(
            *(partial, weights, arrivals, out, pair, parts),
            *(GROUP, SIZE, BLOCK, SPLITS, SPLIT_BLOCK),
        )
