"""What attention does with a tile of keys and values, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl

from launcher_scripts.kernels.cuda.e4m3 import kept

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_SIDE = 16  # of a matrix product


@triton.jit
def load_keys_values(keys, values, pool, tokens, last, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of some tokens; zeros from `last` on."""
    features = tl.arange(0, BLOCK)
    where = pool + tokens[:, None].to(tl.int64) * SIZE + features[None, :]
    mask = (tokens < last)[:, None] & (features < SIZE)[None, :]
    key = tl.load(keys + where, mask=mask, other=0.0)
    return key, tl.load(values + where, mask=mask, other=0.0)


@triton.jit
def reached(distance, reach):
    """Where a table of biases (see RelativeBias) has a distance."""
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
    """What a score gains by its key's distance; -inf from `last` on."""
    inside = tokens < last
    bonus = tl.zeros(tokens.shape, tl.float32)
    if ALIBI:
        bonus += slope * (tokens - (length - 1)).to(tl.float32)
    if RELATIVE:
        bonus += tl.load(bias + reached(tokens - pos, reach), mask=inside, other=0.0)
    return tl.where(inside, bonus, -float("inf"))


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP); 0: the scores."""
    if SOFTCAP > 0:
        rest = tl.exp(-2 / SOFTCAP * tl.abs(scores))  # never overflows
        size = SOFTCAP * (1 - rest) / (1 + rest)
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
def store_head(target, place, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    features = tl.arange(0, BLOCK)
    where = target + place * SIZE + features
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
    held = features < SIZE
    splits = tl.arange(0, SPLIT_BLOCK)
    present = splits < parts
    part = group * SPLITS + splits
    m = tl.load(weights + part * 2, mask=present, other=-1e30, cache_modifier=".cg")
    total = tl.load(weights + part * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
    share = tl.exp(m - tl.max(m, 0))
    acc = tl.load(
        partial + part[:, None] * SIZE + features[None, :],
        mask=present[:, None] & held[None, :],
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
    place,
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
    features = tl.arange(0, place.shape[0])
    held = features < SIZE
    if STORE:
        kind: tl.constexpr = keys.dtype.element_ty
        key = kept(apply_rotary(new_key, features, held, stride, rotary, PARTS, HALF), kind)
        value = kept(summed(new_value + features, stride, held, PARTS), kind)
        tl.store(keys + place, key, mask=held & stores)
        tl.store(values + place, value, mask=held & stores)
    else:
        key = tl.load(keys + place, mask=held, other=0.0)
        value = tl.load(values + place, mask=held, other=0.0)
    return key.to(tl.float32), value.to(tl.float32)
