"""Many clients at once, every answer compared with the one given alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.soak import MIN_SAMPLES, ProcessSample, Soak, soak
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
        assert not step.finished()
        assert step.stop() == 0, step.err
        assert step.survivors() == []
    assert result.wrong == []
    assert set(result.asked) == set(KINDS) and sum(result.asked.values()) == requests
    assert result.memory_at_end <= (1 + MOST_GROWTH) * result.memory_after_start


def samples(*sizes: float) -> list[ProcessSample]:
    return [ProcessSample("stub", size, 8, 12) for size in sizes]


def test_a_process_that_grows_is_named() -> None:
    count = 3 * MIN_SAMPLES
    soak_result = Soak(1, 1, samples={7: samples(*(100.0 for _ in range(count)))})
    assert soak_result.growth == []
    assert "memory, descriptors and threads of all processes are flat" in soak_result.report()
    soak_result.samples[8] = samples(*(100 + 0.1 * index for index in range(count)))
    (line,) = soak_result.growth
    # 30 samples of 10 s lie between the medians of two thirds.
    assert line == "stub (8): memory_mib grew from 104 to 107, 36 in an hour"
    assert line in soak_result.report()
    short = Soak(1, 1, samples={7: samples(100.0, 200.0)})
    assert short.growth == []
    assert "whether something grows is not known" in short.report()
