"""When responses go out, and what they hold, while tokens come faster than they can be sent."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.results import Candidate
from launcher_scripts.engine.core.row import Row, Snapshot, output_so_far, snapshot
from tests.backend.fakes import Request
from tests.processes import wait_for


class Engine:
    """Rows whose tokens the test gives."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def submit(
        self, request: GenerateRequest, on_progress: Callable[[Snapshot], None] | None, _: Any
    ) -> Future[GenerateOutput]:
        future: Future[GenerateOutput] = Future()
        self.rows.append(Row(request, future, request.input_ids, -1, on_progress=on_progress))
        return future

    def step(self, *rows: int, last: bool = False) -> None:
        """One more token for each of the rows."""
        for row in (self.rows[number] for number in rows):
            if row.hypotheses is None:
                row.tokens.append(len(row.tokens))
            else:
                row.hypotheses.take([Candidate(n, n, False, -n, -n, -n) for n in range(row.width)])
            if last:
                row.future.set_result(output_so_far(row))
            elif row.on_progress is not None:
                row.on_progress(snapshot(row))


class Sender(Request):
    """A client that takes no response before it is let."""

    def __init__(self, log: list[tuple[Sender, int]] | None = None) -> None:
        super().__init__({}, ())
        self.taking, self.asked = threading.Event(), threading.Event()
        self.log = [] if log is None else log

    def send(self, response: Any, flags: Any = None) -> None:
        self.asked.set()
        assert self.taking.wait(30)
        if not response.has_error():
            self.log.append((self, int(response.tensors["count"][0])))
        super().send(response, flags)


@pytest.fixture
def answers(backend):
    module = importlib.import_module(f"{backend.__package__}.answer")
    thread = module.Answers(lambda *_: None)

    def start(engine: Engine, sender: Sender, rows: int = 1, beams: int = 1) -> Any:
        sampling = SamplingParameters(beam_width=beams)
        requests = [GenerateRequest((1,), 50, sampling)] * rows

        def counts(outputs: list[GenerateOutput]) -> dict[str, torch.Tensor]:
            return {"count": torch.tensor([len(output.output_ids) for output in outputs])}

        answer = module.Answer(thread, sender, requests, {}, {"count"}, counts, streams=True)
        answer.start(engine.submit)
        return answer

    yield start
    thread.close()


def test_a_lone_client_gets_every_token_by_itself(answers):
    engine, sender = Engine(), Sender()
    answers(engine, sender)
    for _ in range(5):
        engine.step(0)
    engine.step(0, last=True)
    sender.taking.set()
    assert sender.answered.wait(30)
    assert [count for _, count in sender.log] == [1, 2, 3, 4, 5, 6]


def test_no_state_of_a_beam_search_comes_twice(answers):
    engine, sender = Engine(), Sender()
    answers(engine, sender, beams=2)
    for _ in range(5):
        engine.step(0)
    engine.step(0, last=True)
    sender.taking.set()
    assert sender.answered.wait(30)
    counts = [count for _, count in sender.log]
    assert counts == sorted(set(counts)) and counts[-1] == 6


def test_a_response_brings_all_that_came_while_others_were_served(answers):
    engine, log = Engine(), []
    busy, other = Sender(log), Sender(log)
    answers(engine, busy)
    answers(engine, other)
    engine.step(0)
    assert busy.asked.wait(30)  # the thread is with this client
    for _ in range(7):
        engine.step(0, 1)
    other.taking.set()
    busy.taking.set()
    engine.step(0, 1, last=True)
    assert busy.answered.wait(30) and other.answered.wait(30)
    counts = {sender: [count for one, count in log if one is sender] for sender in (busy, other)}
    assert counts[busy][0] == 1 and counts[busy][-1] == 9
    assert counts[other][-1] == 8
    for each in counts.values():
        assert each == sorted(set(each))
    assert len(log) < 9 + 8


def test_a_first_token_goes_before_everybody_elses_next_one(answers):
    engine, log = Engine(), []
    senders = [Sender(log) for _ in range(6)]
    for sender in senders:
        sender.taking.set()
        answers(engine, sender)
    old, new = senders[:5], senders[5]
    engine.step(*range(5))
    wait_for(lambda: {one for one, _ in log} == set(old))
    old[0].taking.clear()
    old[0].asked.clear()
    engine.step(0)
    assert old[0].asked.wait(30)
    engine.step(1, 2, 3, 4)
    engine.step(5)
    seen = len(log)
    old[0].taking.set()
    wait_for(lambda: len(log) >= seen + 6)
    assert [one for one, _ in log[seen : seen + 2]] == [old[0], new]
    for row in engine.rows:
        row.future.set_exception(RuntimeError("the test is over"))


def test_nothing_piles_up_for_a_client_that_takes_nothing(answers):
    engine, slow, other = Engine(), Sender(), Sender()
    answer = answers(engine, slow, rows=2)
    answers(engine, other)
    engine.step(0, 1)
    assert slow.asked.wait(30)
    for _ in range(40):
        engine.step(0, 1, 2)
    assert len(answer._snapshots) == 2
    other.taking.set()
    slow.taking.set()
    engine.step(0, 1, 2, last=True)
    assert slow.answered.wait(30) and other.answered.wait(30)
    assert slow.log[-1][1] == 42
