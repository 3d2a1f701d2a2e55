"""Many clients at once, every answer compared with the one given alone."""

from __future__ import annotations

import json

import pytest

from benchmarks.soak import MIN_SAMPLES, ProcessSample, Soak, soak
from benchmarks.soak_cases import KINDS
from tests.server.processes import RunningStep
from tests.server.repositories import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("tritonserver")
MOST_GROWTH = 0.03  # of the memory: allocators keep some of what they freed


@pytest.mark.parametrize("requests", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_wrong_answer_no_dead_server_and_flat_memory(
    shared_server: RunningStep, requests: int
) -> None:
    result = soak(shared_server.ready, requests, clients=16, vocab_size=VOCAB_SIZE)
    print(json.dumps(result.memory))
    print(result.report())
    assert not shared_server.finished()
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
