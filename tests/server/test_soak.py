"""Many clients at once, every answer compared with the one given alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak import soak
from benchmarks.soak_cases import KINDS
from tests.server.processes import running
from tests.server.repositories import VOCAB_SIZE, export, export_t5

pytestmark = pytest.mark.usefixtures("tritonserver")
MOST_GROWTH = 0.03  # of the memory: allocators keep some of what they freed


@pytest.mark.parametrize("requests", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_wrong_answer_no_dead_server_and_flat_memory(tmp_path: Path, requests: int) -> None:
    settings = export(tmp_path, name="gpt", tp=2)
    export(tmp_path, name="live", decoupled=True)
    export_t5(tmp_path, name="t5", decoupled=True)
    with running(tmp_path / "job", settings.model_repository) as step:
        ready = step.wait_until_ready()
        result = soak(ready, requests, clients=16, vocab_size=VOCAB_SIZE)
        print(json.dumps(result.memory))
        print(result.report())
        assert not step.ended()
        assert step.stop() == 0, step.err
        assert step.survivors() == []
    assert result.wrong == []
    assert set(result.asked) == set(KINDS) and sum(result.asked.values()) == requests
    assert result.memory_at_end <= (1 + MOST_GROWTH) * result.memory_after_start
