"""The load test of one served model: every run of the settings, and the search for saturation.

The load generator guidellm before the gateway: the same requests, its own client and clock.

It runs as a command of its own (requirements/load.txt) and writes when each request began, brought
its first token and brought its last. Of these the figures are made as of our own client's.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from launcher_scripts.clients.model_client import Client
from launcher_scripts.common.errors import ConfigError, LauncherError, ServerError, problem
from launcher_scripts.common.files import replica_files
from launcher_scripts.common.processes import signal_when_parent_dies
from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.config.evaluation import LoadSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.load.driver import (
    ClientPlan,
    DriverResult,
    Prompts,
    RunLoad,
    TimedResponse,
    drive,
    plan_clients,
    read_prompt_texts,
)
from launcher_scripts.evaluation.load.figures import (
    LoadRun,
    Saturation,
    find_saturation,
    invalid_reasons,
    run_figures,
)
from launcher_scripts.evaluation.load.paths import LoadTarget, TokenRequest
from launcher_scripts.evaluation.tasks.prompts import read_tokenizer, read_vocab_size

_START_SECONDS = 120.0  # for a process to import what it needs


def run_plan(target: LoadTarget, plan: ClientPlan, processes: int) -> list[DriverResult]:
    """Run each client process; one of them is this process.

    Raises ServerError when a process dies.
    """
    plans = plan.divided(processes)
    if len(plans) == 1:
        return [asyncio.run(_drive(target, plans[0]))]
    context = multiprocessing.get_context("spawn")  # a fork would share gRPC's threads
    barrier = context.Barrier(len(plans))
    started = []
    for item in plans:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (target, item, barrier, sender)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        return [receiver.recv() for _, receiver in started]
    except EOFError as error:
        raise ServerError("a client process of the load test died") from error
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _work(target: LoadTarget, plan: ClientPlan, barrier: Barrier, sender: Connection) -> None:
    barrier.wait(_START_SECONDS)
    sender.send(asyncio.run(_drive(target, plan)))
    sender.close()


async def _drive(target: LoadTarget, plan: ClientPlan) -> DriverResult:
    path = target.open()
    try:
        return await drive(plan, path.ask)
    finally:
        await path.close()


_LAST_WORDS = 2000


def find_guidellm() -> str:
    """Its command, beside this Python or on the PATH. Raises ConfigError without one."""
    sibling = shutil.which("guidellm", path=str(Path(sys.executable).parent))
    result = sibling or shutil.which("guidellm")
    if result is None:
        raise ConfigError(
            problem(
                "guidellm is not there: pip install -r requirements/load.txt",
                choices=("builtin",),
                change="evaluate.load.generator",
            )
        )
    return result


def run_guidellm(
    target: LoadTarget,
    load: RunLoad,
    plan: ClientPlan,
    texts: Sequence[str],
    seed: int,
    limit: float,
) -> list[DriverResult]:
    """Run guidellm. texts: the plan's prompts; limit: seconds for its whole command.

    Raises ServerError when it fails as a whole or takes longer; requests that fail are answers with
    an error.
    """
    command = find_guidellm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = guidellm_configuration(target, load, plan, seed, folder)
        rows = [
            {"prompt": text, "output_tokens_count": request.output_len}
            for text, request in zip(texts, plan.requests, strict=True)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        log, report = folder / "log.txt", folder / "report.json"
        arguments = ["run", "--disable-console", "--config", str(folder / "config.json")]
        try:
            with log.open("wb") as out:
                code = subprocess.run(
                    [command, *arguments],
                    stdout=out,
                    stderr=out,
                    timeout=limit,
                    preexec_fn=partial(signal_when_parent_dies, signal.SIGKILL),
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired as error:
            raise ServerError(
                problem(f"guidellm took {limit:.0f} s", change="evaluate.load.time_limit")
            ) from error
        if code or not report.exists():
            words = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
            raise ServerError(f"guidellm ended with {code}:\n{words}")
        (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return [driven_of(benchmark, plan, limit)]


def guidellm_configuration(
    target: LoadTarget, load: RunLoad, plan: ClientPlan, seed: int, folder: Path
) -> dict[str, Any]:
    """Its configuration file, whose data and report are in `folder`."""
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": target.addresses[0].removesuffix("/v1"),
        "model": target.tokens.model_name,
        "request_format": "/v1/completions",
        "stream": target.stream,
        "timeout": plan.timeout,
        "extras": {"body": {"temperature": 0}},
    }
    if target.api_key is not None:
        backend["api_key"] = target.api_key
    closed = load.clients is not None
    profile = (
        {"kind": "concurrent", "streams": load.clients}
        if closed
        else {"kind": "poisson", "rate": load.rate}
    )
    return {
        "metadata": {"labels": {}},
        "spec": {
            "backend": backend,
            "profile": profile,
            "constraints": [{"kind": "max_requests", "count": len(plan.requests)}],
            "data": [{"kind": "json_file", "path": str(folder / "prompts.jsonl")}],
            "seed": {"kind": "static", "value": seed},
            "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
        },
        "benchmarks": [{}],
    }


def driven_of(benchmark: Mapping[str, Any], plan: ClientPlan, limit: float) -> DriverResult:
    """Its requests as answers; tokens between the first and the last one came evenly.

    Raises ServerError for times that lie further apart than the `limit` seconds of its command.
    """
    requests = [
        request for kind in ("successful", "errored") for request in benchmark["requests"][kind]
    ]
    answers = [_answer(request, plan) for request in requests]
    begin = min((answer.asked for answer in answers), default=0.0) + plan.warmup
    end = max((answer.finished for answer in answers), default=0.0)
    if not 0 <= end - begin + plan.warmup <= limit:
        raise ServerError(f"guidellm reports requests from {begin:.3f} s to {end:.3f} s")
    measured = tuple(replace(answer, counts=answer.asked >= begin) for answer in answers)
    times = [request["info"]["timings"] for request in requests]
    lags = tuple(max(0.0, time["request_start"] - time["targeted_start"]) for time in times)
    return DriverResult(measured, begin, 0.0, () if plan.clients else lags)


def _answer(request: Mapping[str, Any], plan: ClientPlan) -> TimedResponse:
    times, tokens = request["info"]["timings"], int(request["output_tokens"] or 0)
    first, last = times["first_token_iteration"], times["last_token_iteration"]
    responses: tuple[tuple[float, int], ...] = ()
    if tokens and first is not None and last is not None:
        steps = max(tokens - 1, 1)
        responses = tuple(
            (last if tokens == 1 else first + (last - first) * index / steps, index + 1)
            for index in range(tokens)
        )
    requested = json.loads(request["request_args"])["body"]["max_tokens"]
    return TimedResponse(
        times["request_start"] if plan.clients else times["targeted_start"],
        times["request_end"],
        int(request["prompt_tokens"] or 0),
        int(requested),
        responses,
        error=request["info"]["error"],
    )


Noted = Callable[[LoadRun], None]


class LoadTest:
    """A load test; results so far are in `runs`. To be used while `client` is open."""

    def __init__(
        self,
        settings: EvaluateSettings,
        load: LoadSettings,
        client: Client,
        noted: Noted,
        earlier: Sequence[LoadRun] = (),
    ) -> None:
        """noted: is told every run when it ends; earlier: runs that were made already.

        Raises ConfigError for files that cannot be read and for paths that the ready file lacks.
        """
        self.runs = list(earlier)
        self._settings, self._load, self._client, self._noted = settings, load, client, noted
        self._deadline = time.monotonic() + load.time_limit
        folder = Path(settings.tokenizer_dir)
        self._tokenizer = None if load.prompts.data_file is None else read_tokenizer(folder)
        self._prompts = _prompts(load, read_vocab_size(folder), self._tokenizer)
        self._targets = make_targets(settings, load, client)
        if "gateway" in load.paths and load.generator == "guidellm":
            find_guidellm()
        # Before anything is asked: a trace that cannot be read is found now.
        for item in self.loads():
            self._plan(item)

    def loads(self) -> Iterator[RunLoad]:
        """Iterate over the loads of one path."""
        yield from (RunLoad(clients=count) for count in self._load.clients)
        yield from (RunLoad(rate=rate) for rate in self._load.rates)
        if self._load.trace_file is not None:
            yield RunLoad()

    def run_all(self) -> None:
        """Every load on every path. Raises ServerError when the time limit is over."""
        for path in self._targets:
            for load in self.loads():
                self.run(path, load)

    def saturation(self) -> Saturation:
        """Return the saturation of the first path, by clients if there are some, else by rates."""
        sizes = self._load.clients or self._load.rates
        by_clients = bool(self._load.clients)
        start = RunLoad(clients=int(min(sizes))) if by_clients else RunLoad(rate=min(sizes))
        path = self._load.paths[0]
        return find_saturation(lambda load: self.run(path, load), start, self._load.saturation_runs)

    def run(self, path: str, load: RunLoad) -> LoadRun:
        """A run that was made already is not made again."""
        for run in self.runs:
            if run.path == path and run.load == load:
                return run
        if time.monotonic() > self._deadline:
            raise ServerError(
                problem(
                    f"the load test's {self._load.time_limit:g} s were over before {path} with "
                    f"{load.text}; the report has the runs before",
                    change="evaluate.load.time_limit",
                )
            )
        before = self._client.requests_received()
        generator, driven = self._driven(path, load)
        num_received = self._received_since(before)
        figures = run_figures(
            path,
            load,
            driven,
            self._load.seconds,
            self._load.bounds,
            streamed=self._targets[path].stream and self._client.streams,
            generator=generator,
        )
        reasons = invalid_reasons(figures, driven, num_received)
        run = replace(figures, valid=not reasons, invalid_reasons=reasons)
        self.runs.append(run)
        self._noted(run)
        return run

    def _driven(self, path: str, load: RunLoad) -> tuple[str, Sequence[DriverResult]]:
        target, plan = self._targets[path], self._plan(load)
        generator, tokenizer = self._load.generator, self._tokenizer
        if path != "gateway" or generator == "builtin" or tokenizer is None:
            return "builtin", run_plan(target, plan, self._load.processes)
        left = max(1.0, self._deadline - time.monotonic())
        texts = [tokenizer.decode(request.prompt_ids) for request in plan.requests]
        return "guidellm", run_guidellm(target, load, plan, texts, self._load.seed, left)

    def _plan(self, load: RunLoad) -> ClientPlan:
        return plan_clients(self._load, load, self._prompts, self._settings.request_timeout)

    def _received_since(self, before: int) -> tuple[int, int] | None:
        try:
            return before, self._client.requests_received()
        except LauncherError:
            return None


def make_targets(
    settings: EvaluateSettings, load: LoadSettings, client: Client
) -> dict[str, LoadTarget]:
    """By path. Raises ConfigError for a path that the ready files give no address of."""
    files = replica_files(Path(settings.ready_file), settings.replicas)
    ready = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    tokens = TokenRequest(settings.model_name, client.model_type)
    targets = {}
    for path in load.paths:
        key = "openai" if path == "gateway" else path
        result = [item[key] for item in ready if key in item]
        addresses = [load.gateway] if path == "gateway" and load.gateway else result
        if not addresses:
            raise ConfigError(
                problem(
                    f"{settings.ready_file} gives no {key} address",
                    choices=sorted(ready[0]),
                    change="evaluate.load.gateway, paths, or deploy.gateway.port"
                    if path == "gateway"
                    else "evaluate.load.paths",
                )
            )
        targets[path] = LoadTarget(
            path,
            tuple(address.rstrip("/") for address in addresses),
            tokens,
            load.stream if path == "gateway" else client.streams,
            _api_key(load) if path == "gateway" else None,
            settings.grpc_tls,
        )
    return targets


def _api_key(load: LoadSettings) -> str | None:
    if load.api_key_file is None:
        return None
    change = "evaluate.load.api_key_file"
    try:
        key = Path(load.api_key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(problem(f"cannot read the key: {error}", change=change)) from error
    if not key:
        raise ConfigError(problem(f"{load.api_key_file} holds no key", change=change))
    return key


def _prompts(load: LoadSettings, vocab_size: int, tokenizer: Tokenizer | None) -> Prompts:
    if tokenizer is None or load.prompts.data_file is None:
        return Prompts(load.prompts, load.seed, vocab_size)
    texts = [tokenizer.encode(text) for text in read_prompt_texts(Path(load.prompts.data_file))]
    if not any(texts):
        change = "evaluate.load.prompts.data_file"
        raise ConfigError(problem(f"{load.prompts.data_file} has no prompt", change=change))
    return Prompts(load.prompts, load.seed, vocab_size, [ids for ids in texts if ids])
