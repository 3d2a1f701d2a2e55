"""One row's projection to queries and its attention to the encoder's input in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.attention_tile import (
    add_tile,
    bonus_of,
    load_keys_values,
    store_head,
)
from launcher_scripts.kernels.row_product_kernel import (
    load_moments,
    load_tile,
    mean_and_scale,
    multiply,
    normalized,
    row_places,
    vector,
)


@triton.jit
def ask_and_attend(
    x,
    moments,
    weight,
    offsets,
    sums,
    keys,
    values,
    starts,
    lengths,
    positions,
    bias,
    out,
    pool_tokens,
    scale,
    reach,
    eps,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    RELATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one head, whose part of the weight its threads hold at once.

    ROWS and BLOCK are the head's features and the inputs, as powers of two. With EARLY the weight,
    keys and values are fetched before the kernel that this one waits for ends. See gemv and attend.
    """
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0)
    features = tl.arange(0, ROWS)
    rows = head * SIZE + features
    columns = tl.arange(0, BLOCK)[None, :]
    tile = load_tile(
        weight, row_places(rows, columns, IN), rows, columns, 0, HEADS * SIZE, IN, False
    )
    offset = vector(offsets, rows, HEADS * SIZE, OFFSET)
    row_sums = vector(sums, rows, HEADS * SIZE, NORM == 1)
    last = tl.load(lengths).to(tl.int32)
    position = tl.load(positions).to(tl.int32)
    pool = (head * pool_tokens.to(tl.int64) + tl.load(starts)) * SIZE
    tokens = tl.arange(0, TILE)
    key, value = load_keys_values(keys, values, pool, tokens, last, SIZE, ROWS)
    bias += head * (2 * reach + 1) if RELATIVE else 0
    if EARLY:
        gdc_wait()
    total, squares = load_moments(moments, NORM, PARTS, SPREAD)
    query, _ = multiply(
        x,
        weight,
        rows,
        weight,
        rows,
        tile,
        tile,
        HEADS * SIZE,
        IN,
        False,
        False,
        False,
        ROWS,
        BLOCK,
        EARLY,
    )
    mean, norm_scale = mean_and_scale(total, squares, eps, IN, NORM)
    query = normalized(query, row_sums, mean, norm_scale, NORM) + offset
    scaled = tl.where(features < SIZE, query, 0.0) * scale
    largest = -1e30
    seen = 0.0
    mixed = tl.zeros([ROWS], tl.float32)
    for _ in range(0, last, TILE):
        later = load_keys_values(keys, values, pool, tokens + TILE, last, SIZE, ROWS)
        bonus = bonus_of(tokens, 0.0, last, bias, position, reach, last, False, RELATIVE)
        largest, seen, mixed = add_tile(largest, seen, mixed, key, value, scaled, bonus)
        tokens, key, value = tokens + TILE, later[0], later[1]
    store_head(out, head, mixed / seen, SIZE, ROWS)
