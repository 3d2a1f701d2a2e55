"""Queries, keys and values of a step of one row, in the Triton language; see gemv.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.cuda.e4m3 import kept
from launcher_scripts.kernels.cuda.gemv import linear_arguments
from launcher_scripts.kernels.cuda.gemv_tile import begin, multiply, scales_of, vector
from launcher_scripts.kernels.cuda.lora import add_delta, load_inner, load_up, lora_arguments
from launcher_scripts.kernels.cuda.norm import load_row_stats, norm_terms, normalized
from launcher_scripts.kernels.cuda.tiles import row_tile
from launcher_scripts.kernels.operands import (
    Heads,
    Hidden,
    LayerCache,
    Linear,
    RotaryTable,
    StepRows,
)


@triton.jit
def _features(pairs, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Heads of the pairs, which pairs of theirs those are, and the two features of each."""
    pair = pairs % (SIZE // 2)
    lower = tl.where(pair < HALF, pair, pair + HALF)
    upper = lower + tl.where(pair < HALF, HALF, SIZE // 2 - HALF)
    return pairs // (SIZE // 2), pair, lower, upper


@triton.jit(do_not_specialize=["pool_tokens"], do_not_specialize_on_alignment=["adapters"])
def gemv_heads(
    x,
    row_stats,
    weight,
    scales,
    offsets,
    sums,
    lora_up,
    lora_inner,
    adapters,
    query,
    keys,
    values,
    starts,
    positions,
    cosines,
    sines,
    pool_tokens,
    IN: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    LORA: tl.constexpr,
    USE_PDL: tl.constexpr,
    ROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Query, key and value of one token: queries to `query`, the rest to its place in the cache.

    A program owns ROWS pairs of features, each of which rotary positions rotate together; they
    rotate HALF of each head's pairs. LORA: see lora_arguments.
    """
    if USE_PDL:
        gdc_launch_dependents()
    OUT: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, pair, lower, upper = _features(pairs, SIZE, HALF)
    rows = head * SIZE + lower
    other_rows = head * SIZE + upper
    even: tl.constexpr = (OUT // 2) % ROWS == 0
    inside = pairs < OUT // 2
    begun = begin(weight, rows, OUT, IN, even, BLOCK)
    other_begun = begin(weight, other_rows, OUT, IN, even, BLOCK)
    row_scale = scales_of(scales, weight, rows, OUT)
    other_scale = scales_of(scales, weight, other_rows, OUT)
    offset = vector(offsets, rows, OUT, OFFSET)
    other_offset = vector(offsets, other_rows, OUT, OFFSET)
    row_sums = vector(sums, rows, OUT, NORM == 1)
    other_sums = vector(sums, other_rows, OUT, NORM == 1)
    up, other_up = load_up(lora_up, adapters, rows, other_rows, inside, LORA, True)
    position = tl.load(positions)
    slot = tl.load(starts) + position
    if HALF > 0:
        rotates = (pair < HALF) & (head < HEADS + KV_HEADS) & inside
        cosine = tl.load(cosines + position * HALF + pair, mask=rotates, other=1.0)
        sine = tl.load(sines + position * HALF + pair, mask=rotates, other=0.0)
    if USE_PDL:
        gdc_wait()
    total, squares = load_row_stats(row_stats, NORM, PARTS, SPREAD)
    inner, other_inner = load_inner(lora_inner, rows, other_rows, inside, LORA, True)
    low, high = multiply(x, begun, other_begun, OUT, IN, True, ROLLED, even, USE_PDL)
    mean, scale = norm_terms(total, squares, IN, NORM)
    low = normalized(low * row_scale, row_sums, mean, scale, NORM) + offset
    high = normalized(high * other_scale, other_sums, mean, scale, NORM) + other_offset
    low = add_delta(low, up, inner, LORA)
    high = add_delta(high, other_up, other_inner, LORA)
    if HALF > 0:
        low, high = low * cosine - high * sine, high * cosine + low * sine
    is_key = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    place = (((head - HEADS) % KV_HEADS).to(tl.int64) * pool_tokens + slot) * SIZE
    _store_pair(query, head * SIZE, lower, upper, low, high, inside & (head < HEADS))
    _store_pair(keys, place, lower, upper, low, high, is_key)
    _store_pair(values, place, lower, upper, low, high, inside & (head >= HEADS + KV_HEADS))


@triton.jit
def _store_pair(target, place, lower, upper, low, high, present):
    kind: tl.constexpr = target.dtype.element_ty
    tl.store(target + place + lower, kept(low, kind), mask=present)
    tl.store(target + place + upper, kept(high, kind), mask=present)


def row_heads(
    x: Hidden,
    linear: Linear,
    heads: Heads,
    rotary: RotaryTable | None,
    rows: StepRows,
    cache: LayerCache,
) -> Tensor:
    """reference.project_heads for one row."""
    operand = x.operand
    out_size, in_size = linear.weight.shape
    tile = row_tile("heads", out_size, in_size, linear.quantization)
    query = operand.new_empty(1, heads.num_heads, heads.head_size)
    cosines, sines = (operand, operand) if rotary is None else rotary
    launcher(gemv_heads, (triton.cdiv(out_size // 2, tile.rows),))(
        operand,
        weight=linear.weight,
        query=query,
        keys=cache.keys,
        values=cache.values,
        starts=rows.starts,
        positions=rows.positions,
        cosines=cosines,
        sines=sines,
        pool_tokens=cache.keys.shape[1],
        IN=in_size,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        ROLLED=tile.rolled,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=1,
        **linear_arguments(x, linear),
        **lora_arguments(operand, linear, x.row_stats),
        **pdl_options(operand),
    )
    return query
