"""The operations of fused.py that are one kernel of a program per row, or a few."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels.cuda.attention_shapes import AttentionShape, attention_shape
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.decode_attention import attend
from launcher_scripts.kernels.cuda.grouped_attention import attend_grouped
from launcher_scripts.kernels.cuda.rotary import (
    block_argmax,
    look_up,
    normalize,
    rotate_and_store,
)
from launcher_scripts.kernels.cuda.row_products import (
    NORM_CODES,
    best_of_parts,
    early,
    norm_code,
    parts_of,
)
from launcher_scripts.kernels.operands import Heads, Hidden, LayerCache, Norm, RelativeBias

ARGMAX_BLOCK = 1024
STORED_AT_ONCE = 2048  # numbers
ALONE = {"EARLY": False}


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """See reference.embed."""
    size = table.shape[1]
    out = torch.empty(ids.shape[0], size, device=table.device)
    launcher(look_up, (ids.shape[0],))(
        ids, table, out, first_id, table.shape[0], size, BLOCK=triton.next_power_of_2(size)
    )
    return out


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """See reference.norm."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    launcher(normalize, (rows,))(
        x,
        weights.weight,
        weights.weight if weights.bias is None else weights.bias,
        out,
        size,
        weights.eps,
        KIND=NORM_CODES[weights.kind],
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return out


def store_kv(
    qkv: Tensor,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    cache: LayerCache,
) -> Tensor:
    """See reference.store_kv."""
    tokens = qkv.shape[0]
    query = torch.empty(
        tokens, heads.num_heads, heads.head_size, dtype=qkv.dtype, device=qkv.device
    )
    cosines, sines = (qkv, qkv) if rotary is None else rotary
    block = triton.next_power_of_2(heads.head_size)
    total = heads.num_heads + 2 * heads.num_kv_heads
    at_once = min(triton.next_power_of_2(total), max(1, STORED_AT_ONCE // block))
    launcher(rotate_and_store, (tokens, triton.cdiv(total, at_once)))(
        qkv,
        query,
        cache.keys,
        cache.values,
        slots,
        cosines,
        sines,
        cache.keys.shape[1],
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        SIZE=heads.head_size,
        HALF=0 if rotary is None else cosines.shape[1],
        BLOCK=block,
        AT_ONCE=at_once,
        num_warps=max(1, min(4, at_once * block // 256)),
    )
    return query


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax. Two kernels: of blocks, then of the blocks' results."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    values = torch.empty(rows, blocks, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    launcher(block_argmax, (rows, blocks))(
        logits, values, places, logits.stride(0), size, BLOCK=ARGMAX_BLOCK, num_warps=4
    )
    return best_of_parts(values, places)[1]


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
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
        slopes,
        scale,
        relative,
        fresh=bool(fresh),
        launch=ALONE if fresh is None else early(query),
        softcap=softcap,
    )


def _attention_kernel(
    shape: AttentionShape, heads: Heads, *, exact: bool
) -> tuple[triton.JITFunction, int, dict[str, object]]:
    """The kernel, its programs per row and part, and what it takes beside what all take."""
    if not shape.members:
        return attend, heads.num_heads, {}
    more = {"MEMBERS": shape.members, "PRECISION": "ieee" if exact else "tf32"}
    return attend_grouped, heads.num_kv_heads, more


def attention_launch(
    query: Tensor,
    heads: Heads,
    cache: LayerCache,
    rows: tuple[Tensor, Tensor, Tensor | None],
    longest: int,
    slopes: Tensor | None,
    scale: float | None,
    relative: RelativeBias | None,
    *,
    fresh: bool,
    launch: dict[str, bool],
    store: bool = False,
    parts: int = 1,
    rotary: tuple[Tensor, Tensor] | None = None,
    state: Hidden | None = None,
    norm: Norm | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The kernel `attend`, or `attend_grouped`; rows are starts, lengths and positions, [B] each.

    query: [B, heads * size], of several parts one after the other; with `store` keys and values of
    the last token follow the queries
    state, norm: one row's, whose row_stats say afterwards what to expect of the states behind it
    """
    looks_ahead = norm is not None and state is not None
    starts, lengths, positions = rows
    count, num_heads, size = starts.shape[0], heads.num_heads, heads.head_size
    shape = attention_shape(longest, count, heads, cache.keys.dtype)
    splits = shape.splits
    device = query.device
    out = cache.keys.new_empty(count, num_heads * size)
    # [rows, heads, splits]: unnormalized outputs, then largest score and sum of weights
    partial = torch.empty(count, num_heads, splits, size, device=device)
    weights = torch.empty(count, num_heads, splits, 2, device=device)
    arrivals = cache.arrivals
    if arrivals is None or arrivals.numel() < count * num_heads:
        arrivals = torch.zeros(count * num_heads, dtype=torch.int32, device=device)
    cosines, sines = (weights, weights) if rotary is None else rotary
    kernel, across, more = _attention_kernel(shape, heads, exact=cache.keys.dtype == torch.float32)
    launcher(kernel, (count, across, splits + looks_ahead))(
        query,
        cache.keys,
        cache.values,
        starts,
        lengths,
        weights if slopes is None else slopes,
        lengths if positions is None else positions,
        weights if relative is None else relative.table,
        out,
        partial,
        weights,
        arrivals,
        cosines,
        sines,
        state.row_stats if looks_ahead else weights,
        cache.keys.shape[1],
        size**-0.5 if scale is None else scale,
        0 if relative is None else relative.reach,
        HEADS=num_heads,
        GROUP=heads.group,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        SPLITS=splits,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        ALIBI=slopes is not None,
        RELATIVE=relative is not None,
        SOFTCAP=softcap or 0.0,
        FRESH=fresh,
        STORE=store,
        PARTS=parts,
        HALF=0 if rotary is None else cosines.shape[1],
        NORM=norm_code(norm) if looks_ahead else 0,
        STATE=state.exact.shape[1] if looks_ahead else 0,
        STATE_PARTS=parts_of(state.row_stats) if looks_ahead else 0,
        TILE=shape.tile,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **more,
        **launch,
    )
    return out
