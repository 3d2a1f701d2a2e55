"""Drafts of tokens on CUDA: the tokens of the CPU without them."""

from __future__ import annotations

import pytest

from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_drafts import check_same
from tests.gpu.test_engine import MODERN, wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_answers_are_those_of_the_cpu_without_drafts(changes: dict[str, object]) -> None:
    config = wider(**changes)
    tensors = random_tensors(config)
    plain = engine_for(config, tensors)
    check_same(plain, engine_for(config, tensors, device="cuda", max_batch_size=9), seed=6)
