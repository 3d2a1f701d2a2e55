"""The attention of prefill steps equals the reference; run as kernel_checks.py is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from launcher_scripts.engine.model.rotary import alibi_slopes
from launcher_scripts.kernels.cuda import prompt_attention
from launcher_scripts.kernels.operands import AttentionScores, Heads, RelativeBias, VarlenBatch
from tests.kernels.kernel_checks import (
    CACHES,
    DEVICE,
    DOT_TYPES,
    assert_close,
    fused,
    parts,
    poisoned_cache,
    pytestmark,  # noqa: F401 - pytest reads it
    random,
    reference,
    scattered,
    seeded,  # noqa: F401 - a fixture
)

# First cache token, tokens there before, new tokens: short and long rows, begun and new ones.
SPANS = ((640, 0, 197), (0, 130, 3), (576, 0, 1), (192, 63, 65), (448, 0, 64))
TOKENS = sum(count for _, _, count in SPANS)

KINDS = ("plain", "unaligned", "alibi", "relative", "window", "wide window", "softcap", "sinks")
GROUPED, OTHERS = (Heads(4, 2, 12),), (Heads(2, 2, 16), Heads(2, 1, 160))
# Types and heads that Hopper's own kernel takes.
HALVES = [(dtype, dtype) for dtype in DOT_TYPES if dtype != torch.float32]
WIDE = (Heads(4, 2, 64), Heads(8, 2, 128), Heads(3, 3, 64), Heads(2, 2, 128))


def filled_cache(heads: Heads, dtype: torch.dtype, spans=SPANS):
    """Values where the rows of spans have tokens, NaN elsewhere."""
    cache = poisoned_cache(heads, 896, dtype)
    for start, past, count in spans:
        for part in parts(cache):
            shape = (heads.num_kv_heads, past + count, heads.head_size)
            part[:, start : start + past + count] = random(*shape, dtype=dtype)
    return cache


def with_tiles(spans: VarlenBatch) -> VarlenBatch:
    """With what fills a step up by 131 tokens, and pieces that do nothing."""
    rows = [*spans.pieces(), (TOKENS, -128, 0, 0), (TOKENS + 128, -3, 0, 0), (0, 0, 0, 0)]
    return replace(spans, tiles=torch.tensor(rows, device=DEVICE))


@pytest.mark.parametrize(
    ("types", "heads", "kind"),
    [
        *product(CACHES[::3], GROUPED, KINDS),
        *product(CACHES, OTHERS, ("plain", "window")),
        *product(HALVES, WIDE, ("plain", "unaligned")),
    ],
    ids=str,
)
def test_prompt_attention(monkeypatch, types, heads, kind):
    monkeypatch.setattr(prompt_attention, "FEWEST_LONE_HEADS", 1)
    dtype, kept = types
    is_aligned = kind != "unaligned"
    spans = VarlenBatch(tuple((start + (not is_aligned), *row) for start, *row in SPANS))
    cache = replace(filled_cache(heads, kept, spans.spans), aligned=is_aligned)
    query = random(TOKENS + 131, heads.num_heads, heads.head_size, dtype=dtype)
    scores, window = AttentionScores(heads.head_size**-0.5), 0
    if kind == "alibi":
        slopes = torch.tensor(alibi_slopes(heads.num_heads), device=DEVICE)
        scores = replace(scores, slopes=slopes)
    if kind == "relative":
        scores = AttentionScores(0.7, relative=RelativeBias(random(heads.num_heads, 2 * 9 + 1)))
    if kind.endswith("window"):
        scores, window = replace(scores, softcap=3.0), 40 if kind == "window" else 100
    if kind == "sinks":
        scores, window = replace(scores, sinks=3 * random(heads.num_heads)), 40
    if kind == "softcap":
        scores = AttentionScores(0.7, 1.5)
    blocks = scattered(cache, 16 if kind == "window" else 64)
    got = fused.prompt_attention(query, blocks, with_tiles(spans), scores, window=window)
    assert not got.isnan().any()
    assert not got[TOKENS:].any()
    want = reference.prompt_attention(query[:TOKENS], cache, spans, scores, window=window)
    assert_close(got[:TOKENS], want, dtype)


def test_pieces_hold_every_new_token_once():
    pieces = VarlenBatch(SPANS).pieces()
    places = [place + token for place, size, _, _ in pieces for token in range(size)]
    assert places == list(range(TOKENS))
    assert pieces[:2] == [(0, 128, 640, 0), (128, 69, 640, 128)]
    assert pieces[2] == (197, 3, 0, 130)
