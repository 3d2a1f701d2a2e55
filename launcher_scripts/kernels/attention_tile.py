"""What attention does with a tile of keys and values, for attention_kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys_values(keys, values, pool, tokens, last, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of some tokens; zeros from `last` on."""
    features = tl.arange(0, BLOCK)
    where = pool + tokens[:, None].to(tl.int64) * SIZE + features[None, :]
    mask = (tokens < last)[:, None] & (features < SIZE)[None, :]
    key = tl.load(keys + where, mask=mask, other=0.0)
    return key, tl.load(values + where, mask=mask, other=0.0)


@triton.jit
def bonus_of(
    tokens,
    slope,
    length,
    bias,
    position,
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
        place = tl.minimum(tl.maximum(tokens - position, -reach), reach) + reach
        bonus += tl.load(bias + place, mask=inside, other=0.0)
    return tl.where(inside, bonus, -float("inf"))


@triton.jit
def add_tile(largest, total, mixed, key, value, scaled, bonus):
    scores = tl.sum(key.to(tl.float32) * scaled[None, :], 1) + bonus
    top = tl.maximum(largest, tl.max(scores, 0))
    shrink = tl.exp(largest - top)
    chances = tl.exp(scores - top)
    total = total * shrink + tl.sum(chances, 0)
    mixed = mixed * shrink + tl.sum(chances[:, None] * value.to(tl.float32), 0)
    return top, total, mixed


@triton.jit
def summed(source, stride, mask, PARTS: tl.constexpr):
    """Values that a projection left in parts, in float32."""
    out = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        out += tl.load(source + part * stride, mask=mask, other=0.0)
    return out


@triton.jit
def turned(
    source,
    stride,
    cosines,
    sines,
    position,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head's features in float32, the first 2 * HALF turned by the position."""
    features = tl.arange(0, BLOCK)
    out = summed(source + features, stride, features < SIZE, PARTS)
    if HALF > 0:
        turns = features < 2 * HALF
        upper = features >= HALF
        partner = tl.where(upper, features - HALF, features + HALF)
        angle = position * HALF + tl.where(upper, features - HALF, features)
        other = summed(source + partner, stride, turns, PARTS)
        cosine = tl.load(cosines + angle, mask=turns, other=1.0)
        sine = tl.load(sines + angle, mask=turns, other=0.0)
        out = out * cosine + tl.where(upper, other, -other) * sine
    return out
