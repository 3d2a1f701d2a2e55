"""Drafts of tokens on CUDA: the tokens of the CPU without them."""

from __future__ import annotations

import pytest

from tests.engine.small_models import engine_for
from tests.engine.test_drafts import check_same
from tests.engine.test_prefix_sharing import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("model", ["gpt", "rope", "window"])
def test_answers_are_those_of_the_cpu_without_drafts(model: str) -> None:
    """By models whose texts repeat themselves, so that some drafts are right."""
    plain = engine_for(*MODELS[model])
    check_same(plain, engine_for(*MODELS[model], device="cuda", max_batch_size=9), seed=6)
