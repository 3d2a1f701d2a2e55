"""Matrix times vector in the Triton language: what a step of one row consists of.

Every program owns a few rows of a weight and reads them in wide pieces, each weight once. With
EARLY set, a kernel starts while the one before still runs (programmatic dependent launch) and
fetches its first weights, which nobody writes, before it waits for that one's results.

A norm before a projection needs no kernel of its own. With gain g and bias b,
W (g (x - mean) / deviation + b) = (W g x - mean * W g) / deviation + W b: the program sums x and
its squares while it multiplies; W g and W b plus the bias are known when the model is loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a code in fused.ACTIVATION_CODES."""
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 5:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def _tile(
    weight, base, rows, columns, first, OUT: tl.constexpr, IN: tl.constexpr, EVEN: tl.constexpr
):
    """Columns from `first` on of the rows of a weight; zeros outside."""
    if EVEN:
        tile = tl.load(weight + base + first, eviction_policy="evict_first")
    else:
        mask = (rows < OUT)[:, None] & (first + columns < IN)
        tile = tl.load(weight + base + first, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _eighths(tile, piece, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Products summed eight at a time, as the threads hold them."""
    return tl.sum(tl.reshape(tile.to(tl.float32) * piece, [ROWS, BLOCK // 8, 8]), 2)


@triton.jit
def multiply(
    x,
    gain,
    weight,
    rows,
    other_weight,
    other_rows,
    first_tile,
    other_tile,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PAIRED: tl.constexpr,
    ROLLED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(W g x, W' g x, sum of x, sum of squares), whose first tiles are there already.

    x has the weight's type, so that both are held by the threads in the same way: another one
    costs up to a third. W' are more rows of the same or another weight, with PAIRED.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    base = rows[:, None].to(tl.int64) * IN + columns
    other_base = other_rows[:, None].to(tl.int64) * IN + columns
    product = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    other = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    tile = first_tile
    second = other_tile
    if ROLLED:
        for first in tl.range(0, IN, BLOCK):
            more = first + BLOCK < IN
            coming = tl.load(
                weight + base + first + BLOCK,
                mask=more & (rows < OUT)[:, None] & (first + BLOCK + columns < IN),
                other=0.0,
                eviction_policy="evict_first",
            )
            piece = tl.load(x + first + columns, mask=first + columns < IN, other=0.0)
            piece = piece.to(tl.float32)
            if NORM > 0:
                total += piece
                squares += piece * piece
                held = tl.load(gain + first + columns, mask=first + columns < IN, other=0.0)
                piece = piece * held.to(tl.float32)
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(second, piece, ROWS, BLOCK)
                second = tl.load(
                    other_weight + other_base + first + BLOCK,
                    mask=more & (other_rows < OUT)[:, None] & (first + BLOCK + columns < IN),
                    other=0.0,
                    eviction_policy="evict_first",
                )
            tile = coming
    else:
        for first in tl.static_range(0, IN, BLOCK):
            if first > 0:
                tile = _tile(weight, base, rows, columns, first, OUT, IN, EVEN)
                if PAIRED:
                    second = _tile(
                        other_weight, other_base, other_rows, columns, first, OUT, IN, EVEN
                    )
            if IN % BLOCK == 0:
                piece = tl.load(x + first + columns).to(tl.float32)
            else:
                piece = tl.load(x + first + columns, mask=first + columns < IN, other=0.0)
                piece = piece.to(tl.float32)
            if NORM > 0:
                total += piece
                squares += piece * piece
                if IN % BLOCK == 0:
                    held = tl.load(gain + first + columns)
                else:
                    held = tl.load(gain + first + columns, mask=first + columns < IN, other=0.0)
                piece = piece * held.to(tl.float32)
            product += _eighths(tile, piece, ROWS, BLOCK)
            if PAIRED:
                other += _eighths(second, piece, ROWS, BLOCK)
    return tl.sum(product, 1), tl.sum(other, 1), total, squares


@triton.jit
def _normalized(value, sums, total, squares, eps, IN: tl.constexpr, NORM: tl.constexpr):
    """W g x as it would be of the normalized x, but for the offset."""
    if NORM > 0:
        variance = tl.sum(tl.sum(squares, 1), 0) / IN
        if NORM == 1:
            mean = tl.sum(tl.sum(total, 1), 0) / IN
            variance = variance - mean * mean
            value = value - mean * sums
        value = value * (1.0 / tl.sqrt(variance + eps))
    return value


@triton.jit
def _vector(values, rows, OUT: tl.constexpr):
    """One float32 per row of the weight."""
    return tl.load(values + rows, mask=rows < OUT, other=0.0).to(tl.float32)


@triton.jit
def gemv(
    x,
    gain,
    weight,
    gate_weight,
    offsets,
    gate_offsets,
    sums,
    gate_sums,
    residual,
    out,
    rounded,
    eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = residual + act(W norm(x) + b) * (W2 norm(x) + b2), the parts as the flags say.

    ROUNDED: the result goes to `rounded` as well, in its type.
    """
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = OUT % ROWS == 0 and IN % BLOCK == 0
    base = rows[:, None].to(tl.int64) * IN + columns
    tile = _tile(weight, base, rows, columns, 0, OUT, IN, even)
    gate_tile = tile
    if GATED:
        gate_tile = _tile(gate_weight, base, rows, columns, 0, OUT, IN, even)
    offset = tl.zeros([ROWS], tl.float32)
    gate_offset = tl.zeros([ROWS], tl.float32)
    row_sums = tl.zeros([ROWS], tl.float32)
    gate_row_sums = tl.zeros([ROWS], tl.float32)
    added = tl.zeros([ROWS], tl.float32)
    if OFFSET:
        offset = _vector(offsets, rows, OUT)
        if GATED:
            gate_offset = _vector(gate_offsets, rows, OUT)
    if NORM == 1:
        row_sums = _vector(sums, rows, OUT)
        if GATED:
            gate_row_sums = _vector(gate_sums, rows, OUT)
    if EARLY:
        gdc_wait()
    if RESIDUAL:
        added = _vector(residual, rows, OUT)
    value, gate, total, squares = multiply(
        x,
        gain,
        weight,
        rows,
        gate_weight,
        rows,
        tile,
        gate_tile,
        OUT,
        IN,
        NORM,
        GATED,
        ROLLED,
        even,
        ROWS,
        BLOCK,
    )
    value = _normalized(value, row_sums, total, squares, eps, IN, NORM) + offset
    value = activate(value, ACTIVATION)
    if GATED:
        gate = _normalized(gate, gate_row_sums, total, squares, eps, IN, NORM)
        value = value * (gate + gate_offset)
    value = value + added
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=rows < OUT)
    if ROUNDED:
        tl.store(rounded + rows, value.to(rounded.dtype.element_ty), mask=rows < OUT)


@triton.jit
def gemv_heads(
    x,
    gain,
    weight,
    offsets,
    sums,
    query,
    keys,
    values,
    starts,
    positions,
    cosines,
    sines,
    pool_tokens,
    eps,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Query, key and value of one token: queries to `query`, the rest to its place in the cache.

    A program owns ROWS pairs of features that rotary positions would turn together (HALF of each
    head's pairs do turn), so that it can turn them.
    """
    if EARLY:
        gdc_launch_dependents()
    OUT: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = pairs % (SIZE // 2)
    head = pairs // (SIZE // 2)
    lower = tl.where(pair < HALF, pair, pair + HALF)
    upper = lower + tl.where(pair < HALF, HALF, SIZE // 2 - HALF)
    rows = head * SIZE + lower
    other_rows = head * SIZE + upper
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = (OUT // 2) % ROWS == 0 and IN % BLOCK == 0
    inside = pairs < OUT // 2
    base = rows[:, None].to(tl.int64) * IN + columns
    other_base = other_rows[:, None].to(tl.int64) * IN + columns
    tile = _tile(weight, base, rows, columns, 0, OUT, IN, even)
    other_tile = _tile(weight, other_base, other_rows, columns, 0, OUT, IN, even)
    offset = tl.zeros([ROWS], tl.float32)
    other_offset = tl.zeros([ROWS], tl.float32)
    row_sums = tl.zeros([ROWS], tl.float32)
    other_sums = tl.zeros([ROWS], tl.float32)
    if OFFSET:
        offset = _vector(offsets, rows, OUT)
        other_offset = _vector(offsets, other_rows, OUT)
    if NORM == 1:
        row_sums = _vector(sums, rows, OUT)
        other_sums = _vector(sums, other_rows, OUT)
    position = tl.load(positions)
    slot = tl.load(starts) + position
    if HALF > 0:
        turns = (pair < HALF) & (head < HEADS + KV_HEADS) & inside
        cosine = tl.load(cosines + position * HALF + pair, mask=turns, other=1.0)
        sine = tl.load(sines + position * HALF + pair, mask=turns, other=0.0)
    if EARLY:
        gdc_wait()
    low, high, total, squares = multiply(
        x,
        gain,
        weight,
        rows,
        weight,
        other_rows,
        tile,
        other_tile,
        OUT,
        IN,
        NORM,
        True,
        ROLLED,
        even,
        ROWS,
        BLOCK,
    )
    low = _normalized(low, row_sums, total, squares, eps, IN, NORM) + offset
    high = _normalized(high, other_sums, total, squares, eps, IN, NORM) + other_offset
    if HALF > 0:
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    kind = query.dtype.element_ty
    asks = inside & (head < HEADS)
    tl.store(query + rows, low.to(kind), mask=asks)
    tl.store(query + other_rows, high.to(kind), mask=asks)
    is_key = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = inside & (head >= HEADS + KV_HEADS)
    place = (((head - HEADS) % KV_HEADS).to(tl.int64) * pool_tokens + slot) * SIZE
    tl.store(keys + place + lower, low.to(kind), mask=is_key)
    tl.store(keys + place + upper, high.to(kind), mask=is_key)
    tl.store(values + place + lower, low.to(kind), mask=is_value)
    tl.store(values + place + upper, high.to(kind), mask=is_value)


@triton.jit
def gemv_largest(
    x,
    gain,
    weight,
    offsets,
    sums,
    largest,
    places,
    eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of ROWS values of W norm(x) + b, and where it is: the first of equal ones."""
    if EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    even: tl.constexpr = OUT % ROWS == 0 and IN % BLOCK == 0
    base = rows[:, None].to(tl.int64) * IN + columns
    tile = _tile(weight, base, rows, columns, 0, OUT, IN, even)
    offset = tl.zeros([ROWS], tl.float32)
    row_sums = tl.zeros([ROWS], tl.float32)
    if OFFSET:
        offset = _vector(offsets, rows, OUT)
    if NORM == 1:
        row_sums = _vector(sums, rows, OUT)
    if EARLY:
        gdc_wait()
    value, _, total, squares = multiply(
        x,
        gain,
        weight,
        rows,
        weight,
        rows,
        tile,
        tile,
        OUT,
        IN,
        NORM,
        False,
        ROLLED,
        even,
        ROWS,
        BLOCK,
    )
    value = _normalized(value, row_sums, total, squares, eps, IN, NORM) + offset
    value = tl.where(rows < OUT, value, -float("inf"))
    top, place = tl.max(value, 0, return_indices=True)
    tl.store(largest + tl.program_id(0), top)
    tl.store(places + tl.program_id(0), tl.program_id(0) * ROWS + place)
