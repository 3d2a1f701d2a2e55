"""NeMo's own checkpoints give a prompt one answer, however it is asked and the model divided."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.server.determinism_table import ROWS, WAYS, answers, checkpoints, same
from tests.server.fixture_table import DIVISIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pytriton") is None,
        reason="the pip-installable tritonserver is not there",
    ),
]


@pytest.mark.parametrize("name", checkpoints())
def test_a_prompt_has_one_answer(tmp_path: Path, name: str) -> None:
    found = [
        answers(name, parallelism, tmp_path / str(number))
        for number, parallelism in enumerate(DIVISIONS)
    ]
    for each in found:
        assert same(each, found[0]["alone"]) == dict.fromkeys(WAYS, ROWS)
    assert len({tuple(tokens) for tokens in found[0]["alone"]}) == ROWS
