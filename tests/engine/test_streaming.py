"""Tokens as they come: one call per token but the last, which the future brings."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.row import Snapshot
from tests.engine.small_models import engine_for, random_tensors, small_config
from tests.engine.small_t5 import GOOGLE, t5_config, t5_tensors

GPT = small_config(end_id=67, max_positions=200)


@pytest.fixture(scope="module", params=["gpt", "t5"])
def engine(request):
    if request.param == "gpt":
        config, tensors = GPT, random_tensors(GPT)
    else:
        config = t5_config(**GOOGLE, end_id=67)
        tensors = t5_tensors(config)
    loaded = engine_for(config, tensors, max_batch_size=4)
    yield loaded
    loaded.close()


def test_progress_is_the_answer_token_by_token(engine):
    request = GenerateRequest((3, 4, 5), 6, return_log_probs=True)
    progress: list[GenerateOutput] = []
    answer = engine.submit(request, lambda snapshot: progress.append(snapshot.output())).result(60)
    assert answer == engine.submit(request).result(60)
    assert [output.output_ids for output in progress] == [
        answer.output_ids[:count] for count in range(1, 6)
    ]
    assert [output.output_log_probs for output in progress] == [
        answer.output_log_probs[:count] for count in range(1, 6)
    ]
    assert progress[0].cum_log_probs > progress[-1].cum_log_probs > answer.cum_log_probs


def test_an_early_end_is_told_once(engine):
    ids = engine.submit(GenerateRequest((3, 4, 5), 8)).result(60).output_ids
    first = ids.index(ids[3])
    progress: list[GenerateOutput] = []
    request = GenerateRequest((3, 4, 5), 8, end_id=ids[3])
    answer = engine.submit(request, lambda snapshot: progress.append(snapshot.output())).result(60)
    assert answer.output_ids == ids[: first + 1]
    assert len(progress) == first


def test_rows_stream_beside_each_other(engine):
    seen: dict[int, list[tuple[int, ...]]] = {number: [] for number in range(6)}
    futures = [
        engine.submit(
            GenerateRequest((number, 7), 3 + number),
            lambda snapshot, number=number: seen[number].append(snapshot.output().output_ids),
        )
        for number in range(6)
    ]
    wait(futures, 60)
    for number, future in enumerate(futures):
        ids = future.result().output_ids
        assert seen[number] == [ids[:count] for count in range(1, len(ids))]


def test_a_cancelled_row_stops_at_once(engine):
    started = threading.Event()
    progress: list[GenerateOutput] = []

    def take(snapshot: Snapshot) -> None:
        progress.append(snapshot.output())
        started.set()

    future = engine.submit(GenerateRequest((1, 2), 60), take)
    assert started.wait(30)
    assert future.cancel()
    engine.submit(GenerateRequest((1,), 2)).result(60)
    told = len(progress)
    engine.submit(GenerateRequest((1,), 3)).result(60)
    assert len(progress) == told < 59


def test_a_snapshot_may_be_looked_at_later(engine):
    snapshots: list[Snapshot] = []
    answer = engine.submit(GenerateRequest((3, 4, 5), 7), snapshots.append).result(60)
    assert [len(snapshot.output().output_ids) for snapshot in snapshots] == [1, 2, 3, 4, 5, 6]
    assert snapshots[3].output().output_ids == answer.output_ids[:4]
