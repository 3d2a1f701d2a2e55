"""A prefix cache on CUDA: the answers of the CPU without one."""

from __future__ import annotations

import random

import pytest

from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_prefix_sharing import check_same, hits
from tests.gpu.test_engine import MODERN, wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("tokens", [900, 20_000])
@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_answers_are_those_of_the_cpu(changes: dict[str, object], tokens: int) -> None:
    config = wider(**changes)
    tensors = random_tensors(config)
    plain = engine_for(config, tensors)
    sharing = engine_for(
        config, tensors, device="cuda", max_tokens=tokens, enable_prefix_caching=True
    )
    check_same(plain, sharing, random.Random(tokens), rounds=4)
    assert hits(sharing) > 50
    plain.close()
    sharing.close()
