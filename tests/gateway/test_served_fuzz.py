"""A gateway and its server after thousands of requests that nobody would send."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.contract import metric_names as names
from tests.gateway.fakes import CHATML
from tests.gateway.fuzzing import Fuzzed, Fuzzer, send
from tests.gateway.processes import RunningGateway, gateway
from tests.http_requests import receive
from tests.http_requests import send as send_request
from tests.processes import wait_for
from tests.server.processes import RunningStep

pytestmark = pytest.mark.usefixtures("tritonserver")
SEED = 16
AT_A_TIME = 8
SECONDS = 120  # that no answer takes, beside whatever other work
GATEWAY_GAUGES = [names.GATEWAY_WORKING, names.GATEWAY_RUNNING, names.GATEWAY_WAITING]
MODEL_GAUGES = [names.RUNNING, names.WAITING]


# What the last event of a stream is.
ENDS = [b"data: [DONE]", b"event: error\n"]
ENDS += [b"event: response." + status for status in (b"completed\n", b"incomplete\n")]


@pytest.fixture
def served(shared_server: RunningStep, tmp_path: Path) -> Iterator[RunningGateway]:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    arguments = ["--ready", str(shared_server.settings.ready_file), "--max-model-len", "96"]
    arguments += ["--chat-template", str(tmp_path / "chatml.jinja"), "--request-timeout", "10"]
    with gateway(tmp_path / "run", *arguments) as started:
        yield started


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.slow)], ids="{} requests".format
)
def test_no_request_makes_it_fail(
    shared_server: RunningStep, served: RunningGateway, count: int
) -> None:
    """No 500, no dead process, nothing left behind, and the same answer as before."""
    before = fixed_answers(served)
    statuses, problems = asyncio.run(ask(int(served.address.rpartition(":")[2]), count))
    print(f"{count} requests: {dict(sorted(statuses.items()))}")
    assert not problems, "\n".join(problems[:20])
    assert statuses["200"] > count // 10
    assert statuses["400"] > count // 10
    ready = shared_server.ready

    def gauges() -> dict[str, float]:
        ours = read_gauges(f"{served.address}/metrics", GATEWAY_GAUGES)
        return ours | read_gauges(f"http://{ready['metrics']}/metrics", MODEL_GAUGES)

    assert len(gauges()) == len(GATEWAY_GAUGES) + 3 * len(MODEL_GAUGES)
    wait_for(lambda: not any(gauges().values()), SECONDS)
    assert fixed_answers(served) == before
    assert served.process.poll() is None
    assert not shared_server.finished()
    assert "Traceback" not in served.err, served.err[-4000:]
    assert receive(f"{served.address}/ready")["ready"]


async def ask(port: int, count: int) -> tuple[Counter[str], list[str]]:
    """How often each status came, and what must not be."""
    statuses: Counter[str] = Counter()
    problems: list[str] = []
    numbers = iter(range(count))
    fuzzer = Fuzzer(SEED)

    async def work() -> None:
        for number in numbers:
            request = fuzzer.request(number)
            try:
                received = await send(port, request, SECONDS)
            except (OSError, TimeoutError) as error:
                received, wrong = b"", [repr(error)]
            else:
                wrong = problems_of(request, received)
            statuses[status_of(received)] += 1
            shown = request.parts[0][:600]
            problems.extend(f"request {number}: {what}: {shown!r}" for what in wrong)

    await asyncio.gather(*(work() for _ in range(AT_A_TIME)))
    return statuses, problems


def status_of(received: bytes) -> str:
    received = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", received)
    return found[1].decode() if found else "none"


def problems_of(request: Fuzzed, received: bytes) -> list[str]:
    """What is wrong with an answer: its status, the form of its error, the end of its stream."""
    if request.closes or request.reads is not None or not (request.full or received):
        return []
    head, _, body = received.partition(b"\r\n\r\n")
    status = status_of(received)
    if status not in ("200", "400", "404", "405", "413", "429", "431", "504"):
        return [f"status {status}: {received[:600]!r}"]
    if b"internal_error" in received:
        return [f"an internal error: {received[-600:]!r}"]
    streams = status == "200" and b"text/event-stream" in head
    if streams and not any(end in body for end in ENDS):
        return [f"the stream has no end: {received[-600:]!r}"]
    if status != "200" and b"application/json" in head and body:
        error = json.loads(body.split(b"HTTP/1.1 ")[0])["error"]
        if not (error["message"] and error["code"]) or len(body) > 20_000:
            return [f"an error without form: {body[:600]!r}"]
    return []


def fixed_answers(served: RunningGateway) -> list[Any]:
    """What three usual requests give."""
    answers = []
    for model in ("gpt", "plain", "t5"):
        body = {"model": model, "prompt": "Hello the people", "max_tokens": 20, "temperature": 0}
        url = f"{served.address}/v1/completions"
        answers.append(receive(url, {**body, "logprobs": 2})["choices"])
    return answers


def read_gauges(address: str, metrics: list[names.MetricSpec]) -> dict[str, float]:
    """By name and labels."""
    wanted = {metric.name for metric in metrics}
    samples = filter(None, map(names.parse_sample, send_request(address).text.splitlines()))
    return {f"{s.name} {s.labels}": float(s.value) for s in samples if s.name in wanted}
