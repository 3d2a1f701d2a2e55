"""The gateway's path over real sockets, client processes, guidellm's report, and the step."""

from __future__ import annotations

import asyncio
import json
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from benchmarks.exact_server import MODEL, exact_server
from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.common.packages import ERROR
from launcher_scripts.config.evaluation import GoodputBounds, LoadPrompts, LoadSettings
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.settings import EvaluateSettings, write_settings
from launcher_scripts.evaluation.load import load_test
from launcher_scripts.evaluation.load.driver import (
    ClientPlan,
    DriverResult,
    LoadRequest,
    Prompts,
    RunLoad,
    drive,
    plan_clients,
)
from launcher_scripts.evaluation.load.figures import run_figures
from launcher_scripts.evaluation.load.load_test import run_plan
from launcher_scripts.evaluation.load.paths import LoadTarget, TokenRequest
from launcher_scripts.steps import measure_load

FIRST, NEXT = 0.02, 0.002
TOKENS = TokenRequest(MODEL, "GPT")


def target(address: str, *, stream: bool = True, key: str | None = None) -> LoadTarget:
    return LoadTarget("gateway", (address,), TOKENS, stream, api_key=key)


def closed(clients: int, requests: int, output: int = 5) -> ClientPlan:
    settings = LoadSettings(requests=requests, seconds=None, warmup=0.0)
    prompts = Prompts(LoadPrompts(input=4, output=output), 0, 100)
    return plan_clients(settings, RunLoad(clients=clients), prompts, 60.0)


@pytest.fixture
def exact() -> Iterator[str]:
    """The address of an exact server in a thread."""
    started: SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = SimpleQueue()

    async def serve() -> None:
        stopped = asyncio.Event()
        async with exact_server(FIRST, NEXT) as address:
            started.put((address, asyncio.get_running_loop(), stopped))
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stopped = started.get(timeout=30)
    yield address
    loop.call_soon_threadsafe(stopped.set)
    thread.join()


def test_what_the_gateway_streams_is_counted_and_timed(exact: str) -> None:
    of = run_plan(target(exact), closed(2, 6), 1)
    run = run_figures("gateway", RunLoad(clients=2), of, None, GoodputBounds())
    assert (run.requests, run.failed, run.generated_tokens, run.prompt_tokens) == (6, 0, 30, 24)
    # A machine may be slower than the server's clock, and never faster.
    assert run.first_token_ms is not None and run.first_token_ms["p50"] >= 20
    assert run.latency_ms is not None and run.latency_ms["p50"] >= 28
    assert run.tokens_per_second <= 2 * 5 / (FIRST + 4 * NEXT)


def test_client_processes_share_the_work(exact: str) -> None:
    of = run_plan(target(exact), closed(3, 7), 2)
    assert [len(each.answers) for each in of] == [4, 3]
    run = run_figures("gateway", RunLoad(clients=3), of, None, GoodputBounds())
    assert (run.generated_tokens, run.failed, run.client["processes"]) == (35, 0, 2)
    # Their clocks are the same one.
    assert abs(of[0].begin - of[1].begin) < run.seconds + 60


def test_a_server_that_is_not_there() -> None:
    (driven,) = run_plan(target("http://127.0.0.1:9"), closed(1, 2), 1)
    assert [answer.error is not None for answer in driven.answers] == [True, True]
    assert "ClientConnectorError" in str(driven.answers[0].error)


def answering(reply: Any, **more: Any) -> DriverResult:
    """One request to a server whose completions are `reply`, a coroutine function."""

    async def ask() -> DriverResult:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", reply)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        path = target(f"http://{host}:{port}/v1", **more).open()
        try:
            return await drive(closed(1, 1), path.ask)
        finally:
            await path.close()
            await runner.cleanup()

    return asyncio.run(ask())


def test_a_whole_answer_is_asked_with_the_key() -> None:
    asked = {}

    async def reply(request: web.Request) -> web.Response:
        asked.update(await request.json(), key=request.headers["Authorization"])
        return web.json_response({"usage": {"completion_tokens": 5}})

    driven = answering(reply, stream=False, key="sk-1")
    assert [count for _, count in driven.answers[0].responses] == [5]
    assert len(asked.pop("prompt")) == 4
    assert asked == {
        "model": MODEL,
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "key": "Bearer sk-1",
    }


def test_an_answer_that_is_refused_says_why() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too many rows"}}, status=429)

    (answer,) = answering(refuse).answers
    assert answer.error is not None and answer.error.startswith("Rejected: 429: ")
    assert "too many rows" in answer.error


def test_an_error_in_a_stream_fails_the_request_and_events_may_be_cut_anywhere() -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        text = 'data: {"choices": [{}], "usage": {"completion_tokens": 2}}\n\n'
        text += 'data: {"error": {"message": "the server was lost"}}\n\n'
        for part in (text[:20], text[20:70], text[70:]):
            await response.write(part.encode())
            await asyncio.sleep(0.02)
        return response

    (answer,) = answering(reply).answers
    assert [count for _, count in answer.responses] == [2]
    assert answer.error is not None and "the server was lost" in answer.error


# guidellm


def of_guidellm(**changes: Any) -> dict[str, Any]:
    """One request as guidellm 0.8.1 reports it, without what is not read."""
    times = {
        "targeted_start": 100.0,
        "request_start": 100.01,
        "first_token_iteration": 100.21,
        "last_token_iteration": 100.29,
        "request_end": 100.3,
    }
    request = {
        "request_args": json.dumps({"body": {"max_tokens": 5}}),
        "info": {"timings": times, "error": None},
        "prompt_tokens": 4,
        "output_tokens": 5,
    }
    return request | changes


def test_what_guidellm_saw_becomes_the_same_figures() -> None:
    failed = of_guidellm(output_tokens=None)
    failed["info"] = {
        "error": "HTTP 500",
        "timings": {
            **failed["info"]["timings"],
            "first_token_iteration": None,
            "last_token_iteration": None,
        },
    }
    benchmark = {"requests": {"successful": [of_guidellm()], "errored": [failed]}}
    driven = load_test.driven_of(benchmark, closed(1, 2), 60.0)
    answer, error = driven.answers
    assert answer.asked == 100.01 and answer.output_len == 5
    assert [round(at, 3) for at, _ in answer.responses] == [100.21, 100.23, 100.25, 100.27, 100.29]
    assert (error.tokens, error.error) == (0, "HTTP 500")
    assert driven.lags == ()
    run = run_figures("gateway", RunLoad(clients=1), [driven], None, GoodputBounds())
    assert run.first_token_ms is not None and run.first_token_ms["p50"] == pytest.approx(200)
    assert run.between_tokens_ms is not None and run.between_tokens_ms["p99"] == pytest.approx(20)
    open_loop = ClientPlan((LoadRequest((1,), 5),), 0, None, None, 0.0, 60.0)
    driven = load_test.driven_of(
        {"requests": {"successful": [of_guidellm()], "errored": []}}, open_loop, 60.0
    )
    assert driven.answers[0].asked == 100.0
    assert driven.lags == pytest.approx((0.01,))
    benchmark = {"requests": {"successful": [of_guidellm(), of_guidellm()], "errored": []}}
    benchmark["requests"]["successful"][0]["info"]["timings"]["targeted_start"] = 0.0
    with pytest.raises(ServerError, match=r"guidellm reports requests from 0\.000 s to 100\.300 s"):
        load_test.driven_of(benchmark, open_loop, 60.0)


def test_guidellm_is_told_what_our_client_does(tmp_path: Path) -> None:
    spec = load_test.guidellm_configuration(
        target("http://h:1/v1", key="sk"), RunLoad(clients=3), closed(3, 9), 7, tmp_path
    )["spec"]
    assert spec["backend"]["target"] == "http://h:1" and spec["backend"]["api_key"] == "sk"
    assert spec["profile"] == {"kind": "concurrent", "streams": 3}
    assert spec["constraints"] == [{"kind": "max_requests", "count": 9}]
    rate = load_test.guidellm_configuration(
        target("http://h:1/v1"), RunLoad(rate=2.5), closed(1, 1), 7, tmp_path
    )
    assert rate["spec"]["profile"] == {"kind": "poisson", "rate": 2.5}
    assert "api_key" not in rate["spec"]["backend"]


def test_without_guidellm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install -r requirements/load\.txt"):
        load_test.find_guidellm()


def test_a_guidellm_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "guidellm"
    command.write_text("#!/bin/sh\necho no such backend >&2\nexit 2\n")
    command.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python3"))
    asked = (target("http://h:1/v1"), RunLoad(clients=1), closed(1, 1), ["a"], 0)
    with pytest.raises(ServerError, match="guidellm ended with 2:\nno such backend"):
        load_test.run_guidellm(*asked, 30.0)
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ServerError, match=r"guidellm took 1 s; change evaluate\.load\.time_limit"):
        load_test.run_guidellm(*asked, 1.0)


# The step


class FakeClient:
    """Takes the place of the evaluation's client; `taken` is what its server has counted."""

    model_type, streams = "GPT", True
    parameters: ClassVar[dict[str, Any]] = {}

    def __init__(self, taken: Any) -> None:
        self._taken = iter(taken)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def requests_received(self) -> int:
        return int(next(self._taken))


@pytest.fixture
def step(
    exact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data_dir: Path,
    undrawn: None,  # noqa: ARG001
) -> Any:
    """Runs the step with LoadSettings; its exit code and the report's section."""
    ready = {"openai": exact, "grpc": "h:1", "ranks": []}
    (tmp_path / "ready.json").write_text(json.dumps(ready))

    def run(
        *taken: int, policy: PolicySettings | None = None, **load: Any
    ) -> tuple[int, dict[str, Any]]:
        client = FakeClient(taken)
        monkeypatch.setattr(measure_load, "open_client", lambda _: (client, ready))
        values = {"requests": 6, "seconds": None, "warmup": 0.0, "clients": (2,)}
        prompts = LoadPrompts(input=4, output=5)
        settings = EvaluateSettings(
            ready_file=str(tmp_path / "ready.json"),
            results_dir=str(tmp_path / "results"),
            model_name=MODEL,
            tokenizer_dir=str(data_dir / "tokenizers" / "gpt2bpe"),
            load=LoadSettings(**{**values, "prompts": prompts, **load}),
            policy=policy,
        )
        write_settings(settings, tmp_path / "settings.yaml")
        code = measure_load.main(["--settings", str(tmp_path / "settings.yaml")])
        report = tmp_path / "results" / "report.json"
        return code, json.loads(report.read_text())["load"] if report.exists() else {}

    return run


def test_the_step_reports_every_run(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, load = step(0, 6, 6, 12, 12, 18, rates=(100.0,), find_saturation=True, saturation_runs=2)
    out = capsys.readouterr().out
    assert [(run["mode"], run["clients"], run["rate"]) for run in load["runs"]] == [
        ("closed", 2, None),
        ("open", None, 100.0),
        ("closed", load["runs"][2]["clients"], None),
    ]
    assert code == (0 if any(run["valid"] for run in load["runs"]) else ERROR)
    assert load["saturation"]["path"] == "gateway" and load["saturation"]["text"] in out
    assert "gateway, 2 clients" in out and "gateway, 100 requests/s" in out
    assert load["measured_on"]["server"]["openai"] and load["settings"]["requests"] == 6


def test_a_step_without_a_valid_run_fails(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, load = step(1000, 6)  # the server began anew
    assert code == ERROR
    (run,) = load["runs"]
    assert not run["valid"] and any("restarted" in each for each in run["invalid_reasons"])
    assert "no run of the load test is valid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "code"), [(PolicySettings(), 0), (PolicySettings(if_measured=None), ERROR)]
)
def test_runs_that_a_policy_judges_may_all_be_invalid(
    step: Any, policy: PolicySettings, code: int
) -> None:
    assert step(1000, 6, policy=policy)[0] == code


def test_what_does_not_fit_into_the_time_is_an_error(
    step: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 11.0])
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(load_test, "time", clock)
    code, load = step(0, 6, clients=(1, 2), time_limit=10.0)
    assert code == ERROR and len(load["runs"]) == 1
    said = "the load test's 10 s were over before gateway with 2 clients"
    assert said in capsys.readouterr().err


def test_an_interrupted_load_test_goes_on_behind_its_valid_runs(
    step: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"clients": (1, 2), "rates": (50.0,), "find_saturation": True, "saturation_runs": 2}
    faults = {2: ("the server restarted",)}
    logged: list[Any] = []

    def interrupting(run: Any) -> None:
        logged.append(run)
        if len(logged) == 3:
            raise ConfigError("interrupted")

    monkeypatch.setattr(load_test, "invalid_reasons", lambda run, *_: faults.get(run.clients, ()))
    monkeypatch.setattr(measure_load, "log_run", interrupting)
    code, before = step(*range(0, 36, 6), **sizes)
    assert code == ERROR and [run["valid"] for run in before["runs"]] == [True, False]
    faults.clear()
    code, load = step(*range(0, 36, 6), **sizes)
    assert code == 0 and "load continues after 1 results" in capsys.readouterr().err
    assert load["runs"][0] == before["runs"][0] and load["saturation"] is not None
    assert [(run["clients"], run["rate"]) for run in load["runs"]][:3] == [
        *((1, None), (2, None), (None, 50.0))
    ]
    assert len(load["measured_on"]["runs"]) == 2


def test_a_path_without_an_address(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, load = step(paths=("gateway", "http"))
    assert (code, load) == (ERROR, {})
    assert (
        "ready.json gives no http address; choices: grpc, openai, ranks" in capsys.readouterr().err
    )


def test_prompts_of_a_file_are_asked(step: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello the people\nHello\n")
    prompts = LoadPrompts(data_file=str(tmp_path / "prompts.txt"), input=2, output=5)
    _, load = step(0, 6, prompts=prompts)
    assert load["runs"][0]["prompt_tokens"] < 6 * 2 + 1
