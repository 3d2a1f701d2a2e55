"""Draft heads on CUDA: the answers and nearly all proposals of the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher_scripts.contract.requests import GenerateRequest
from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_draft_heads import Noted, head_tensors, no_lookup, noted
from tests.engine.test_drafts import check_same
from tests.engine.test_prefix_cache import text
from tests.gpu.test_engine import MODERN, wider

__all__ = ["no_lookup", "noted"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

CONFIG = wider(**MODERN, num_layers=6)
MTP = replace(CONFIG, num_layers=1, draft_head="mtp", tied_embeddings=False)
HEADS = {"mtp": MTP, "eagle3": replace(MTP, draft_head="eagle3", draft_vocab_size=40)}
CUDA = {"device": "cuda", "max_batch_size": 9, "enable_prefix_caching": True}


@pytest.mark.parametrize("kind", HEADS)
def test_answers_are_those_of_the_cpu(kind: str) -> None:
    tensors, head = random_tensors(CONFIG), (HEADS[kind], head_tensors(HEADS[kind]))
    plain = engine_for(CONFIG, tensors)
    check_same(plain, engine_for(CONFIG, tensors, draft=head, **CUDA), 6, lower=-1)


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize("kind", HEADS)
def test_proposals_are_those_of_the_cpu(noted: Noted, kind: str) -> None:
    """Sums differ in their last bits, which few tokens hang on."""
    tensors, head = random_tensors(CONFIG), (HEADS[kind], head_tensors(HEADS[kind]))
    results = []
    for options in ({}, CUDA):
        noted.clear()
        engine = engine_for(CONFIG, tensors, draft=head, **options)
        for seed in range(6):
            request = GenerateRequest(text(9 + seed, seed), 30, num_speculative_tokens=4)
            engine.submit(request).result(60)
        engine.close()
        results.append([ids for *_, proposed in noted for row in proposed.tolist() for ids in row])
    same = sum(one == other for one, other in zip(*results, strict=False))
    assert same > 0.95 * len(results[0]) > 300
