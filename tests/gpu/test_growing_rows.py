"""Rows that move and give their places up on CUDA: the answers of the CPU with a large cache."""

from __future__ import annotations

import pytest

from launcher_scripts.engine.core import row_allocator
from tests.engine.small_models import engine_for, random_tensors
from tests.engine.test_growing_rows import check_answers
from tests.gpu.test_engine import MODERN, wider

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_answers_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], caching: bool
) -> None:
    monkeypatch.setattr(row_allocator, "SPARE_SHARE", 0.0)
    config = wider(**changes)
    tensors = random_tensors(config)
    large = engine_for(config, tensors)
    small = engine_for(
        config,
        tensors,
        device="cuda",
        max_tokens=280,
        max_batch_size=12,
        enable_prefix_caching=caching,
    )
    check_answers(large, small, seed=5)
