"""Attention of whole inputs to themselves, in both directions, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels import reference_attention
from launcher_scripts.kernels.cuda.attention_tile import LOG2_E, MIN_SIDE, reached
from launcher_scripts.kernels.cuda.compiling import launcher
from launcher_scripts.kernels.cuda.device_traits import pdl_options
from launcher_scripts.kernels.operands import SPAN_QUERIES, AttentionScores, Heads, Spans


@triton.jit
def _pieces(base, tokens, features, count, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """[tokens, features] of one head, zeros outside the row's `count` tokens."""
    mask = (tokens < count)[:, None] & (features < SIZE)[None, :]
    where = base + tokens[:, None].to(tl.int64) * WIDTH + features[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _scores(query, key, queries, keys, count, bias, scale, reach, RELATIVE: tl.constexpr):
    """float32 [queries, keys], whose powers of two the softmax wants; -inf from `count` keys on."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    if RELATIVE:
        scores += tl.load(bias + reached(keys[None, :] - queries[:, None], reach)) * LOG2_E
    return tl.where((keys < count)[None, :], scores, -float("inf"))


@triton.jit
def attend_blocks(
    qkv,
    blocks,
    bias,
    out,
    scale,
    reach,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RELATIVE: tl.constexpr,
    USE_PDL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: one head of QUERIES tokens of one row, as a line of `blocks` says.

    The softmax runs along with the sum (Dao 2023), in float32 and by powers of two. Only lines
    without tokens leave nothing behind.
    """
    if USE_PDL:
        gdc_launch_dependents()
    line = blocks + tl.program_id(0) * 3
    head = tl.program_id(1)
    start = tl.load(line)
    count = tl.load(line + 1).to(tl.int32)
    first = tl.load(line + 2).to(tl.int32)
    if first >= count:
        return
    width: tl.constexpr = 3 * HEADS * SIZE
    features = tl.arange(0, BLOCK)
    queries = first + tl.arange(0, QUERIES)
    base = qkv + start * width + head * SIZE
    bias += head * (2 * reach + 1)
    if USE_PDL:
        gdc_wait()
    query = _pieces(base, queries, features, count, width, SIZE)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK], tl.float32)
    for past in tl.range(0, count, KEYS):
        keys = past + tl.arange(0, KEYS)
        key = _pieces(base + HEADS * SIZE, keys, features, count, width, SIZE)
        value = _pieces(base + 2 * HEADS * SIZE, keys, features, count, width, SIZE)
        scores = _scores(query, key, queries, keys, count, bias, scale, reach, RELATIVE)
        m_new = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    target = out + (start + queries[:, None]) * (HEADS * SIZE) + head * SIZE + features[None, :]
    mask = (queries < count)[:, None] & (features < SIZE)[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_spans(
    qkv: Tensor,
    heads: Heads,
    spans: Spans,
    scores: AttentionScores,
    *,
    window: int = 0,
) -> Tensor:
    """See reference.attend_spans."""
    if window or scores.softcap is not None or heads.num_kv_heads != heads.num_heads:
        return reference_attention.attend_spans(qkv, heads, spans, scores, window=window)
    relative = scores.relative
    out = qkv.new_empty(qkv.shape[0], heads.num_heads * heads.head_size)
    launcher(attend_blocks, (spans.blocks.shape[0], heads.num_heads))(
        qkv,
        spans.blocks,
        spans.blocks if relative is None else relative.table,
        out,
        scores.scale,
        0 if relative is None else relative.reach,
        HEADS=heads.num_heads,
        SIZE=heads.head_size,
        BLOCK=max(MIN_SIDE, triton.next_power_of_2(heads.head_size)),
        RELATIVE=relative is not None,
        QUERIES=SPAN_QUERIES,
        KEYS=64 if qkv.dtype != torch.float32 else 32,
        num_warps=4,
        num_stages=1,
        **pdl_options(qkv),
    )
    return out
