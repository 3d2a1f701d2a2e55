"""Load tests: what is asked when, what is counted, what makes a run invalid, where it is full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.evaluation import GoodputBounds, LoadPrompts, LoadSettings
from launcher_scripts.evaluation.load.driver import (
    ClientPlan,
    DriverResult,
    LoadRequest,
    Prompts,
    RunLoad,
    TimedResponse,
    drive,
    plan_clients,
    poisson_arrivals,
    read_prompt_texts,
)
from launcher_scripts.evaluation.load.figures import (
    LoadRun,
    find_saturation,
    invalid_reasons,
    run_figures,
)
from tests.evaluation.virtual_time import run_virtually

FIRST, NEXT = 0.2, 0.05  # seconds of the exact server
PROMPTS = Prompts(LoadPrompts(input=4, output=5), 0, 100)


async def exact(request: LoadRequest) -> AsyncGenerator[int, None]:
    """A server that takes the same time for every token."""
    for token in range(request.output_len):
        await asyncio.sleep(NEXT if token else FIRST)
        yield token + 1


def driven(
    load: RunLoad, ask: Any = exact, timeout: float = 60.0, **more: Any
) -> list[DriverResult]:
    """One process, in virtual time. more: LoadSettings."""
    settings = LoadSettings(**{"seconds": None, "requests": 10, "warmup": 0.0, **more})
    return [run_virtually(drive(plan_clients(settings, load, PROMPTS, timeout), ask))]


def figures(
    load: RunLoad, of: Sequence[DriverResult], seconds: float | None = None, **bounds: float
) -> LoadRun:
    return run_figures("grpc", load, of, seconds, GoodputBounds(**bounds))


def reasons(
    of: Sequence[DriverResult], taken: tuple[int, int] | None = (0, 100)
) -> tuple[str, ...]:
    return invalid_reasons(figures(RunLoad(clients=2), of), of, taken)


# What is measured


def test_a_closed_loop_of_an_exact_server() -> None:
    """Two clients, ten requests of 5 tokens: 0.4 s each, one after the other."""
    run = figures(RunLoad(clients=2), driven(RunLoad(clients=2)))
    assert run.seconds == pytest.approx(5 * 0.4)
    assert (run.requests, run.failed, run.prompt_tokens, run.generated_tokens) == (10, 0, 40, 50)
    assert run.tokens_per_second == pytest.approx(25)
    assert run.requests_per_second == pytest.approx(5)
    same = ("p50", "p90", "p99", "mean")
    assert run.first_token_ms == pytest.approx(dict.fromkeys(same, 200))
    assert run.between_tokens_ms == run.per_token_ms == pytest.approx(dict.fromkeys(same, 50))
    assert run.latency_ms == pytest.approx(dict.fromkeys(same, 400))
    assert [row["requests"] for row in run.timeline] == [4, 6]
    assert sum(row["tokens"] for row in run.timeline) == 50
    assert run.goodput is None


def test_what_comes_before_and_after_the_time_that_counts_does_not() -> None:
    """0.4 s a request: asked at 0, 0.4, 0.8 | 1.2, 1.6, 2.0, 2.4, 2.8 | of which one ends later."""
    settings = {"seconds": 2.0, "requests": None, "warmup": 0.9}
    run = figures(RunLoad(clients=1), driven(RunLoad(clients=1), **settings), 2.0)
    assert (run.seconds, run.requests) == (2.0, 5)
    assert run.requests_per_second == pytest.approx(5 / 2)  # at 1.2, 1.6, 2.0, 2.4, 2.8
    assert run.generated_tokens == 25  # at 2.9 s the last request has none
    assert [row["second"] for row in run.timeline] == [0, 1]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    load = RunLoad(rate=50.0)
    run = figures(load, driven(load, requests=20, seed=3))
    times = poisson_arrivals(50.0, 3, 0.0, 20, None)
    assert run.seconds == pytest.approx(times[-1] + 0.4)
    assert (run.mode, run.requests) == ("open", 20)
    assert run.latency_ms is not None and run.latency_ms["p99"] == pytest.approx(400)


def test_a_late_client_counts_from_when_it_should_have_asked() -> None:
    """The server holds the whole client up for a second: later requests waited, too."""

    async def holding(request: LoadRequest) -> AsyncGenerator[int, None]:
        loop: Any = asyncio.get_running_loop()
        loop._now += 1.0
        yield request.output_len

    plan = ClientPlan(
        tuple(LoadRequest((1,), 1, at) for at in (0.0, 0.5)), 0, None, None, 0.0, 60.0
    )
    first, second = run_virtually(drive(plan, holding)).answers
    assert first.finished - first.asked == pytest.approx(1.0)
    assert second.asked == pytest.approx(0.5)
    assert second.finished - second.asked >= 1.5


def test_tokens_that_came_together_share_the_time_before_them() -> None:
    answer = TimedResponse(0.0, 3.0, 1, 4, ((1.0, 1), (3.0, 4)))
    run = figures(RunLoad(clients=1), [DriverResult((answer,), 0.0, 0.0, ())])
    assert run.between_tokens_ms is not None and run.per_token_ms is not None
    assert (
        run.between_tokens_ms["p50"]
        == run.between_tokens_ms["p99"]
        == pytest.approx(2000 / 3, abs=1e-3)
    )
    assert run.per_token_ms["mean"] == pytest.approx(2000 / 3, abs=1e-3)


def test_whole_answers_have_no_first_token() -> None:
    answer = TimedResponse(0.0, 2.0, 1, 4, ((2.0, 4),))
    of = [DriverResult((answer,), 0.0, 0.0, ())]
    bounds = GoodputBounds(between_tokens_ms=499.0)
    run = run_figures("http", RunLoad(clients=1), of, None, bounds, streamed=False)
    assert run.first_token_ms is run.between_tokens_ms is run.per_token_ms is None
    assert run.latency_ms is not None and run.latency_ms["p50"] == 2000
    assert run.goodput == 0.0  # 500 ms a token


@pytest.mark.parametrize(
    ("bounds", "share"),
    [
        ({"first_token_ms": 201.0}, 1.0),
        ({"first_token_ms": 199.0}, 0.0),
        ({"between_tokens_ms": 51.0}, 1.0),
        ({"between_tokens_ms": 49.0}, 0.0),
        ({"latency_ms": 401.0, "first_token_ms": 199.0}, 0.0),
    ],
)
def test_goodput_is_what_keeps_every_bound(bounds: dict[str, float], share: float) -> None:
    run = figures(RunLoad(clients=2), driven(RunLoad(clients=2)), **bounds)
    assert run.goodput == pytest.approx(share * run.requests_per_second)


def test_processes_divide_the_clients_and_the_requests() -> None:
    settings = LoadSettings(requests=10, seconds=None, warmup=0.0)
    plan = plan_clients(settings, RunLoad(clients=5), PROMPTS, 60.0)
    parts = plan.divided(2)
    assert [(part.clients, part.count) for part in parts] == [(3, 5), (2, 5)]
    assert sorted(r.prompt_ids for part in parts for r in part.requests) == sorted(
        r.prompt_ids for r in plan.requests
    )
    assert len(plan.divided(8)) == 5
    of = [run_virtually(drive(part, exact)) for part in parts]
    assert figures(RunLoad(clients=5), of).generated_tokens == 50
    arrivals = plan_clients(settings, RunLoad(rate=9.0), PROMPTS, 60.0)
    assert sum(len(part.requests) for part in arrivals.divided(3)) == 10


# What is asked


def test_poisson_arrivals_are_the_seeds_and_have_the_rate() -> None:
    expected = np.cumsum(np.random.default_rng(7).exponential(1 / 20, 40))
    np.testing.assert_allclose(poisson_arrivals(20.0, 7, 0.0, 40, None), expected)
    many = poisson_arrivals(100.0, 1, 5.0, None, 95.0)
    assert len(many) == pytest.approx(10_000, rel=0.03)
    assert many[-1] < 100.0
    gaps = np.diff(many)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as of an exponential distribution
    after = [at for at in poisson_arrivals(10.0, 1, 2.0, 30, None) if at >= 2.0]
    assert len(after) == 30


def test_prompts_have_the_lengths_that_are_asked_for() -> None:
    prompts = Prompts(LoadPrompts(input=100, output=20, spread=0.5), 1, 50)
    requests = [prompts.request(index) for index in range(200)]
    lengths = [len(request.prompt_ids) for request in requests]
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(set(lengths)) > 50
    assert {10 <= request.output_len <= 30 for request in requests} == {True}
    assert all(0 < token < 50 for request in requests for token in request.prompt_ids)
    assert prompts.request(3) == Prompts(LoadPrompts(None, 100, 20, 0.5), 1, 50).request(3)
    assert prompts.request(3) != Prompts(LoadPrompts(None, 100, 20, 0.5), 2, 50).request(3)
    texts = Prompts(LoadPrompts(input=2, output=3), 0, 50, [[5, 6, 7], [8]])
    asked = [texts.request(index).prompt_ids for index in range(3)]
    assert asked == [(5, 6), (8,), (5, 6)]


def test_texts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"text": "one"}\n\n{"prompt": "two"}\nthree words here\n')
    assert list(read_prompt_texts(path)) == ["one", "two", "three words here"]
    path.write_text('{"words": "one"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* has neither text nor prompt; change eval"):
        list(read_prompt_texts(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_prompt_texts(tmp_path / "absent"))


def trace_plan(tmp_path: Path, *rows: Any, **more: Any) -> ClientPlan:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"clients": (), "trace_file": str(path), "warmup": 0.0, **more}
    return plan_clients(LoadSettings(**values), RunLoad(), PROMPTS, 60.0)


def row(timestamp: float, input_length: int = 3, output_length: int = 2) -> dict[str, float]:
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths}


def test_a_trace_is_asked_as_it_is(tmp_path: Path) -> None:
    plan = trace_plan(tmp_path, row(500), row(1500, 7, 4), row(1500), row(90_500))
    asked = [(r.at, len(r.prompt_ids), r.output_len) for r in plan.requests]
    assert asked == [(0.0, 3, 2), (1.0, 7, 4), (1.0, 3, 2)]  # those of the first 30 seconds
    run = run_virtually(drive(plan, exact))
    assert figures(RunLoad(), [run]).generated_tokens == 8
    first = trace_plan(tmp_path, row(0), row(1000), row(2000), seconds=None, requests=2)
    assert [request.at for request in first.requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([], "has no request; change evaluate.load.trace_file"),
        ([{"timestamp": 1}], "line 1 has not the numbers timestamp"),
        (["words"], "line 1 has not the numbers"),
        ([row(5), row(4)], "line 2 goes back in time"),
        ([row(5, output_length=0)], "line 1 goes back in time or has a length below 1"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, rows: list[Any], answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        trace_plan(tmp_path, *rows)


def test_a_trace_within_the_warm_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no request after the warm-up of 2 s"):
        trace_plan(tmp_path, row(0), row(1000), warmup=2.0)


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"paths": ("gateway", "udp")}, "unknown path; got 'udp'; choices: gateway, grpc, http"),
        ({"paths": ("grpc", "grpc")}, "paths must hold each path once"),
        ({"clients": (0,)}, "clients must be above 0"),
        ({"rates": (-1.0,)}, "rates must be above 0"),
        ({"clients": ()}, "no load is asked for"),
        ({"requests": 3}, "one of them is null; got (3, 30.0)"),
        ({"seconds": None}, "one of them is null"),
        ({"clients": (), "trace_file": "t", "find_saturation": True}, "by clients or rates"),
        ({"generator": "guidellm", "trace_file": "t"}, "texts of a file, and no trace"),
        ({"generator": "guidellm"}, "guidellm is given a number of requests"),
        (
            {
                "clients": (),
                "rates": (1.0,),
                "requests": 3,
                "seconds": None,
                "find_saturation": True,
            },
            "is seen in runs of seconds",
        ),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LoadSettings(**wrong)
    assert answer in str(raised.value)


# What makes a run invalid


def test_a_clean_run_is_valid() -> None:
    assert reasons(driven(RunLoad(clients=2))) == ()


async def failing(request: LoadRequest) -> AsyncGenerator[int, None]:
    if len(request.prompt_ids) == 4 and request.prompt_ids[0] % 2:
        raise ConnectionError("it is\ngone")
    async for tokens in exact(request):
        yield tokens


async def empty(_: LoadRequest) -> AsyncGenerator[int, None]:
    await asyncio.sleep(FIRST)
    return
    yield


async def short(request: LoadRequest) -> AsyncGenerator[int, None]:
    async for tokens in exact(replace(request, output_len=request.output_len - 2)):
        yield tokens


async def hanging(_: LoadRequest) -> AsyncGenerator[int, None]:
    yield 1
    await asyncio.sleep(1e6)


def test_failed_requests() -> None:
    of = driven(RunLoad(clients=2), failing)
    failed = sum(answer.error is not None for answer in of[0].answers)
    assert 0 < failed < 10
    (reason,) = reasons(of)
    assert reason == f"{failed} of 10 requests failed; the first: ConnectionError: it is gone"
    assert figures(RunLoad(clients=2), of).failed == failed


def test_requests_that_take_too_long() -> None:
    of = driven(RunLoad(clients=2), hanging, timeout=5.0)
    assert reasons(of) == ("10 of 10 requests failed; the first: no answer within 5 s",)


def test_answers_without_a_token() -> None:
    of = driven(RunLoad(clients=2), empty)
    assert reasons(of) == ("10 of 10 requests were answered without a token",)
    run = figures(RunLoad(clients=2), of)
    assert run.tokens_per_second == 0 and run.latency_ms is None


def test_answers_that_are_too_short() -> None:
    (reason,) = reasons(driven(RunLoad(clients=2), short))
    assert "10 of 10 requests were answered with fewer tokens than asked for" in reason
    assert reason.endswith("the first: 3 of 5")


def test_a_run_in_which_nothing_was_asked() -> None:
    assert reasons([DriverResult((), 0.0, 0.0, ())], (0, 0)) == (
        "no request was asked after the warm-up",
    )


def test_a_client_that_was_the_bottleneck() -> None:
    (clean,) = driven(RunLoad(clients=2))
    (reason,) = reasons([clean, replace(clean, busy=0.95)])
    assert reason.startswith("the client was the bottleneck: busy for 95% of the time; more")
    (reason,) = reasons([replace(clean, lags=(0.05,) * 10)])
    assert "it woke 50.0 ms late (p99, bound 20.0 ms)" in reason  # a tenth of the first token's
    assert reasons([replace(clean, lags=(0.019,) * 10)]) == ()


def test_a_client_that_computes_is_seen() -> None:
    """In real time: a response that takes the thread for longer than its server."""

    async def computing(request: LoadRequest) -> AsyncGenerator[int, None]:
        await asyncio.sleep(0)
        sum(range(500_000))
        yield request.output_len

    plan = plan_clients(
        LoadSettings(requests=20, seconds=None, warmup=0.0), RunLoad(clients=2), PROMPTS, 60.0
    )
    run = asyncio.run(drive(plan, computing))
    assert run.busy > 0.1 and max(run.lags) > 0.001


def test_a_server_that_restarted_or_ended() -> None:
    of = driven(RunLoad(clients=2))
    assert reasons(of, (90, 100)) == ()
    (reason,) = reasons(of, (1000, 7))
    assert reason.startswith("the server restarted during the run: it has taken 7 requests")
    assert reasons(of, None) == ("the server does not answer any more",)


# Where a server is full


class ModelServer:
    """Throughput rises with the clients up to `full`; beyond that they wait."""

    def __init__(self, full: float, **changes: Any) -> None:
        self.full, self.changes = full, changes
        self.asked: list[float] = []

    def __call__(self, load: RunLoad) -> LoadRun:
        size = load.clients or load.rate or 0.0
        self.asked.append(size)
        rate = min(size, self.full)
        run = figures(load, driven(RunLoad(clients=2)))
        more = {name: change(size) for name, change in self.changes.items()}
        run = replace(run, seconds=100.0, requests=round(100 * size), requests_per_second=rate)
        return replace(run, tokens_per_second=10 * rate, **more)


def test_clients_are_doubled_until_throughput_stops_rising() -> None:
    server = ModelServer(23)
    found = find_saturation(server, RunLoad(clients=1), 20)
    assert server.asked == [1, 2, 4, 8, 16, 32, 64]
    assert (found.clients, found.rate, found.requests_per_second) == (32, None, 23)
    assert found.tokens_per_second == 230
    expected = "32 clients; 64 clients are too many: there tokens per second change by +0.0%"
    assert found.text == expected


def test_a_rate_that_is_not_kept_up_with() -> None:
    found = find_saturation(ModelServer(100.0), RunLoad(rate=16.0), 20)
    assert found.rate is not None and 96 <= found.rate <= 112  # 90 % of them are answered
    assert "requests are answered while" in found.text


def test_bounds_end_the_search_before_throughput_does() -> None:
    server = ModelServer(1000, goodput=lambda size: size if size <= 40 else 0.5 * size)
    found = find_saturation(server, RunLoad(clients=1), 20)
    assert found.clients is not None and 36 <= found.clients <= 40
    assert "answers per second keep the bounds" in found.text


def test_invalid_runs_are_not_carried() -> None:
    server = ModelServer(1000, invalid_reasons=lambda _: ("3 of 9 requests failed",))
    server.changes["valid"] = lambda size: size < 5
    found = find_saturation(server, RunLoad(clients=1), 20)
    assert found.clients == 4
    assert "5 clients are too many: that run is invalid (3 of 9 requests failed)" in found.text


def test_the_search_has_an_end() -> None:
    server = ModelServer(1e9)
    found = find_saturation(server, RunLoad(clients=1), 4)
    assert server.asked == [1, 2, 4, 8]
    assert found.text == "more than 8 clients: the last of the runs was carried, too"
    nothing = ModelServer(1e9, valid=lambda _: False)
    found = find_saturation(nothing, RunLoad(clients=4), 9)
    assert nothing.asked == [4, 2, 1]
    assert (found.requests_per_second, found.clients) == (0.0, None)
    assert found.text.startswith("not even 1 client can be carried: that run is invalid")
