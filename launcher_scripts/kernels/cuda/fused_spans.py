"""The operations of fused.py on many tokens at a time, between the products, which are cuBLAS's."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels import reference_attention
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.rotary import multiply_gate
from launcher_scripts.kernels.cuda.row_products import ACTIVATION_CODES, early
from launcher_scripts.kernels.cuda.span_attention import attend_spans as attend_kernel
from launcher_scripts.kernels.operands import SPAN_QUERIES, Heads, RelativeBias, Spans

SMALLEST_SIDE = 16  # of a matrix product
GATE_BLOCK = 2048


def attend_spans(
    qkv: Tensor,
    heads: Heads,
    spans: Spans,
    *,
    scale: float,
    relative: RelativeBias | None = None,
    window: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """See reference.attend_spans."""
    if window or softcap is not None or heads.num_kv_heads != heads.num_heads:
        more = {"scale": scale, "relative": relative, "window": window, "softcap": softcap}
        return reference_attention.attend_spans(qkv, heads, spans, **more)
    out = qkv.new_empty(qkv.shape[0], heads.num_heads * heads.head_size)
    launcher(attend_kernel, (spans.blocks.shape[0], heads.num_heads))(
        qkv,
        spans.blocks,
        spans.blocks if relative is None else relative.table,
        out,
        scale,
        0 if relative is None else relative.reach,
        HEADS=heads.num_heads,
        SIZE=heads.head_size,
        BLOCK=max(SMALLEST_SIDE, triton.next_power_of_2(heads.head_size)),
        RELATIVE=relative is not None,
        QUERIES=SPAN_QUERIES,
        KEYS=64 if qkv.dtype != torch.float32 else 32,
        num_warps=4,
        num_stages=1,
        **early(qkv),
    )
    return out


def gated(up: Tensor, gate: Tensor, activation: str) -> Tensor:
    """act(up) * gate of [N, ffn] each, in the place of `up`."""
    launcher(multiply_gate, (triton.cdiv(up.numel(), GATE_BLOCK),))(
        up,
        gate,
        up.numel(),
        ACTIVATION=ACTIVATION_CODES[activation],
        BLOCK=GATE_BLOCK,
        num_warps=8,
        **early(up),
    )
    return up
