"""The clients of a load test: planned requests, sent in closed or open loop and timed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.evaluation import LoadPrompts, LoadSettings

# A closed loop of a time asks these again and again.
POOL = 512
MILLISECONDS = 1e3


@dataclass(frozen=True)
class LoadRequest:
    """One request. at: seconds after the start of the run, of an open loop."""

    prompt_ids: tuple[int, ...]
    output_len: int
    at: float = 0.0


@dataclass(frozen=True)
class ClientPlan:
    """Requests of one client process.

    requests: of a closed loop, to be asked in turn; of an open loop, each at its time
    clients:  of a closed loop; 0: an open loop
    count:    how many requests count, of a closed loop; None: those of `seconds`
    """

    requests: tuple[LoadRequest, ...]
    clients: int
    count: int | None
    seconds: float | None
    warmup: float
    timeout: float

    def divided(self, processes: int) -> list[ClientPlan]:
        """As even parts for that many processes, or for fewer where there are fewer clients."""
        parts = min(processes, self.clients or processes, len(self.requests))
        parts = min(parts, self.count or parts)
        return [
            replace(
                self,
                requests=self.requests[part::parts],
                clients=len(range(part, self.clients, parts)),
                count=self.count and len(range(part, self.count, parts)),
            )
            for part in range(parts)
        ]


@dataclass(frozen=True)
class RunLoad:
    """One run's load: a closed loop of clients, an open loop of a rate, or the trace."""

    clients: int | None = None
    rate: float | None = None

    @property
    def text(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return "the trace" if self.rate is None else f"{self.rate:g} requests/s"


def plan_clients(
    settings: LoadSettings, load: RunLoad, prompts: Prompts, request_timeout: float
) -> ClientPlan:
    """Raises ConfigError for a trace that cannot be read or has no request that counts."""
    if load.clients is not None:
        size = POOL if settings.requests is None else settings.requests
        requests = tuple(prompts.request(index) for index in range(size))
    elif load.rate is not None:
        times = poisson_arrivals(
            load.rate, settings.seed, settings.warmup, settings.requests, settings.seconds
        )
        requests = tuple(replace(prompts.request(i), at=at) for i, at in enumerate(times))
    else:
        requests = trace_requests(Path(settings.trace_file or ""), settings, prompts)
    return ClientPlan(
        requests,
        load.clients or 0,
        settings.requests if load.clients else None,
        settings.seconds,
        settings.warmup,
        request_timeout,
    )


def poisson_arrivals(
    rate: float, seed: int, warmup: float, requests: int | None, seconds: float | None
) -> list[float]:
    """Seconds of arrivals with exponential gaps of mean 1/rate, the warm-up included.

    They end when `requests` came after the warm-up, or `seconds` after it.
    """
    random = np.random.default_rng(seed)
    times: list[float] = []
    now, num_requests = 0.0, 0
    while True:
        now += float(random.exponential(1 / rate))
        if seconds is not None and now >= warmup + seconds:
            return times
        times.append(now)
        num_requests += now >= warmup
        if requests is not None and num_requests == requests:
            return times


def trace_requests(path: Path, settings: LoadSettings, prompts: Prompts) -> tuple[LoadRequest, ...]:
    """The trace's requests from its first timestamp on, within the run's limits."""
    rows = list(_trace_rows(path))
    if not rows:
        raise _trace_error(path, "has no request")
    start = rows[0][0]
    requests: list[LoadRequest] = []
    num_requests = 0
    for index, (timestamp, input_len, output_len) in enumerate(rows):
        at = (timestamp - start) / MILLISECONDS
        if settings.seconds is not None and at >= settings.warmup + settings.seconds:
            break
        if settings.requests is not None and num_requests == settings.requests:
            break
        num_requests += at >= settings.warmup
        requests.append(LoadRequest(prompts.ids(index, input_len), output_len, at))
    if not num_requests:
        raise _trace_error(path, f"has no request after the warm-up of {settings.warmup:g} s")
    return tuple(requests)


def _trace_rows(path: Path) -> Iterator[tuple[float, int, int]]:
    before = float("-inf")
    for number, row in _json_lines(path, "evaluate.load.trace_file"):
        try:
            values = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            names = "timestamp (ms), input_length and output_length"
            raise _trace_error(path, f"line {number} has not the numbers {names}") from error
        if values[0] < before or values[1] < 1 or values[2] < 1:
            raise _trace_error(path, f"line {number} goes back in time or has a length below 1")
        before = values[0]
        yield values


def _trace_error(path: Path, message: str) -> ConfigError:
    return ConfigError(problem(f"the trace {path} {message}", change="evaluate.load.trace_file"))


def _json_lines(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    """(line number, object); a line that is not JSON is a text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(problem(f"cannot read {path}: {error}", change=key)) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, line


class Prompts:
    """The prompts of a test: request `index` is the same in every run and on every path."""

    def __init__(
        self, settings: LoadPrompts, seed: int, vocab_size: int, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        """texts: the ids of those of data_file, none of them empty."""
        self._settings, self._seed, self._vocab_size = settings, seed, vocab_size
        self._texts = texts

    def request(self, index: int) -> LoadRequest:
        random = np.random.default_rng([self._seed, index])
        lengths = self._settings.input, self._settings.output
        low, high = 1 - self._settings.spread, 1 + self._settings.spread
        input_len, output_len = (
            int(random.integers(max(1, round(low * length)), round(high * length), endpoint=True))
            for length in lengths
        )
        if self._texts:
            text = self._texts[index % len(self._texts)]
            return LoadRequest(tuple(text[: self._settings.input]), output_len)
        return LoadRequest(self.ids(index, input_len), output_len)

    def ids(self, index: int, length: int) -> tuple[int, ...]:
        """Random ids, none of which is 0: a padding id in most vocabularies."""
        random = np.random.default_rng([self._seed, index, length])
        return tuple(random.integers(1, self._vocab_size, length).tolist())


def read_prompt_texts(path: Path) -> Iterator[str]:
    """The prompts of a data_file. Raises ConfigError for a line that holds none."""
    for number, row in _json_lines(path, "evaluate.load.prompts.data_file"):
        text = row.get("text", row.get("prompt")) if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise ConfigError(
                problem(
                    f"line {number} of {path} has neither text nor prompt",
                    change="evaluate.load.prompts.data_file",
                )
            )
        yield text


# Asks one request and yields the number of tokens generated so far, with each response.
Send = Callable[[LoadRequest], AsyncGenerator[int, None]]
LAG_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class TimedResponse:
    """One request as its client saw it; times are of the event loop, in seconds.

    asked:     when it was sent; in an open loop, when it should have been
    responses: (time, tokens by then) of those that brought tokens
    counts:    whether it was asked after the warm-up
    """

    asked: float
    finished: float
    prompt_tokens: int
    output_len: int
    responses: tuple[tuple[float, int], ...]
    counts: bool = True
    error: str | None = None

    @property
    def tokens(self) -> int:
        return self.responses[-1][1] if self.responses else 0


@dataclass(frozen=True)
class DriverResult:
    """Results of one client process.

    begin: when the run began to count
    busy:  share of the time in which the event loop's thread computed
    lags:  seconds by which the event loop woke too late, sampled
    """

    answers: tuple[TimedResponse, ...]
    begin: float
    busy: float
    lags: tuple[float, ...]


async def drive(plan: ClientPlan, send: Send) -> DriverResult:
    """Do the plan; ends when every request is answered, has failed or has timed out."""
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    sampler = asyncio.create_task(_sample_lags(lags))
    start, computed = loop.time(), time.thread_time()
    try:
        work = _closed(plan, send, start) if plan.clients else _open(plan, send, start)
        answers = await work
    finally:
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
    busy = (time.thread_time() - computed) / max(loop.time() - start, 1e-9)
    return DriverResult(tuple(answers), start + plan.warmup, busy, tuple(lags))


async def _closed(plan: ClientPlan, send: Send, start: float) -> Sequence[TimedResponse]:
    loop = asyncio.get_running_loop()
    requests = itertools.cycle(plan.requests)
    begin, answers, num_sent = start + plan.warmup, [], 0

    async def client() -> None:
        nonlocal num_sent
        while True:
            now = loop.time()
            counts = now >= begin
            if counts and plan.count is not None:
                if num_sent == plan.count:
                    return
                num_sent += 1
            if plan.seconds is not None and now >= begin + plan.seconds:
                return
            answers.append(await _sent(send, next(requests), now, counts, plan.timeout))

    await asyncio.gather(*(client() for _ in range(plan.clients)))
    return answers


async def _open(plan: ClientPlan, send: Send, start: float) -> Sequence[TimedResponse]:
    loop = asyncio.get_running_loop()
    tasks = []
    for request in plan.requests:
        await asyncio.sleep(start + request.at - loop.time())
        counts = request.at >= plan.warmup
        task = _sent(send, request, start + request.at, counts, plan.timeout)
        tasks.append(asyncio.create_task(task))
    return await asyncio.gather(*tasks)


async def _sent(
    send: Send, request: LoadRequest, sent_at: float, counts: bool, timeout: float
) -> TimedResponse:
    loop = asyncio.get_running_loop()
    responses: list[tuple[float, int]] = []

    async def read() -> None:
        async with aclosing(send(request)) as stream:
            async for tokens in stream:
                if tokens > (responses[-1][1] if responses else 0):
                    responses.append((loop.time(), tokens))

    error = None
    try:
        await asyncio.wait_for(read(), timeout)
    except (TimeoutError, asyncio.TimeoutError):
        error = f"no answer within {timeout:g} s"
    except Exception as failure:  # of whichever transport: the other requests go on
        error = f"{type(failure).__name__}: {failure}"
    return TimedResponse(
        sent_at,
        loop.time(),
        len(request.prompt_ids),
        request.output_len,
        tuple(responses),
        counts,
        error,
    )


async def _sample_lags(lags: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_SAMPLE_SECONDS
        await asyncio.sleep(LAG_SAMPLE_SECONDS)
        lags.append(max(0.0, loop.time() - due))


def lag_p99(driven: Sequence[DriverResult]) -> float:
    """The lag of the slowest process, in seconds."""
    return max(
        (float(np.percentile(result.lags, 99)) for result in driven if result.lags), default=0.0
    )
