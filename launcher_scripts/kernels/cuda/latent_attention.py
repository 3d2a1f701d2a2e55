"""Latent attention in the Triton language: what goes to the cache, and one new token per row, whose
queries are multiplied with the latent vectors themselves; see reference_attention.py.

All heads share a token's latent vector: it is read once, as keys and as values, and they are one
side of the products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference_attention as reference
from launcher_scripts.kernels.cuda.attention_tile import MIN_SIDE, part_of, tile_blocks, tile_tokens
from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options, traits_of
from launcher_scripts.kernels.cuda.elementwise import in_halves, kept
from launcher_scripts.kernels.operands import AttentionScores, LayerCache, Norm, RotaryTable

LatentLoRA = tuple[Tensor, Tensor, Tensor]

PROGRAMS = 256  # of an attention to long contexts
MAX_SPLITS = 32
FEW_ROWS = 4  # that merge and go up in one kernel
LATENTS = 64  # numbers of a latent vector that one program makes
VALUES = 16  # of a head, that one program makes


@triton.jit
def turn_and_store(
    query,
    latent,
    gain,
    cosines,
    sines,
    slots,
    keys,
    query_stride,
    latent_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one token's latent vector and the part of its key that turns, which go to the
    cache; or the parts of its queries that turn, which stay where they are.
    """
    if USE_PDL:
        gdc_launch_dependents()
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    turns = half < HALF
    if USE_PDL:
        gdc_wait()
    cosine = tl.load(cosines + token * HALF + half, mask=turns, other=1.0)
    sine = tl.load(sines + token * HALF + half, mask=turns, other=0.0)
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        where = query + token * query_stride + (heads * SIZE + SIZE - ROPE)[:, None] + half[None, :]
        mask = (heads < HEADS)[:, None] & turns[None, :]
        first = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
        turned = first * cosine[None, :] - second * sine[None, :]
        other = second * cosine[None, :] + first * sine[None, :]
        tl.store(where, turned.to(query.dtype.element_ty), mask=mask)
        tl.store(where + HALF, other.to(query.dtype.element_ty), mask=mask)
        return
    kind: tl.constexpr = keys.dtype.element_ty
    compute: tl.constexpr = latent.dtype.element_ty
    target = keys + tl.load(slots + token) * (RANK + ROPE)
    source, ranks = latent + token * latent_stride, tl.arange(0, BLOCK_R)
    mask = ranks < RANK
    x = tl.load(source + ranks, mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(gain + ranks, mask=mask, other=0.0)
    tl.store(target + ranks, kept(x.to(compute).to(tl.float32), kind), mask=mask)
    rope = source + RANK
    for later in tl.static_range(2 * HALF, ROPE):  # numbers that do not turn
        tl.store(target + RANK + later, kept(tl.load(rope + later).to(tl.float32), kind))
    if HALF > 0:
        first = tl.load(rope + half, mask=turns, other=0.0).to(tl.float32)
        second = tl.load(rope + HALF + half, mask=turns, other=0.0).to(tl.float32)
        turned = (first * cosine - second * sine).to(compute).to(tl.float32)
        other = (second * cosine + first * sine).to(compute).to(tl.float32)
        tl.store(target + RANK + half, kept(turned, kind), mask=turns)
        tl.store(target + RANK + HALF + half, kept(other, kind), mask=turns)


@triton.jit
def absorb(
    query,
    up,
    out,
    rows,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: a head's queries of BLOCK_B rows through BLOCK_R columns of its keys' half."""
    if USE_PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    of_k, of_r, of_b = k < KEY, r < RANK, b < rows
    where = (head * (KEY + VALUE) + k)[:, None] * RANK + r[None, :]
    weight = tl.load(up + where, mask=of_k[:, None] & of_r[None, :], other=0.0)
    if USE_PDL:
        gdc_wait()
    source = query + (b * row_stride)[:, None] + head * head_stride + k[None, :]
    x = tl.load(source, mask=of_b[:, None] & of_k[None, :], other=0.0)
    y = tl.dot(x, weight, input_precision=PRECISION)
    target = out + ((b * HEADS + head) * RANK)[:, None] + r[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=of_b[:, None] & of_r[None, :])


@triton.jit
def attend_latent_tiles(
    absorbed,
    query,
    keys,
    table,
    starts,
    lengths,
    partial,
    weights,
    scale,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row, MEMBERS heads, one of SPLITS parts of the context.

    partial: [rows, heads, splits, RANK], unnormalized;  weights: the largest score and the sum
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, split = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * MEMBERS + tl.arange(0, MEMBERS)
    ranks, turns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    length = tl.load(lengths + row).to(tl.int32)
    _, first, last, _ = part_of(length, split, SPLITS, TILE)
    start = tl.load(starts + row)
    lower, upper = tile_blocks(table, start + first, first < last, TILE, BLOCK_TOKENS)
    if USE_PDL:
        gdc_wait()
    if first > 0 and first >= length:
        return
    of_heads, of_ranks, of_turns = heads < HEADS, ranks < RANK, turns < ROPE
    source = absorbed + ((row * HEADS + heads) * RANK)[:, None] + ranks[None, :]
    still = tl.load(source, mask=of_heads[:, None] & of_ranks[None, :], other=0.0)
    source = query + row * row_stride + (heads * head_stride + KEY)[:, None] + turns[None, :]
    turned = tl.load(source, mask=of_heads[:, None] & of_turns[None, :], other=0.0)
    total = tl.zeros([MEMBERS], tl.float32)
    m, acc = total - 1e30, tl.zeros([MEMBERS, BLOCK_R], tl.float32)
    for tile in range(first, last, TILE):
        tokens = tile + tl.arange(0, TILE)
        of_tokens = tokens < last
        located = tile_tokens(lower, upper, start + tile, TILE, BLOCK_TOKENS)
        following = tile + TILE
        lower, upper = tile_blocks(table, start + following, following < last, TILE, BLOCK_TOKENS)
        line = keys + located[:, None] * (RANK + ROPE)
        latent = tl.load(
            line + ranks[None, :], mask=of_tokens[:, None] & of_ranks[None, :], other=0.0
        )
        rope = tl.load(
            line + RANK + turns[None, :], mask=of_tokens[:, None] & of_turns[None, :], other=0.0
        )
        latent = in_halves(latent, PTX).to(still.dtype)
        rope = in_halves(rope, PTX).to(still.dtype)
        scores = tl.dot(still, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(rope), scores, input_precision=PRECISION) * scale
        scores = tl.where(of_tokens[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision=PRECISION)
        m = m_new
    part = (row * HEADS + heads) * SPLITS + split
    target = partial + part[:, None] * RANK + ranks[None, :]
    tl.store(target, acc, mask=of_heads[:, None] & of_ranks[None, :])
    tl.store(weights + part * 2, m, mask=of_heads)
    tl.store(weights + part * 2 + 1, total, mask=of_heads)


@triton.jit
def merge_latents(
    partial,
    weights,
    lengths,
    up,
    out,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    UP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one row and head, whose parts it merges; with UP also BLOCK_V of its values."""
    if USE_PDL:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    ranks, splits = tl.arange(0, BLOCK_R), tl.arange(0, SPLIT_BLOCK)
    of_ranks = ranks < RANK
    _, _, _, parts = part_of(tl.load(lengths + row).to(tl.int32), 0, SPLITS, TILE)
    if UP:
        values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        of_values = values < VALUE
        where = (head * (KEY + VALUE) + KEY + values)[:, None] * RANK + ranks[None, :]
        weight = tl.load(up + where, mask=of_values[:, None] & of_ranks[None, :], other=0.0)
    if USE_PDL:
        gdc_wait()
    present = splits < parts
    part = (row * HEADS + head) * SPLITS + splits
    m = tl.load(weights + part * 2, mask=present, other=-1e30)
    total = tl.load(weights + part * 2 + 1, mask=present, other=0.0)
    share = tl.exp(m - tl.max(m, 0))
    share = share / tl.sum(total * share, 0)
    source = partial + part[:, None] * RANK + ranks[None, :]
    acc = tl.load(source, mask=present[:, None] & of_ranks[None, :], other=0.0)
    merged = tl.sum(acc * share[:, None], 0).to(out.dtype.element_ty)
    if UP:
        y = tl.sum(weight.to(tl.float32) * merged.to(tl.float32)[None, :], 1)
        target = out + (row * HEADS + head) * VALUE + values
        tl.store(target, y.to(out.dtype.element_ty), mask=of_values)
    else:
        tl.store(out + (row * HEADS + head) * RANK + ranks, merged, mask=of_ranks)


@triton.jit
def make_values(
    merged,
    up,
    out,
    rows,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_V of a head's values, of BLOCK_B rows."""
    if USE_PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    r = tl.arange(0, BLOCK_R)
    of_v, of_b, of_r = v < VALUE, b < rows, r < RANK
    where = (head * (KEY + VALUE) + KEY + v)[:, None] * RANK + r[None, :]
    weight = tl.load(up + where, mask=of_v[:, None] & of_r[None, :], other=0.0)
    if USE_PDL:
        gdc_wait()
    source = merged + ((b * HEADS + head) * RANK)[:, None] + r[None, :]
    x = tl.load(source, mask=of_b[:, None] & of_r[None, :], other=0.0)
    y = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    target = out + ((b * HEADS + head) * VALUE)[:, None] + v[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=of_b[:, None] & of_v[None, :])


def store_latents(
    query: Tensor,
    latent: Tensor,
    norm: Norm,
    rotary: RotaryTable | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """See reference_attention.store_latents. Queries are changed where they are."""
    if norm.kind != "rmsnorm":
        return reference.store_latents(query, latent, norm, rotary, slots, cache)
    tokens, heads, size = query.shape
    rank, rope = norm.weight.shape[0], latent.shape[1] - norm.weight.shape[0]
    cosines, sines = (norm.weight, norm.weight) if rotary is None else rotary
    half = 0 if rotary is None else cosines.shape[1]
    at_once = min(_power(heads), 16)
    others = 0 if rotary is None else triton.cdiv(heads, at_once)
    launcher(turn_and_store, (tokens, 1 + others))(
        query,
        latent,
        norm.weight,
        cosines,
        sines,
        slots,
        cache.keys,
        query.stride(0),
        latent.stride(0),
        norm.eps,
        HEADS=heads,
        SIZE=size,
        RANK=rank,
        ROPE=rope,
        HALF=half,
        BLOCK_R=_power(rank),
        BLOCK_P=_power(max(1, half)),
        BLOCK_H=at_once,
        num_warps=4,
        **pdl_options(query),
    )
    return query


def attend_latents(
    query: Tensor,
    up: Tensor,
    cache: LayerCache,
    rows: tuple[Tensor, Tensor, int],
    scores: AttentionScores,
    *,
    positions: Tensor | None = None,
    lora: LatentLoRA | None = None,
) -> Tensor:
    """See reference_attention.attend_latents. The context is split over programs."""
    others = scores.softcap, scores.slopes, scores.relative, scores.sinks, lora
    if any(other is not None for other in others):
        return reference.attend_latents(
            query, up, cache, rows, scores, positions=positions, lora=lora
        )
    (count, heads, size), (starts, lengths, longest) = query.shape, rows
    rank, dtype, device = up.shape[1], query.dtype, query.device
    rope = cache.keys.shape[-1] - rank
    key = size - rope
    value = up.shape[0] // heads - key
    exact = dtype == torch.float32
    precision, launch = "ieee" if exact else "tf32", pdl_options(query)
    block_r, block_b = max(MIN_SIDE, _power(rank)), min(max(MIN_SIDE, _power(count)), 64)
    shared = {"HEADS": heads, "KEY": key, "RANK": rank}
    sizes = {"VALUE": value, **shared}
    blocks = {"BLOCK_B": block_b, "BLOCK_R": block_r, "PRECISION": precision}
    absorbed = absorbed_queries(query, up, sizes, blocks, launch)
    narrow = heads <= MIN_SIDE or cache.keys.dtype == torch.float8_e4m3fn  # which takes registers
    members = MIN_SIDE if narrow else 2 * MIN_SIDE
    groups, tile = triton.cdiv(heads, members), 16 if exact else 32
    splits = latent_splits(count * groups, longest, tile)
    partial = torch.empty(count, heads, splits, rank, device=device)
    weights = torch.empty(count, heads, splits, 2, device=device)
    launcher(attend_latent_tiles, (count, groups, splits))(
        absorbed,
        query,
        cache.keys,
        cache.entries,
        starts,
        lengths,
        partial,
        weights,
        scores.scale,
        query.stride(0),
        query.stride(1),
        ROPE=rope,
        SPLITS=splits,
        MEMBERS=members,
        BLOCK_R=block_r,
        BLOCK_P=max(MIN_SIDE, _power(rope)),
        TILE=tile,
        BLOCK_TOKENS=cache.block_tokens,
        PRECISION=precision,
        PTX=traits_of(device).runs_ptx,
        num_warps=4 if narrow else 8,
        num_stages=3 if narrow else 2,
        **shared,
        **launch,
    )
    parts = partial, weights, lengths
    return merged_values(parts, up, absorbed, sizes, tile, blocks, launch)


def absorbed_queries(
    query: Tensor,
    up: Tensor,
    sizes: dict[str, int],
    blocks: dict[str, Any],
    launch: dict[str, bool],
) -> Tensor:
    """Queries as they meet latents, [rows, heads, rank]."""
    (count, heads, _), rank = query.shape, sizes["RANK"]
    absorbed = torch.empty(count, heads, rank, dtype=query.dtype, device=query.device)
    latents = min(LATENTS, blocks["BLOCK_R"])
    grid = heads, triton.cdiv(rank, latents), triton.cdiv(count, blocks["BLOCK_B"])
    launcher(absorb, grid)(
        query,
        up,
        absorbed,
        count,
        query.stride(0),
        query.stride(1),
        BLOCK_K=max(MIN_SIDE, _power(sizes["KEY"])),
        num_warps=4,
        **{**blocks, "BLOCK_R": latents},
        **sizes,
        **launch,
    )
    return absorbed


def merged_values(
    parts: tuple[Tensor, Tensor, Tensor],
    up: Tensor,
    absorbed: Tensor,
    sizes: dict[str, int],
    tile: int,
    blocks: dict[str, Any],
    launch: dict[str, bool],
) -> Tensor:
    """The values [rows, heads * value] of attention whose context was split.

    parts: of attend_latent_tiles, and the rows' lengths;  absorbed: may be written
    """
    (count, heads, splits, rank), value = parts[0].shape, sizes["VALUE"]
    out = torch.empty(count, heads * value, dtype=absorbed.dtype, device=up.device)
    goes_up = count <= FEW_ROWS
    merged = out if goes_up else absorbed
    launcher(merge_latents, (count, heads, triton.cdiv(value, VALUES) if goes_up else 1))(
        *parts,
        up,
        merged,
        SPLITS=splits,
        SPLIT_BLOCK=_power(splits),
        BLOCK_R=_power(rank),
        BLOCK_V=VALUES,
        TILE=tile,
        UP=goes_up,
        num_warps=4,
        **sizes,
        **launch,
    )
    if goes_up:
        return out
    grid = heads, triton.cdiv(value, 2 * VALUES), triton.cdiv(count, blocks["BLOCK_B"])
    launcher(make_values, grid)(
        merged,
        up,
        out,
        count,
        BLOCK_V=2 * VALUES,
        num_warps=4,
        **blocks,
        **sizes,
        **launch,
    )
    return out


def latent_splits(programs: int, longest: int, tile: int) -> int:
    """Return the number of programs that share a context, of which `programs` are busy already."""
    fitting = max(1, min(MAX_SPLITS, PROGRAMS // programs))
    return min(_power(fitting + 1) // 2, _power(triton.cdiv(longest, tile)))


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))
