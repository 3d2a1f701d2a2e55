"""The attention of prefill steps of fused.py: one launch for the new tokens of all rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.prompt_attention import attend_prompts
from launcher_scripts.kernels.operands import (
    QUERIES_PER_TILE,
    WIDEST_PROMPT_HEAD,
    LayerCache,
    PromptSpans,
    RelativeBias,
)

SMALLEST_SIDE = 16  # of a matrix product
WIDE_HEAD = 128  # wider ones take more registers and shared memory


def prompt_attention(
    query: Tensor,
    cache: LayerCache,
    spans: PromptSpans,
    slopes: Tensor | None,
    *,
    scale: float | None = None,
    relative: RelativeBias | None = None,
    window: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """See reference.prompt_attention."""
    tokens, num_heads, size = query.shape
    if spans.tiles is None or size > WIDEST_PROMPT_HEAD:
        return reference.prompt_attention(
            query,
            cache,
            spans,
            slopes,
            scale=scale,
            relative=relative,
            window=window,
            softcap=softcap,
        )
    out = query.new_empty(tokens, num_heads * size)
    wide = size > WIDE_HEAD
    exact = query.dtype == torch.float32
    nothing = cache.arrivals if cache.arrivals is not None else spans.tiles
    launcher(attend_prompts, (spans.tiles.shape[0], num_heads))(
        query,
        cache.keys,
        cache.values,
        spans.tiles,
        nothing if slopes is None else slopes,
        nothing if relative is None else relative.table,
        out,
        cache.keys.shape[1],
        size**-0.5 if scale is None else scale,
        0 if relative is None else relative.reach,
        HEADS=num_heads,
        GROUP=num_heads // cache.keys.shape[0],
        SIZE=size,
        BLOCK=max(SMALLEST_SIDE, triton.next_power_of_2(size)),
        ALIBI=slopes is not None,
        RELATIVE=relative is not None,
        WINDOW=window,
        SOFTCAP=softcap or 0.0,
        QUERIES=QUERIES_PER_TILE,
        TILE=(16 if wide else 32) if exact else 64,
        PRECISION="ieee" if exact else "tf32",
        num_warps=8 if wide else 4,
        num_stages=1 if exact else 2,
    )
    return out
