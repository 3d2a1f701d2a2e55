"""Rows whose grammars are compiled first: who waits, who does not, and what becomes of clients that
leave meanwhile.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from launcher_scripts.backends.fastertransformer.waiting_rows import GuidedRow, GuidedRows
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from tests.processes import wait_for


class Grammars:
    """`slow` is compiled when it is told to, `bad` refused, `crash` a fault, `known` there."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.compiled = threading.Event()
        self.asked: list[str] = []

    def is_compiled(self, text: str) -> bool:
        return text == "known"

    def guide(self, text: str) -> Any:
        self.asked.append(text)
        if text == "slow":
            self.compiled.wait()
        if text == "bad":
            raise RequestError("too complex")
        if text == "crash":
            raise ZeroDivisionError
        return f"guide of {text}"


class Engine:
    def __init__(self) -> None:
        self.rows: list[tuple[Any, Future[GenerateOutput]]] = []

    def submit(self, request: Any, on_progress: Any, session: Any, guide: Any) -> Any:
        del request, on_progress, session
        future: Future[GenerateOutput] = Future()
        self.rows.append((guide, future))
        return future


@pytest.fixture
def parts():
    grammars, engine = Grammars(), Engine()
    yield grammars, engine, GuidedRows(grammars, engine.submit, nullcontext)
    grammars.compiled.set()
    grammars.executor.shutdown()


def row(grammar: str) -> GuidedRow:
    return GuidedRow(GenerateRequest((1,), 1, guided_grammar=grammar), None, None)


def test_a_known_grammar_waits_for_no_other(parts) -> None:
    grammars, engine, guided = parts
    slow, known = row("slow"), row("known")
    guided.start([slow])
    guided.start([known])
    assert [guide for guide, _ in engine.rows] == ["guide of known"]
    assert guided.num_waiting == 1
    engine.rows[0][1].set_result(GenerateOutput((2,)))
    assert known.future.result(0).output_ids == (2,)
    grammars.compiled.set()
    wait_for(lambda: len(engine.rows) == 2)
    engine.rows[1][1].set_exception(RequestError("no room"))
    with pytest.raises(RequestError, match="no room"):
        slow.future.result(0)
    assert guided.num_waiting == 0


def test_a_client_leaves_a_compiler_to_the_others(parts) -> None:
    grammars, engine, _ = parts
    grammars.executor.shutdown()
    grammars.executor = ThreadPoolExecutor(2)
    guided = GuidedRows(grammars, engine.submit, nullcontext)
    for _ in range(5):
        guided.start([row("slow")], "greedy")
    wait_for(lambda: grammars.asked)
    guided.start([row("a")], "other")
    wait_for(lambda: engine.rows)
    assert [guide for guide, _ in engine.rows] == ["guide of a"]
    assert grammars.asked == ["slow", "a"] and guided.num_waiting == 5
    grammars.compiled.set()
    wait_for(lambda: len(engine.rows) == 6)
    wait_for(lambda: not guided._queues._running and not guided._queues._waiting)


def test_a_refused_grammar_ends_its_row_alone(parts, capsys) -> None:
    _, engine, guided = parts
    rows = [row("bad"), row("crash"), row("a")]
    guided.start(rows)
    wait_for(lambda: engine.rows)
    assert [guide for guide, _ in engine.rows] == ["guide of a"]
    assert isinstance(rows[0].future.exception(0), RequestError)
    assert isinstance(rows[1].future.exception(0), ZeroDivisionError)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_rows_of_a_client_that_leaves_are_given_up(parts) -> None:
    """Before their grammars are compiled, while they are, and after."""
    grammars, engine, guided = parts
    first, compiling, waiting = row("a"), row("slow"), row("a")
    guided.start([first])
    wait_for(lambda: engine.rows)
    guided.start([compiling])
    guided.start([waiting])
    wait_for(lambda: grammars.asked == ["a", "slow"])
    for each in (first, compiling, waiting):
        assert each.future.cancel()
    assert engine.rows[0][1].cancelled()
    grammars.compiled.set()
    wait_for(lambda: not guided.num_waiting)
    grammars.executor.shutdown()
    assert len(engine.rows) == 1 and grammars.asked == ["a", "slow"]
