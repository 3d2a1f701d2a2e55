"""The load test of one served model: every run of the settings, and the search for saturation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, LauncherError, ServerError, problem
from launcher_scripts.common.ready_file import replica_files
from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.config.load import LoadSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.load.driver import DriverResult
from launcher_scripts.evaluation.load.figures import LoadRun, run_figures
from launcher_scripts.evaluation.load.guidellm import find_guidellm, run_guidellm
from launcher_scripts.evaluation.load.paths import Target, TokenRequest
from launcher_scripts.evaluation.load.plan import Load, Plan, Prompts, make_plan, read_texts
from launcher_scripts.evaluation.load.saturation import Saturation, find_saturation
from launcher_scripts.evaluation.load.validity import invalid_reasons
from launcher_scripts.evaluation.load.workers import run_plan
from launcher_scripts.evaluation.served.client import Client
from launcher_scripts.evaluation.served.tokenizer_dir import read_tokenizer, read_vocab_size

Noted = Callable[[LoadRun], None]


class LoadTest:
    """What is measured so far is in `runs`. To be used while `client` is open."""

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
        for each in self.loads():
            self._plan(each)

    def loads(self) -> Iterator[Load]:
        """Those of one path."""
        yield from (Load(clients=count) for count in self._load.clients)
        yield from (Load(rate=rate) for rate in self._load.rates)
        if self._load.trace_file is not None:
            yield Load()

    def run_all(self) -> None:
        """Every load on every path. Raises ServerError when the time limit is over."""
        for path in self._targets:
            for load in self.loads():
                self.run(path, load)

    def saturation(self) -> Saturation:
        """Of the first path, by clients where there are some, else by rates."""
        sizes = self._load.clients or self._load.rates
        by_clients = bool(self._load.clients)
        start = Load(clients=int(min(sizes))) if by_clients else Load(rate=min(sizes))
        path = self._load.paths[0]
        return find_saturation(lambda load: self.run(path, load), start, self._load.saturation_runs)

    def run(self, path: str, load: Load) -> LoadRun:
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
        before = self._client.requests_taken()
        generator, driven = self._driven(path, load)
        taken = self._taken_since(before)
        figures = run_figures(
            path,
            load,
            driven,
            self._load.seconds,
            self._load.bounds,
            streamed=self._targets[path].stream and self._client.streams,
            generator=generator,
        )
        reasons = invalid_reasons(figures, driven, taken)
        run = replace(figures, valid=not reasons, invalid_reasons=reasons)
        self.runs.append(run)
        self._noted(run)
        return run

    def _driven(self, path: str, load: Load) -> tuple[str, Sequence[DriverResult]]:
        target, plan = self._targets[path], self._plan(load)
        generator, tokenizer = self._load.generator, self._tokenizer
        if path != "gateway" or generator == "builtin" or tokenizer is None:
            return "builtin", run_plan(target, plan, self._load.processes)
        left = max(1.0, self._deadline - time.monotonic())
        texts = [tokenizer.decode(request.prompt_ids) for request in plan.requests]
        return "guidellm", run_guidellm(target, load, plan, texts, self._load.seed, left)

    def _plan(self, load: Load) -> Plan:
        return make_plan(self._load, load, self._prompts, self._settings.request_timeout)

    def _taken_since(self, before: int) -> tuple[int, int] | None:
        try:
            return before, self._client.requests_taken()
        except LauncherError:
            return None


def make_targets(
    settings: EvaluateSettings, load: LoadSettings, client: Client
) -> dict[str, Target]:
    """By path. Raises ConfigError for a path that the ready files give no address of."""
    files = replica_files(Path(settings.ready_file), settings.replicas)
    ready = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    tokens = TokenRequest(settings.model_name, client.model_type)
    targets = {}
    for path in load.paths:
        key = "openai" if path == "gateway" else path
        found = [each[key] for each in ready if key in each]
        addresses = [load.gateway] if path == "gateway" and load.gateway else found
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
        targets[path] = Target(
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
    texts = [tokenizer.encode(text) for text in read_texts(Path(load.prompts.data_file))]
    if not any(texts):
        change = "evaluate.load.prompts.data_file"
        raise ConfigError(problem(f"{load.prompts.data_file} has no prompt", change=change))
    return Prompts(load.prompts, load.seed, vocab_size, [ids for ids in texts if ids])
