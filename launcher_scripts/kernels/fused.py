"""The operations of reference.py for CUDA, most of them as one kernel in the Triton language.

A step of one row is bound by reading the weights: there each projection is one kernel that
multiplies, adds and activates (gemv_kernel.py), behind a norm of its own. Steps of more rows leave
the products to cuBLAS, which reads the weights once for all rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from launcher_scripts.kernels import int8_kernels, reference
from launcher_scripts.kernels.attention_kernels import attend, attention_shape, merge_splits
from launcher_scripts.kernels.gemv_kernel import gemv, gemv_shape
from launcher_scripts.kernels.operands import Heads, LayerCache, Linear, Norm, RelativeBias
from launcher_scripts.kernels.row_kernels import (
    block_argmax,
    final_argmax,
    look_up,
    normalize,
    rotate_and_store,
)

ACTIVATIONS = reference.ACTIVATIONS
NORM_CODES = {"layernorm": 1, "rmsnorm": 2}
ACTIVATION_CODES = {None: 0, "gelu": 1, "gelu_erf": 2, "relu": 3, "silu": 4, "squared_relu": 5}
ARGMAX_BLOCK = 1024

dense = int8_kernels.dense
add_residual = reference.add_residual
rotary_table = reference.rotary_table
context_attention = reference.context_attention
window_attention = reference.window_attention
source_attention = reference.source_attention
source_attention_weights = reference.source_attention_weights


def embed(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """See reference.embed."""
    size = table.shape[1]
    out = torch.empty(ids.shape[0], size, device=table.device)
    look_up[(ids.shape[0],)](
        ids, table, out, first_id, table.shape[0], size, BLOCK=triton.next_power_of_2(size)
    )
    return out


def norm(x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor:
    """See reference.norm."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    normalize[(rows,)](
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


def project(x: Tensor, linear: Linear) -> Tensor:
    """See reference.project."""
    linear = dense(linear)
    if x.shape[0] == 1:
        return _gemv(x, linear, linear.weight.dtype)
    return functional.linear(_normalized(x, linear), linear.weight, linear.bias)


def project_add(x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
    """See reference.project_add."""
    linear = dense(linear)
    if x.shape[0] == 1:
        return _gemv(x, linear, torch.float32, residual=residual)
    return residual + functional.linear(x, linear.weight, linear.bias)


def mlp_up(x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor:
    """See reference.mlp_up."""
    up, gate = dense(up), gate and dense(gate)
    if x.shape[0] == 1:
        return _gemv(x, up, up.weight.dtype, gate=gate, activation=activation)
    normalized = _normalized(x, up)
    hidden = ACTIVATIONS[activation](functional.linear(normalized, up.weight, up.bias))
    if gate is None:
        return hidden
    return hidden * functional.linear(normalized, gate.weight, gate.bias)


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
    rotate_and_store[(tokens, heads.num_heads + 2 * heads.num_kv_heads)](
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
        BLOCK=triton.next_power_of_2(heads.head_size),
        num_warps=1,
    )
    return query


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
) -> Tensor:
    """See reference.decode_attention. Long contexts are split over programs and merged."""
    rows, num_heads, size = query.shape
    splits, tile, warps = attention_shape(longest)
    out = torch.empty(rows, num_heads * size, dtype=query.dtype, device=query.device)
    # [rows, heads, splits]: unnormalized outputs, then largest score and sum of weights
    partial = torch.empty(rows, num_heads, splits, size, device=query.device)
    weights = torch.empty(rows, num_heads, splits, 2, device=query.device)
    shape = {
        "HEADS": num_heads,
        "SIZE": size,
        "BLOCK": triton.next_power_of_2(size),
        "SPLITS": splits,
    }
    attend[(rows, num_heads, splits)](
        query,
        cache.keys,
        cache.values,
        starts,
        lengths,
        query if slopes is None else slopes,
        lengths if positions is None else positions,
        query if relative is None else relative.table,
        out,
        partial,
        weights,
        cache.keys.shape[1],
        size**-0.5 if scale is None else scale,
        0 if relative is None else relative.reach,
        GROUP=num_heads // cache.keys.shape[0],
        ALIBI=slopes is not None,
        RELATIVE=relative is not None,
        TILE=tile,
        num_warps=warps,
        **shape,
    )
    if splits > 1:
        merge_splits[(rows, num_heads)](
            partial, weights, out, SPLIT_BLOCK=triton.next_power_of_2(splits), num_warps=1, **shape
        )
    return out


def logits(x: Tensor, head: Linear) -> Tensor:
    """See reference.logits."""
    if x.shape[0] == 1:
        return _gemv(x, head, torch.float32)
    normalized = _normalized(x, head)
    if normalized.dtype == torch.float32 or not x.is_cuda:
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(normalized.float(), head.weight.float(), bias)
    out = torch.mm(normalized, head.weight.t(), out_dtype=torch.float32)
    return out if head.bias is None else out + head.bias


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax. Two kernels: of blocks, then of the blocks' results."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, ARGMAX_BLOCK)
    values = torch.empty(rows, blocks, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block_argmax[(rows, blocks)](
        logits, values, places, logits.stride(0), size, BLOCK=ARGMAX_BLOCK, num_warps=4
    )
    final_argmax[(rows,)](
        values, places, out, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1
    )
    return out


def _normalized(x: Tensor, linear: Linear) -> Tensor:
    if linear.norm is None:
        return x.to(linear.weight.dtype)
    return norm(x, linear.norm, linear.weight.dtype)


def _gemv(
    x: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    *,
    gate: Linear | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """One row through a projection: [1, out] of `dtype`."""
    out_size, in_size = linear.weight.shape
    x = _normalized(x, linear)
    out = torch.empty(1, out_size, dtype=dtype, device=x.device)
    rows, block, warps = gemv_shape(in_size)
    gemv[(triton.cdiv(out_size, rows),)](
        x,
        linear.weight,
        linear.weight if gate is None else gate.weight,
        x if linear.bias is None else linear.bias,
        x if gate is None or gate.bias is None else gate.bias,
        x if residual is None else residual,
        out,
        out_size,
        IN=in_size,
        BIAS=linear.bias is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gate is not None,
        RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
        num_stages=1,
    )
    return out
