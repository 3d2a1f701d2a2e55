"""A tritonserver over a repository, and the ways of asking it that benchmarks time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import Case
from launcher_scripts.clients.model_client import Client
from launcher_scripts.common.http_client import query
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.settings import DeploySettings, write_settings
from launcher_scripts.contract.metric_names import MetricSpec, parse_values
from launcher_scripts.contract.requests import GenerateRequest

INPUTS, OUTPUTS = (32, 512), (16, 256)  # tokens of the mixed requests
START_SECONDS = 240
WARM_UPS = 5


class Server:
    """start_server over folder/repository; entering waits for it and gives what ready.json says.

    gateway:   beside the server
    variables: what its environment has besides this process's own
    """

    def __init__(
        self, folder: Path, *, gateway: DeployedGateway | None = None, **variables: str
    ) -> None:
        self._folder = folder
        self._environment = {**os.environ, **variables}
        self._settings = DeploySettings(
            str(folder / "repository"),
            str(folder / "results"),
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            host="127.0.0.1",
            public_host="127.0.0.1",
            gateway=gateway or DeployedGateway(),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> dict[str, Any]:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Raises RuntimeError with the server's last words when it does not become ready."""
        settings, log = self._folder / "deploy.yaml", self._folder / "server.log"
        write_settings(self._settings, settings)
        command = [sys.executable, "-m", "launcher_scripts.steps.start_server"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--settings", str(settings)],
                stdout=out,
                stderr=out,
                env=self._environment,
            )
        ready = Path(self._settings.ready_file)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                text = log.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"the server did not become ready:\n{text[-4000:]}")
            time.sleep(0.02)
        return json.loads(ready.read_text(encoding="utf-8"))

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)


def counted(ready: dict[str, Any], metric: MetricSpec) -> float:
    """What a server has counted, over all labels. ready: what its ready.json says"""
    _, text = query(ready["metrics"], "/metrics", 60.0)
    return sum(parse_values(text).get(metric.name, ()))


def median_ms(call: Callable[[], object], seconds: float, lower: int = 3) -> float:
    """Median milliseconds of a call, repeated for `seconds` and at least `least` times."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < lower or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median_low(times)


def case_ms(address: str, model: str, case: Case, vocab_size: int, seconds: float) -> float:
    """Median milliseconds of a request over gRPC, after some that warm up: a step's shape is
    recorded when it comes a second time, and the rows of a request may meet in other steps."""
    requests = [GenerateRequest(tuple(prompt), case.output) for prompt in case.prompts(vocab_size)]
    with Client(address, model, protocol="grpc") as client:

        def ask() -> None:
            outputs = client.generate(requests)
            lengths = {len(output.output_ids) for output in outputs}
            if lengths != {case.output}:
                raise RuntimeError(f"{lengths} tokens came, {case.output} were asked for")

        for _ in range(WARM_UPS):
            ask()
        return median_ms(ask, seconds, lower=2)


def mixed_requests(count: int, vocab_size: int) -> list[GenerateRequest]:
    """The same ones in every run; lengths are uniform over INPUTS and OUTPUTS."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(count):
        length = int(random.integers(*INPUTS, endpoint=True))
        output_len = int(random.integers(*OUTPUTS, endpoint=True))
        ids = random.integers(1, vocab_size, length).tolist()
        requests.append(GenerateRequest(tuple(ids), output_len))
    return requests


@dataclass(frozen=True)
class Answered:
    """When a request was asked and answered, on time.perf_counter's clock, and its tokens."""

    asked: float
    answered: float
    tokens: int

    def tokens_between(self, start: float, end: float) -> float:
        """The share of its tokens that falls into a time, as if they came evenly."""
        inside = min(self.answered, end) - max(self.asked, start)
        return self.tokens * max(0.0, inside) / (self.answered - self.asked)


def in_flight_throughput(
    address: str,
    model: str,
    requests: Sequence[GenerateRequest],
    clients: int,
    settle: float,
    seconds: float,
) -> float:
    """Tokens per second while every client has a request of its own in flight.

    Counted are `seconds` that begin `settle` seconds after the start, when the clients no longer
    go together; the requests come again and again.
    """
    waiting = itertools.cycle(requests)
    take = threading.Lock()
    connected = threading.Barrier(clients + 1)
    begin = [float("inf")]

    def work() -> list[Answered]:
        answers = []
        with Client(address, model, protocol="grpc") as client:
            client.is_ready()  # connects
            connected.wait()
            while (asked := time.perf_counter()) < begin[0] + seconds:
                with take:
                    request = next(waiting)
                (output,) = client.generate([request])
                answers.append(Answered(asked, time.perf_counter(), len(output.output_ids)))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        workers = [pool.submit(work) for _ in range(clients)]
        begin[0] = time.perf_counter() + settle
        connected.wait()
        answers = [answer for worker in workers for answer in worker.result()]
    end = begin[0] + seconds
    return sum(answer.tokens_between(begin[0], end) for answer in answers) / seconds


def static_throughput(
    address: str,
    model: str,
    requests: Sequence[GenerateRequest],
    rows: int,
    seconds: float,
    *,
    to_longest: bool = False,
) -> float:
    """Tokens per second of requests of `rows` rows each, one after the other.

    The last one is asked before `seconds` are over; the one before the first that counts is not
    timed. Counted are the tokens that each row asked for. A row leaves its batch when it has them;
    with to_longest it goes on until the longest has its own.
    """
    groups = [requests[first : first + rows] for first in range(0, len(requests), rows)]
    tokens = 0
    with Client(address, model, protocol="grpc") as client:
        client.generate(asked_together(groups[-1], to_longest=to_longest))
        start = time.perf_counter()
        for group in groups:
            client.generate(asked_together(group, to_longest=to_longest))
            tokens += sum(request.output_len for request in group)
            if time.perf_counter() > start + seconds:
                break
        return tokens / (time.perf_counter() - start)


def asked_together(
    group: Sequence[GenerateRequest], *, to_longest: bool
) -> Sequence[GenerateRequest]:
    """The rows of a static batch; with to_longest each of them asks for as much as the longest."""
    if not to_longest:
        return group
    longest = max(request.output_len for request in group)
    return [replace(request, output_len=longest) for request in group]
