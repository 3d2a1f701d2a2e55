"""Latent attention through kernels equals the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

import math

import pytest
import torch

from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import fused
from launcher_scripts.kernels.operands import AttentionScores, LayerCache, Norm
from launcher_scripts.kernels.quantization import saturated
from tests.kernels.kernel_checks import (
    CACHES,
    DEVICE,
    INTERPRETED,
    assert_close,
    coarser,
    pytestmark,  # noqa: F401 - pytest reads it
    random,
    scattered,
    seeded,  # noqa: F401 - pytest uses it
)

# heads, key, value, rank, rope
SIZES = (
    [(3, 8, 6, 12, 4), (18, 5, 20, 32, 10)]
    if INTERPRETED
    else [(16, 128, 128, 512, 64), (128, 128, 128, 512, 64), (40, 64, 64, 256, 32)]
)
LENGTHS = [33, 1, 20, 64, 7] if INTERPRETED else [1030, 1, 700, 64, 4000]
TOKENS = sum(LENGTHS) + 2


def latent_cache(size: int, kept: torch.dtype) -> LayerCache:
    return LayerCache(*[saturated(random(1, TOKENS, size), kept)] * 2)


@pytest.mark.parametrize("rotary_size", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_store_latents(dtype, kept, sizes, rotary_size):
    heads, key, _, rank, rope = sizes
    tokens, cache = 3, latent_cache(rank + rope, kept)
    created = random(tokens, heads * (key + rope) + rank + rope, dtype=dtype)
    norm = Norm("rmsnorm", 1 + 0.3 * random(rank), None, 1e-6)
    angles = random(tokens, rope // 2)
    rotary = (angles.cos(), angles.sin()) if rotary_size else None
    slots = torch.tensor([4, 0, 9], device=DEVICE)
    results = []
    for kernels in (fused, reference):
        query, latent = created.clone().split((heads * (key + rope), rank + rope), 1)
        local = LayerCache(cache.keys.clone(), cache.values)
        query = query.unflatten(1, (heads, key + rope))
        turned = kernels.store_latents(query, latent, norm, rotary, slots, local)
        results.append((turned, local.keys.float()))
    (got, mine), (want, theirs) = results
    assert_close(got, want, dtype)
    assert_close(mine, theirs, coarser(dtype, kept))


@pytest.mark.parametrize("rows", [1, len(LENGTHS)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "kept"), CACHES)
def test_attend_latents(dtype, kept, sizes, rows):
    heads, key, value, rank, rope = sizes
    cache = latent_cache(rank + rope, kept)
    up = (random(heads * (key + value), rank) / math.sqrt(rank)).to(dtype)
    created = random(rows, heads * (key + rope) + 3, dtype=dtype)
    query = created[:, : heads * (key + rope)].unflatten(1, (heads, key + rope))
    lengths = torch.tensor(LENGTHS[:rows], device=DEVICE)
    starts = lengths.cumsum(0) - lengths
    of_rows = starts, lengths, max(LENGTHS)
    scores = AttentionScores((key + rope) ** -0.5)
    got = fused.attend_latents(query, up, scattered(cache, 64), of_rows, scores)
    want = reference.attend_latents(query, up, cache, of_rows, scores)
    assert_close(got, want, dtype)
