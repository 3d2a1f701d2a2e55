"""Rows of one client whose tokens go out in one stream."""

from __future__ import annotations

import importlib
import threading
import types
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import (
    NO_STREAM,
    GenerateRequest,
    RowDelta,
    SamplingParameters,
    SharedId,
    open_id,
    pack,
    row_id,
    shared_id,
    unpack_deltas,
)
from tests.backend.fakes import Request
from tests.backend.test_answers import Engine
from tests.processes import wait_for

IDS = st.integers(0, (1 << 31) - 1)


@given(st.lists(st.builds(RowDelta, IDS, st.lists(IDS).map(tuple), st.booleans(), IDS)))
def test_what_is_packed_is_unpacked(rows: list[RowDelta]) -> None:
    assert list(unpack_deltas(pack(rows))) == rows


def test_ids_of_requests() -> None:
    assert shared_id(open_id("a")) == SharedId("a", None)
    assert shared_id(row_id("a", 7, "of a client's own")) == SharedId("a", 7)
    for other in ("", "a client's own", f"{open_id('a')} b", "launcher-shared-row a seven x"):
        assert shared_id(other) is None


class Stream:
    """A stream that is open, the client's ends of its requests, and the engine behind."""

    def __init__(self, package: str) -> None:
        self.module = importlib.import_module(f"{package}.streams")
        self.failures: list[tuple[str, int]] = []
        answers = importlib.import_module(f"{package}.answer").Answers
        self.answers = answers(lambda *failure: self.failures.append(failure))
        self.engine = Engine()
        self.client = Request({}, ())
        self.streams = self.module.SharedStreams(self.answers)
        self.streams.open("mine", self.client)

    def row(self, number: int, beams: int = 1, requested: str = "news", **more: Any) -> Request:
        sampling = SamplingParameters(beam_width=beams)
        sender, row = Request({}, ()), GenerateRequest((1,), 50, sampling)
        answer = self.module.SharedAnswer(
            self.streams.find("mine"),
            number,
            self.answers,
            sender,
            [row],
            {},
            {requested},
            lambda _: {},
            streams=True,
            **more,
        )
        answer.start(self.engine.submit)
        return sender

    def news(self) -> list[list[RowDelta]]:
        """Of the responses after the first, which opened the stream."""
        responses = self.client.answers[1:]
        return [
            list(unpack_deltas(each.tensors["news"].numpy())) for each in responses if each.tensors
        ]


@pytest.fixture
def stream(backend: types.ModuleType) -> Any:
    opened = Stream(str(backend.__package__))
    yield opened
    for row in opened.engine.rows:
        row.future.cancel()
    opened.client.left = True
    opened.answers.close()


def test_one_response_brings_what_is_new_of_every_row(stream: Stream) -> None:
    hold, held = threading.Event(), threading.Event()
    send = stream.client.send

    def slow(response: Any, flags: Any = None) -> None:
        held.set()
        assert hold.wait(30)
        send(response, flags)

    stream.client.send = slow  # type: ignore[method-assign]
    senders = [stream.row(number) for number in (3, 4, 5)]
    stream.engine.step(0)
    assert held.wait(30)
    stream.engine.step(0, 1, 2)
    stream.engine.step(1, 2)
    stream.engine.step(1, last=True)
    hold.set()
    wait_for(lambda: len(stream.news()) == 2)
    first, second = stream.news()
    assert first == [RowDelta(3, (0,), False)]
    assert sorted(second) == [
        RowDelta(3, (1,), False),
        RowDelta(4, (0, 1, 2), True),
        RowDelta(5, (0, 1), False),
    ]
    # The row that has ended is answered by nothing, and the others not yet.
    assert senders[1].answered.wait(30)
    assert [dict(each.tensors) for each in senders[1].answers] == [{}]
    assert not senders[0].answers and not senders[2].answers


def test_the_first_news_of_a_row_have_its_cached_tokens(stream: Stream) -> None:
    stream.row(3)
    stream.row(4)
    stream.engine.rows[0].num_cached_tokens = 32
    stream.engine.step(0)
    wait_for(lambda: len(stream.news()) == 1)
    stream.engine.step(0, 1)
    wait_for(lambda: sum(map(len, stream.news())) == 3)
    first, *rest = (each for response in stream.news() for each in response)
    assert first == RowDelta(3, (0,), False, 32)
    assert [each.num_cached_tokens for each in rest] == [0, 0]


def test_an_error_goes_to_its_own_request(stream: Stream) -> None:
    failing, other = stream.row(0), stream.row(1)
    stream.engine.rows[0].future.set_exception(RuntimeError("broken"))
    stream.engine.step(1, last=True)
    assert failing.answered.wait(30) and other.answered.wait(30)
    assert [str(each.error()) for each in failing.answers] == ["broken"]
    assert stream.news() == [[RowDelta(1, (0,), True)]]
    assert stream.failures == [("failed", 1)]


def test_who_leaves_frees_its_row_alone(stream: Stream) -> None:
    leaving, other = stream.row(0), stream.row(1)
    leaving.left = True
    wait_for(lambda: stream.engine.rows[0].future.cancelled())
    stream.engine.step(1, last=True)
    assert other.answered.wait(30)
    assert not other.answers[0].has_error()


def test_an_idle_stream_ends_and_takes_no_more_rows(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = stream.row(0)
    found = stream.streams.find("mine")
    monkeypatch.setattr(stream.module, "IDLE_SECONDS", -1.0)
    found.check_client()
    assert not found.closed  # its row is running
    stream.engine.step(0, last=True)
    assert sender.answered.wait(30)
    assert stream.client.answered.wait(30)
    with pytest.raises(RequestError, match=NO_STREAM):
        stream.row(1)
    with pytest.raises(RequestError, match=NO_STREAM):
        stream.streams.find("another")


def test_a_row_that_the_engine_refuses_counts_no_more(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Future[Any]:
        raise RequestError("too long")

    monkeypatch.setattr(stream.engine, "submit", refuse)
    with pytest.raises(RequestError, match="too long"):
        stream.row(0)
    monkeypatch.setattr(stream.module, "IDLE_SECONDS", -1.0)
    assert stream.client.answered.wait(30)


@pytest.mark.parametrize("more", [{"beams": 2}, {"requested": "output_ids"}])
def test_what_a_stream_does_not_take(stream: Stream, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="one row without beams"):
        stream.row(0, **more)


def test_names_are_not_taken_twice(stream: Stream) -> None:
    with pytest.raises(RequestError, match="is open"):
        stream.streams.open("mine", Request({}, ()))
