"""Attention of one new token per row over the key/value cache, in the Triton language."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.attention_tile import (
    MIN_SIDE,
    add_sink,
    add_tile,
    apply_rotary,
    attend_grouped,
    bonus_of,
    capped,
    load_keys_values,
    merge_if_last,
    newest_token,
    part_of,
    reached,
    store_head,
    tile_blocks,
    tile_tokens,
)
from launcher_scripts.kernels.cuda.compiling import NO_PDL, launcher, pdl_options, traits_of
from launcher_scripts.kernels.cuda.elementwise import cache_token, in_halves
from launcher_scripts.kernels.cuda.norm import norm_code, parts_of, store_expected
from launcher_scripts.kernels.operands import (
    AttentionScores,
    Heads,
    Hidden,
    LayerCache,
    Norm,
    RotaryTable,
)

SHORT_CONTEXT = 256  # tokens
MEDIUM_CONTEXT = 1024
LONG_CONTEXT = 8192
# Query heads of all rows together.
FEWEST_HEADS = 20
FEWER_HEADS = 48
FEW_HEADS = 128  # about one program per multiprocessor
MANY_HEADS = 512
MAX_HEADS = 1024
# Key/value heads of all rows together, where products of matrices read them.
FEWEST_PAIRS = 64
FEWEST_SHORT_PAIRS = 128
FEWEST_LONE_PAIRS = 256
MANY_PAIRS = 512
MAX_PAIRS = 1024
MAX_SPLITS = 16
LARGE_TILE, SMALL_TILE = 64, 32  # tokens
TILE_SIZE = 8192  # numbers of a tile of keys


class AttentionShape(NamedTuple):
    """splits: programs per row and head;  tile: tokens looked at together;  warps, stages of each

    members: query heads of a program that multiplies matrices, padded; 0: a head per program
    prefetch: tokens that such a program prefetches before gdc_wait
    """

    splits: int
    tile: int
    warps: int
    stages: int = 3
    members: int = 0
    prefetch: int = 0


def attention_shape(
    longest: int, rows: int, heads: Heads, dtype: torch.dtype, cached: torch.dtype | None = None
) -> AttentionShape:
    """For contexts up to `longest` of so many rows, whose keys and values are kept as `cached`, in
    the compute type where that is not said.

    One program reads a short context sooner than several that have to merge their parts; with few
    heads large tiles use the multiprocessors best. Longer contexts are split over about the same
    number of small programs for any number of heads: they hide each other's latency. With many
    heads memory bandwidth is the bound, and matrix products (tl.dot) come nearest to it.
    """
    queries, short = rows * heads.num_heads, longest <= SHORT_CONTEXT
    if dtype != torch.float32 and _multiplies(rows, heads, longest):
        return _with_products(rows, heads, short, in_bytes=cached == torch.float8_e4m3fn)
    if not short:
        return AttentionShape(_splits(longest, queries), 16, 1)
    if queries <= FEW_HEADS:
        return AttentionShape(1, 128, 8)
    return AttentionShape(1, 32, 2 if queries < MAX_HEADS else 1)


def _multiplies(rows: int, heads: Heads, longest: int) -> bool:
    """Return whether matrix products pay: sooner with keys that several query heads share, which
    are read once for these; always where they are many."""
    short = longest <= SHORT_CONTEXT
    queries, pairs = rows * heads.num_heads, rows * heads.num_kv_heads
    if heads.group == 1:
        return MANY_PAIRS <= pairs < MAX_PAIRS if short else pairs >= FEWEST_LONE_PAIRS
    if short:
        return pairs >= FEWEST_SHORT_PAIRS
    return pairs >= FEWEST_PAIRS or queries >= MANY_HEADS or longest > LONG_CONTEXT


def _with_products(rows: int, heads: Heads, short: bool, *, in_bytes: bool) -> AttentionShape:
    """Few programs with many loads under way each; those that all find a place at once begin to
    read before the kernel ahead has ended."""
    pairs = rows * heads.num_kv_heads
    members = max(MIN_SIDE, triton.next_power_of_2(heads.group))
    tile = SMALL_TILE if heads.group == 1 or pairs >= MANY_PAIRS else LARGE_TILE
    programs = MANY_PAIRS * SMALL_TILE // tile
    splits = 1 if short else max(1, min(MAX_SPLITS, programs // pairs))
    widest = max(MIN_SIDE, TILE_SIZE // triton.next_power_of_2(heads.head_size))
    tile = min(widest, tile)
    warps = 2 if members == MIN_SIDE else 4
    if in_bytes and tile == SMALL_TILE:
        warps //= 2  # each has as many bytes under way
    if pairs <= MAX_PAIRS:
        return AttentionShape(splits, tile, warps, 4, members, tile)
    # The next kernel is cuBLAS's, which does not start early: its place goes to more programs.
    return AttentionShape(splits, tile, warps, 3 if heads.group == 1 else 4, members)


def _splits(longest: int, queries: int) -> int:
    """Return the number of programs that share a context that is not short."""
    if queries > FEW_HEADS:
        return 8
    if queries > FEWER_HEADS:
        return 16
    return 64 if longest > MEDIUM_CONTEXT and queries <= FEWEST_HEADS else 32


@triton.jit
def _newest_first(
    cache,
    position,
    new,
    stride,
    rotary,
    scaled,
    bias,
    distance,
    reach,
    present,
    stores,
    RELATIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    """(m, total, acc) of the newest token alone, if it is here; see newest_token."""
    m = -1e30
    total = 0.0
    acc = tl.zeros(position.shape, tl.float32)
    if present:
        key, acc = newest_token(
            cache, position, new, stride, rotary, STORE, PARTS, SIZE, HALF, stores
        )
        m = capped(tl.sum(key * scaled, 0), SOFTCAP)
        if RELATIVE:
            m += tl.load(bias + reached(distance, reach))
        total = 1.0
    return m, total, acc


@triton.jit(do_not_specialize=["pool_tokens"])
def attend(
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
    PTX: tl.constexpr,
):
    """One program: one row, one query head, one of SPLITS parts of the context.

    The softmax is online (Milakov and Gimelshein 2018), in float32: m is the largest score so far,
    total the sum of exp(score - m), acc that of the values with these weights. The program of a
    row and head that ends last merges the parts; it leaves its count in `arrivals` at zero.

    USE_PDL: starts, lengths and all tokens are read before gdc_wait, but for the last one with
    FRESH: the kernel before this one does not write them.
    STORE: `query` holds keys and values beside the queries, not yet rotated; the last token is
    taken from there, rotated and stored.  PARTS: `query` is the sum of so many tensors.
    NORM: row_stats are of one row's state [STATE]; one more program runs store_expected.
    """
    if USE_PDL:
        gdc_launch_dependents()
    if NORM > 0 and tl.program_id(2) == SPLITS:
        store_expected(row_stats, tl.program_id(1) == 0, STATE, NORM, STATE_PARTS, USE_PDL)
        return
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    old, first, last, parts = part_of(length - (1 if FRESH else 0), split, SPLITS, TILE)
    if first > 0 and first >= old:
        return
    group, output_row = head // GROUP, row * HEADS + head  # the head's keys and values; its outputs
    pool, start = group * pool_tokens.to(tl.int64) * SIZE, tl.load(starts + row)
    cache, tokens = (keys, values, pool), first + tl.arange(0, TILE)
    lower, upper = tile_blocks(table, start + first, first < last, TILE, BLOCK_TOKENS)
    located = tile_tokens(lower, upper, start + first, TILE, BLOCK_TOKENS)
    key, value = load_keys_values(cache, located, tokens, last, SIZE, BLOCK)
    following = first + TILE
    lower, upper = tile_blocks(table, start + following, following < last, TILE, BLOCK_TOKENS)
    newest = pool + cache_token(table, start + old, BLOCK_TOKENS) * SIZE if FRESH else pool
    slope = tl.load(slopes + head) if ALIBI else 0.0
    pos = tl.load(positions + row).to(tl.int32) if RELATIVE or HALF > 0 else 0
    bias += head * (2 * reach + 1) if RELATIVE else 0
    if USE_PDL:
        gdc_wait()
    width: tl.constexpr = (HEADS + (2 * (HEADS // GROUP) if STORE else 0)) * SIZE
    queries, stride = query + row * width, tl.num_programs(0) * width
    features, rotary = tl.arange(0, BLOCK), (cosines, sines, pos)
    q = apply_rotary(queries + head * SIZE, features, features < SIZE, stride, rotary, PARTS, HALF)
    q *= scale
    new = queries + (HEADS + group) * SIZE, queries + (HEADS + HEADS // GROUP + group) * SIZE
    m, total, acc = _newest_first(
        *((keys, values), newest + features, new, stride, rotary),
        *(q, bias, old - pos, reach, FRESH and split == 0, head % GROUP == 0),
        *(RELATIVE, SOFTCAP, STORE, PARTS, SIZE, HALF),
    )
    if SINKS and split == 0:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + head))
    key, value = in_halves(key, PTX), in_halves(value, PTX)
    for tile in range(first, last, TILE):
        tokens, following = tile + tl.arange(0, TILE), tile + TILE
        located = tile_tokens(lower, upper, start + following, TILE, BLOCK_TOKENS)
        later = load_keys_values(cache, located, tokens + TILE, last, SIZE, BLOCK)
        following += TILE
        lower, upper = tile_blocks(table, start + following, following < last, TILE, BLOCK_TOKENS)
        bonus = bonus_of(tokens, slope, length, bias, pos, reach, last, ALIBI, RELATIVE)
        m, total, acc = add_tile(m, total, acc, key, value, q, bonus, SOFTCAP)
        key, value = in_halves(later[0], PTX), in_halves(later[1], PTX)
    _finish(
        *(partial, weights, arrivals, out, output_row, split, parts, acc, m, total),
        *(SIZE, BLOCK, SPLITS, SPLIT_BLOCK),
    )


@triton.jit
def _finish(
    partial,
    weights,
    arrivals,
    out,
    position,
    split,
    parts,
    acc,
    m,
    total,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Store the outputs; those of parts, which the last one to end merges."""
    if SPLITS == 1:
        store_head(out, position, acc / total, SIZE, BLOCK)
    else:
        part = position * SPLITS + split
        store_head(partial, part, acc, SIZE, BLOCK)
        tl.store(weights + part * 2, m)
        tl.store(weights + part * 2 + 1, total)
        merge_if_last(
            *(partial, weights, arrivals, out, position, parts),
            *(1, SIZE, BLOCK, SPLITS, SPLIT_BLOCK),
        )


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scores: AttentionScores,
    *,
    positions: Tensor | None = None,
    fresh: bool | None = None,
) -> Tensor:
    """See reference.decode_attention. Long contexts are split over programs and merged."""
    _, num_heads, size = query.shape
    heads = Heads(num_heads, cache.keys.shape[0], size)
    return attention_launch(
        query,
        heads,
        cache,
        (starts, lengths, positions),
        longest,
        scores,
        dtype=query.dtype,
        fresh=bool(fresh),
        launch=NO_PDL if fresh is None else pdl_options(query),
    )


def _attention_kernel(
    shape: AttentionShape, heads: Heads, *, exact: bool
) -> tuple[triton.JITFunction, int, dict[str, object]]:
    """The kernel, its programs per row and part, and what it takes beside what all take."""
    if not shape.members:
        return attend, heads.num_heads, {}
    more: dict[str, object] = {
        "MEMBERS": shape.members,
        "PRECISION": "ieee" if exact else "tf32",
        "PREFETCH": shape.prefetch,
    }
    return attend_grouped, heads.num_kv_heads, more


def attention_launch(
    query: Tensor,
    heads: Heads,
    cache: LayerCache,
    rows: tuple[Tensor, Tensor, Tensor | None],
    longest: int,
    scores: AttentionScores,
    *,
    dtype: torch.dtype,
    fresh: bool,
    launch: dict[str, bool],
    store: bool = False,
    parts: int = 1,
    rotary: RotaryTable | None = None,
    state: Hidden | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The kernel `attend`, or `attend_grouped`; rows are starts, lengths and positions, [B] each.

    query: [B, heads * size], of several parts one after the other; with `store` keys and values of
    the last token follow the queries
    dtype: the compute type
    state, norm: one row's, whose row_stats say afterwards what to expect of the states behind it
    """
    ahead = None if norm is None else state
    starts, lengths, positions = rows
    slopes, relative, sinks = scores.slopes, scores.relative, scores.sinks
    count, num_heads, size = len(starts), heads.num_heads, heads.head_size
    shape = attention_shape(longest, count, heads, dtype, cache.keys.dtype)
    splits, device, arrivals = shape.splits, query.device, cache.arrivals
    out = torch.empty(count, num_heads * size, dtype=dtype, device=device)
    # [rows, heads, splits]: unnormalized outputs, then the largest score and the sum of weights
    partial = torch.empty(count, num_heads, splits, size, device=device)
    weights = torch.empty(count, num_heads, splits, 2, device=device)
    if arrivals is None or arrivals.numel() < count * num_heads:
        arrivals = torch.zeros(count * num_heads, dtype=torch.int32, device=device)
    kernel, across, more = _attention_kernel(shape, heads, exact=dtype == torch.float32)
    launcher(kernel, (count, across, splits + (ahead is not None)))(
        query,
        cache.keys,
        cache.values,
        cache.entries,
        starts,
        lengths,
        weights if slopes is None else slopes,
        weights if sinks is None else sinks,
        lengths if positions is None else positions,
        weights if relative is None else relative.table,
        out,
        partial,
        weights,
        arrivals,
        *((weights, weights) if rotary is None else rotary),
        weights if ahead is None else ahead.row_stats,
        cache.keys.shape[1],
        scores.scale,
        0 if relative is None else relative.reach,
        HEADS=num_heads,
        GROUP=heads.group,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SPLITS=splits,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        ALIBI=slopes is not None,
        SINKS=sinks is not None,
        RELATIVE=relative is not None,
        SOFTCAP=scores.softcap or 0.0,
        FRESH=fresh,
        STORE=store,
        PARTS=parts,
        HALF=0 if rotary is None else rotary[0].shape[1],
        NORM=0 if ahead is None else norm_code(norm),
        STATE=0 if ahead is None else ahead.exact.shape[1],
        STATE_PARTS=0 if ahead is None else parts_of(ahead.row_stats),
        TILE=shape.tile,
        BLOCK_TOKENS=cache.block_tokens,
        PTX=traits_of(device).runs_ptx,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **more,
        **launch,
    )
    return out
