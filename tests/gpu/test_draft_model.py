"""Drafts of a draft model on CUDA: the answers of the CPU, and what it has read is right."""

from __future__ import annotations

import pytest

from launcher_scripts.contract.requests import GenerateRequest
from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_draft_model import all_foretold, near, no_lookup
from tests.engine.test_drafts import accepted, check_same, tried
from tests.engine.test_prefix_cache import text
from tests.gpu.test_engine import MODERN, wider

__all__ = ["no_lookup"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_answers_are_those_of_the_cpu(changes: dict[str, object]) -> None:
    config = wider(**changes)
    tensors = random_tensors(config)
    plain = engine_for(config, tensors)
    options = {"device": "cuda", "max_batch_size": 9, "draft": (config, near(tensors))}
    check_same(plain, engine_for(config, tensors, **options), seed=6)


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize(("tokens", "caching"), [(2000, False), (170, True)])
def test_the_model_itself_foretells_nearly_everything(tokens: int, caching: bool) -> None:
    """Sums differ in their last bits between a step and a pass, which few tokens hang on."""
    config = wider(**MODERN)
    tensors = random_tensors(config)
    engine = engine_for(
        config,
        tensors,
        device="cuda",
        max_tokens=tokens,
        max_batch_size=12,
        enable_prefix_caching=caching,
        draft=(config, tensors),
    )
    requests = [
        GenerateRequest(text(9 + seed, seed), 12 + seed, num_speculative_tokens=1 + seed % 5)
        for seed in range(40)
    ]
    all_foretold(engine, requests)
    assert accepted(engine) > 0.95 * tried(engine) > 300
