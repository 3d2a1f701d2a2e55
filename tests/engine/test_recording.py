"""Decode steps are recorded before requests need them: which ones, when, and how many."""

from __future__ import annotations

import pytest

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Bounds, Choice, Plan
from launcher_scripts.engine.model.families import engine_family
from launcher_scripts.engine.runner import graphs as recording
from launcher_scripts.engine.runner.graphs import Recording, bucket_rows, step_shapes
from tests.engine.small_models import EagerGraphs, random_tensors, runner_for, small_config
from tests.engine.small_t5 import t5_config, t5_tensors
from tests.processes import wait_for


def test_short_contexts_come_first_and_sizes_up_to_the_most_rows() -> None:
    shapes = step_shapes(Bounds(300), 6)
    assert [shape.rows for shape in shapes[:5]] == [1, 2, 4, 6, 1]
    assert [shape.own for shape in shapes] == [256] * 16 + [1024] * 16
    assert [shape.choice for shape in shapes[::4]] == [*Choice, *Choice]
    assert {shape.source for shape in shapes} == {0}
    assert len(step_shapes(Bounds(256, 256), 1)) == 4
    assert len(step_shapes(Bounds(257, 2000), 1)) == 2 * 3 * 4
    assert step_shapes(Bounds(), 8) == []


def test_steps_are_filled_up_to_the_most_rows_there_can_be() -> None:
    assert [bucket_rows(rows, 20) for rows in (1, 3, 8, 9, 17, 20)] == [1, 4, 8, 16, 20, 20]


def test_how_long_a_families_rows_are() -> None:
    config = small_config(max_positions=77)
    assert engine_family(config).longest(config) == Bounds(77)
    assert engine_family(t5_config()).longest(t5_config(max_positions=99)) == Bounds(99, 99)
    encoder = t5_config(encoder_only=True)
    assert engine_family(encoder).longest(encoder) == Bounds()


NO_MEMORY = (0, 0)


def test_loading_is_not_prolonged_for_long(monkeypatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(recording.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(recording, "LOAD_SECONDS", 1.0)
    shapes, taken = step_shapes(Bounds(100), 4), []
    some = Recording(shapes, taken.append, lambda: NO_MEMORY)
    assert (
        some.record_at_load() == "decode steps recorded: 1 (1.0 s, 0 MB), 11 left for idle moments"
    )
    while some.pending:
        some.record_next()
    assert [plan.record for plan in taken] == [(shape,) for shape in shapes]


def test_who_asks_again_at_once_does_not_wait_for_a_recording(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    some = Recording(step_shapes(Bounds(100), 4), [].append, lambda: NO_MEMORY)
    assert some.pause() == 0.0
    some.disturbed()
    assert some.pause() == recording.QUIET_SECONDS
    now[0] += 0.75 * recording.QUIET_SECONDS
    assert some.pause() == pytest.approx(0.25 * recording.QUIET_SECONDS)
    now[0] += recording.QUIET_SECONDS
    assert some.pause() == 0.0
    while some.pending:
        some.record_next()
    assert some.pause() is None


def test_memory_is_bounded() -> None:
    taken: list[Plan] = []
    free = iter([90, 89, 86, 86])
    some = Recording(step_shapes(Bounds(100), 4), taken.append, lambda: (next(free), 100))
    assert "decode steps recorded: 2 (" in some.record_at_load()
    assert len(taken) == 2
    assert not some.pending


def test_nothing_is_said_where_nothing_is_recorded() -> None:
    assert Recording([], [].append, lambda: NO_MEMORY).record_at_load() is None


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_no_decode_step_of_a_request_is_new(capsys, family) -> None:
    config = small_config() if family == "gpt" else t5_config()
    tensors = (random_tensors if family == "gpt" else t5_tensors)(config)
    ways = ({}, {"top_k": 3}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "random_seed": 2})
    requests = [
        GenerateRequest((5, 9, 11)[: 1 + row % 3], 3 + row, sampling=SamplingParameters(**own))
        for row, own in enumerate(ways)
    ]
    settings, runner = runner_for(config, tensors, max_batch_size=6)
    plain = Engine.from_runner(settings, lambda: runner)
    wanted = [plain.submit(request).result(60).output_ids for request in requests]
    plain.close()
    assert "recorded" not in capsys.readouterr().out
    graphs = EagerGraphs()
    settings, runner = runner_for(config, tensors, max_batch_size=6, graphs=graphs)
    engine = Engine.from_runner(settings, lambda: runner)
    assert "decode steps recorded: " in capsys.readouterr().out
    shapes = runner.shapes_to_record()
    wait_for(lambda: len(graphs.recorded) == len(shapes))  # the last of them in idle moments
    futures = [engine.submit(request) for request in requests]
    assert [future.result(60).output_ids for future in futures] == wanted
    engine.close()
    steps = {key for key in graphs.asked if isinstance(key[1], Bounds)}
    assert steps
    assert steps <= set(graphs.recorded)
