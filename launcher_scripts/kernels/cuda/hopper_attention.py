"""Attention of many new tokens per sequence on Hopper GPUs, in Gluon, Triton's lower language.

A program has 64 queries of two heads that share keys and values, or 128 queries of a head with
keys and values of its own. Three groups of warps work side by side (Shah et al. 2024): one copies
tiles of keys and values with the tensor memory accelerator (TMA), two have 64 queries of a head
each. While the tensor cores multiply a tile's keys and the values of the tile before, a head's
warps wait for the first and weigh them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from launcher_scripts.kernels.cuda.attention_tile import LOG2_E
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.operands import QUERIES_PER_TILE, LayerCache

KEYS_PER_TILE = 128
PANEL = 64  # features that lie together in shared memory, where rows follow each other by panels
STAGES = 2  # tiles of keys and of values in shared memory
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@gluon.jit
def _copy_tile(pool, source, first, stage, ready, target, SIZE: gl.constexpr, TILE: gl.constexpr):
    """Copy one tile, part by part as its rows are in the cache and its panels in `target`.

    source: the table, and the cache's line of the head's first token;  first: the tile's address
    """
    table, line, BLOCK_TOKENS = source
    rows: gl.constexpr = pool.block_type.shape[0]
    panels: gl.constexpr = SIZE // pool.block_type.shape[1]
    parts: gl.constexpr = TILE // rows
    mbarrier.expect(ready.index(stage), TILE * SIZE * 2)
    for part in gl.static_range(parts):
        token = first + part * rows
        if BLOCK_TOKENS > 0:
            block = gl.load(table + token // BLOCK_TOKENS)
            token = block * BLOCK_TOKENS + token % BLOCK_TOKENS
        for panel in gl.static_range(panels):
            piece = target.index((stage * panels + panel) * parts + part)
            where = [(line + token).to(gl.int32), panel * pool.block_type.shape[1]]
            tma.async_copy_global_to_shared(pool, where, ready.index(stage), piece)


@gluon.jit
def _copy_tiles(
    buffers,
    barriers,
    descriptors,
    source,
    start,
    count,
    STAGES: gl.constexpr,
    SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Copy `count` tiles of keys and values, the last one first."""
    keys, values = buffers
    keys_ready, keys_free, values_ready, values_free = barriers
    key_rows, value_rows = descriptors
    for index in range(count):
        first = start + (count - 1 - index) * TILE
        stage, phase = index % STAGES, (index // STAGES) & 1
        mbarrier.wait(keys_free.index(stage), phase ^ 1)
        _copy_tile(key_rows, source, first, stage, keys_ready, keys, SIZE, TILE)
        mbarrier.wait(values_free.index(stage), phase ^ 1)
        _copy_tile(value_rows, source, first, stage, values_ready, values, SIZE, TILE)


@gluon.jit
def _multiply_keys(query, keys, keys_ready, index, layout: gl.constexpr):
    """Begin the product of the queries and a tile's keys, when these are there."""
    stages: gl.constexpr = keys.shape[0]
    stage, phase = index % stages, (index // stages) & 1
    mbarrier.wait(keys_ready.index(stage), phase)
    rows: gl.constexpr = query.shape[0]
    columns: gl.constexpr = keys.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(
        query, keys.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _weigh(scores, m, factor, tile, sight, MASKED: gl.constexpr, layout: gl.constexpr):
    """(m, alpha, weights in float32) with a tile of scores more, by powers of two.

    tile: the first key's position;  sight: the queries' positions, and how many keys there are
    """
    if MASKED:
        count: gl.constexpr = scores.shape[1]
        keys = tile + gl.arange(0, count, layout=gl.SliceLayout(0, layout))
        positions, length = sight
        seen = gl.expand_dims(keys, 0) <= gl.expand_dims(positions, 1)
        seen = seen & gl.expand_dims(keys < length, 0)
        scores = gl.where(seen, scores, -float("inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(m_new, 1))
    return m_new, gl.exp2(m - m_new), weights


@gluon.jit
def _add_tiles(
    state,
    index,
    end,
    last,
    query,
    buffers,
    barriers,
    factor,
    sight,
    MASKED: gl.constexpr,
    TILE: gl.constexpr,
    layout: gl.constexpr,
):
    """The sums with the tiles `index` to `end` more, in the order in which they are copied.

    state: m, total, acc, and the weights of the tile before, whose values are to be added
    last:  index of the tile with the first keys
    """
    m, total, acc, weights = state
    keys, values = buffers
    keys_ready, keys_free, values_ready, values_free = barriers
    stages: gl.constexpr = keys.shape[0]
    wide: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    for tile in range(index, end):
        product = _multiply_keys(query, keys, keys_ready, tile, layout)
        before = tile - 1
        stage, phase = before % stages, (before // stages) & 1
        mbarrier.wait(values_ready.index(stage), phase)
        added = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[product])
        mbarrier.arrive(keys_free.index(tile % stages), count=1)
        m, alpha, exact = _weigh(scores, m, factor, (last - tile) * TILE, sight, MASKED, layout)
        total = total * alpha + gl.sum(exact, 1)
        acc, weights = warpgroup_mma_wait(0, deps=[added, weights])
        mbarrier.arrive(values_free.index(stage), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, wide)), 1)
        weights = gl.convert_layout(exact.to(values.dtype), operand)
    return m, total, acc, weights


@gluon.jit
def _attend_head(
    queries_of,
    query,
    out,
    own_query,
    others,
    end,
    scale,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Queries of one head: see attend_group.

    queries_of: the head, and how many of the program's queries of it come before these
    """
    head, ahead = queries_of
    buffers, barriers, rows = others
    first, count, past, length = rows
    keys, values = buffers
    keys_ready, keys_free, values_ready, _values_free = barriers
    stages: gl.constexpr = keys.shape[0]
    queries: gl.constexpr = own_query.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // SIZE, SIZE // 8], [4, 1], [1, 0])
    number = ahead + gl.arange(0, queries, layout=gl.SliceLayout(1, copied))
    features = gl.arange(0, SIZE, layout=gl.SliceLayout(0, copied))
    offset = gl.expand_dims((first + number) * HEADS + head, 1) * SIZE
    offset = offset + gl.expand_dims(features, 0)
    mask = gl.expand_dims(number < count, 1)
    own_query.store(gl.load(query + offset, mask=mask, other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    positions = past + ahead + gl.arange(0, queries, layout=gl.SliceLayout(1, layout))
    sight = positions, length
    factor = scale * LOG2_E
    # The last tile: values of tokens that are not there may be anything, also no numbers.
    product = _multiply_keys(own_query, keys, keys_ready, 0, layout)
    scores = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(keys_free.index(0), count=1)
    m = gl.full([queries], -1e30, gl.float32, gl.SliceLayout(1, layout))
    m, _alpha, exact = _weigh(scores, m, factor, (end - 1) * TILE, sight, True, layout)
    total = gl.sum(exact, 1)
    mbarrier.wait(values_ready.index(0), 0)
    tokens = (end - 1) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, copied))
    there = values.index(0).load(copied)
    zero = gl.full([TILE, SIZE], 0, values.dtype, copied)
    values.index(0).store(gl.where(gl.expand_dims(tokens < length, 1), there, zero))
    fence_async_shared()
    gl.thread_barrier()
    acc = gl.zeros([queries, SIZE], gl.float32, wide)
    weights = gl.convert_layout(exact.to(values.dtype), operand)
    # Tiles that some queries see in part, then those that all see.
    last = end - 1
    masked = end - gl.minimum((past + 1) // TILE, last)
    state = m, total, acc, weights
    state = _add_tiles(
        state, 1, masked, last, own_query, buffers, barriers, factor, sight, True, TILE, layout
    )
    state = _add_tiles(
        *(state, masked, last + 1, last, own_query, buffers, barriers, factor, sight),
        *(False, TILE, layout),
    )
    m, total, acc, weights = state
    stage, phase = last % stages, (last // stages) & 1
    mbarrier.wait(values_ready.index(stage), phase)
    acc = warpgroup_mma(weights, values.index(stage), acc)
    total = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, wide))
    result = gl.convert_layout((acc / gl.expand_dims(total, 1)).to(out.dtype.element_ty), copied)
    gl.store(out + offset, result, mask=mask)


@gluon.jit
def _clear(
    out,
    rows,
    head,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    QUERIES: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Store zeros for the queries of COUNT heads."""
    first, count, _past, _length = rows
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // SIZE, SIZE // 8], [4, 1], [1, 0])
    number = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, layout))
    features = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    zeros = gl.full([QUERIES, SIZE], 0, out.dtype.element_ty, layout)
    for member in gl.static_range(COUNT):
        offset = gl.expand_dims((first + number) * HEADS + head + member, 1) * SIZE
        where = out + offset + gl.expand_dims(features, 0)
        gl.store(where, zeros, mask=gl.expand_dims(number < count, 1))


@gluon.jit(do_not_specialize=["pool_tokens"])
def attend_group(
    query,
    key_rows,
    value_rows,
    table,
    tiles,
    out,
    pool_tokens,
    scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    QUERIES: gl.constexpr,
    PARTS: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    PANEL: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """One program: a part of a tile of one row's queries (see VarlenBatch.tiles) and two heads, or
    the whole tile and one head.

    The last tiles, whose queries see most, come first. Tiles without tokens leave zeros.
    PARTS: of a tile
    """
    part = gl.num_programs(1) - 1 - gl.program_id(1)
    tile, before = tiles + part // PARTS * 4, part % PARTS * QUERIES
    size: gl.constexpr = QUERIES * (2 // PARTS)
    head = gl.program_id(0) * PARTS
    number = gl.load(tile + 1).to(gl.int32)
    start = gl.load(tile + 2)
    past = gl.load(tile + 3).to(gl.int32)
    count = gl.abs(number) - before
    length = gl.where(count > 0, past + gl.minimum(number, before + size), 0)
    rows = gl.load(tile) + before, count, past + before, length
    if length <= 0:  # these only fill the step up, or there are none
        _clear(out, rows, head, HEADS, SIZE, size, PARTS)
        return
    source = table, (head // GROUP) * pool_tokens, BLOCK_TOKENS
    end = gl.maximum((length + TILE - 1) // TILE, 1)
    dtype: gl.constexpr = key_rows.dtype
    # Pieces as they are copied; tiles of them, panel by panel, as they are multiplied.
    pieces: gl.constexpr = STAGES * (TILE // PIECE) * (SIZE // PANEL)
    copied_keys = gl.allocate_shared_memory(dtype, [pieces, PIECE, PANEL], key_rows.layout)
    copied_values = gl.allocate_shared_memory(dtype, [pieces, PIECE, PANEL], value_rows.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys = copied_keys._reinterpret(dtype, [STAGES, TILE, SIZE], layout)
    values = copied_values._reinterpret(dtype, [STAGES, TILE, SIZE], layout)
    queries = gl.allocate_shared_memory(dtype, [2, QUERIES, SIZE], layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    buffers, copied = (keys, values), (copied_keys, copied_values)
    descriptors = key_rows, value_rows
    barriers = keys_ready, keys_free, values_ready, values_free
    own = queries.index(0), queries.index(1)
    upper, lower = (head, 0), (head + PARTS - 1, (2 - PARTS) * QUERIES)
    others = buffers, barriers, rows
    gl.warp_specialize(
        [
            (_attend_head, (upper, query, out, own[0], others, end, scale, HEADS, SIZE, TILE)),
            (_attend_head, (lower, query, out, own[1], others, end, scale, HEADS, SIZE, TILE)),
            (_copy_tiles, (copied, barriers, descriptors, source, start, end, STAGES, SIZE, TILE)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


def group_attention(query: Tensor, cache: LayerCache, tiles: Tensor, scale: float) -> Tensor:
    """See reference.prompt_attention, for what prompt_attention.prompt_attention leaves to it."""
    tokens, heads, size = query.shape
    out = query.new_empty(tokens, heads * size)
    block = [min(cache.block_tokens or KEYS_PER_TILE, KEYS_PER_TILE), PANEL]
    element = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    key_rows, value_rows = (
        TensorDescriptor.from_tensor(pool.view(-1, size), block, layout)
        for pool in (cache.keys, cache.values)
    )
    group = heads // cache.keys.shape[0]
    parts = 2 if group % 2 == 0 else 1
    launcher(attend_group, (heads // parts, tiles.shape[0] * parts))(
        query,
        key_rows,
        value_rows,
        tiles if cache.table is None else cache.table.entries,
        tiles,
        out,
        cache.keys.shape[1],
        scale,
        HEADS=heads,
        GROUP=group,
        SIZE=size,
        QUERIES=QUERIES_PER_TILE // 2,
        PARTS=parts,
        TILE=KEYS_PER_TILE,
        PIECE=block[0],
        PANEL=PANEL,
        BLOCK_TOKENS=cache.block_tokens,
        STAGES=STAGES,
        REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )
    return out
