"""Metrics of a run from the responses of its clients.

Percentiles are of the requests that were asked after the warm-up. Rates are of what came between
the end of the warm-up and the end of the run, whoever had asked for it: in a run of a number of
requests that is the last answer, as in vLLM's benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launcher_scripts.config.evaluation import GoodputBounds
from launcher_scripts.evaluation.load.driver import DriverResult, RunLoad, TimedResponse, lag_p99

Percentiles = dict[str, float]


@dataclass(frozen=True)
class LoadRun:
    """One run; docs/evaluation.md says what every figure means."""

    path: str
    mode: str
    clients: int | None
    rate: float | None
    generator: str
    seconds: float
    requests: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    requests_per_second: float
    tokens_per_second: float
    goodput: float | None
    first_token_ms: Percentiles | None
    between_tokens_ms: Percentiles | None
    per_token_ms: Percentiles | None
    latency_ms: Percentiles | None
    timeline: tuple[dict[str, int], ...]
    client: dict[str, float]
    valid: bool = True
    invalid_reasons: tuple[str, ...] = field(default=())

    @property
    def load(self) -> RunLoad:
        return RunLoad(self.clients, self.rate)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LoadRun:
        """The run that a report or a journal has as plain values."""
        lists = {name: tuple(values[name]) for name in ("timeline", "invalid_reasons")}
        return cls(**{**values, **lists})


def run_figures(
    path: str,
    load: RunLoad,
    driven: Sequence[DriverResult],
    seconds: float | None,
    bounds: GoodputBounds,
    *,
    streamed: bool = True,
    generator: str = "builtin",
) -> LoadRun:
    """The figures of one run.

    seconds:  how long it counts; None: to the last answer
    streamed: whether tokens were sent as they came; the times of whole answers' tokens are unknown
    """
    begin = min(result.begin for result in driven)
    answers = [answer for result in driven for answer in result.answers]
    measured = [answer for answer in answers if answer.counts]
    last = max((answer.finished for answer in measured), default=begin)
    end = last if seconds is None else begin + seconds
    duration = max(end - begin, 1e-9)
    answered = [answer for answer in measured if answer.error is None and answer.responses]
    completed = [
        a for a in answers if a.error is None and a.responses and begin <= a.finished <= end
    ]
    timeline = _timeline(answers, completed, begin, duration)
    tokens = sum(result["tokens"] for result in timeline)
    good = [answer for answer in completed if within(answer, bounds)]
    gaps = [gap for answer in answered for gap in token_gaps(answer)]
    return LoadRun(
        path,
        "open" if load.clients is None else "closed",
        load.clients,
        load.rate,
        generator,
        round(duration, 6),
        len(measured),
        sum(answer.error is not None for answer in measured),
        sum(answer.prompt_tokens for answer in measured),
        tokens,
        len(completed) / duration,
        tokens / duration,
        len(good) / duration if bounds.asked else None,
        percentiles([first_token(a) for a in answered]) if streamed else None,
        percentiles(gaps) if streamed else None,
        percentiles([per_token(a) for a in answered if a.tokens > 1]) if streamed else None,
        percentiles([latency(answer) for answer in answered]),
        tuple(timeline),
        {
            "processes": len(driven),
            "busy": round(max(result.busy for result in driven), 3),
            "lag_p99_ms": round(lag_p99(driven) * 1e3, 3),
        },
    )


def latency(answer: TimedResponse) -> float:
    """Seconds to the last token."""
    return answer.responses[-1][0] - answer.asked


def first_token(answer: TimedResponse) -> float:
    return answer.responses[0][0] - answer.asked


def per_token(answer: TimedResponse) -> float:
    """Mean seconds from one token to the next; of an answer that came whole, of its latency."""
    if len(answer.responses) == 1:
        return latency(answer) / answer.tokens
    return (latency(answer) - first_token(answer)) / (answer.tokens - 1)


def token_gaps(answer: TimedResponse) -> list[float]:
    """Seconds between tokens; those that came in one response share its time evenly."""
    gaps = []
    for (before, had), (at, has) in zip(answer.responses, answer.responses[1:], strict=False):
        gaps += [(at - before) / (has - had)] * (has - had)
    return gaps


def within(answer: TimedResponse, bounds: GoodputBounds) -> bool:
    """Return whether an answer keeps every bound."""
    measured = (
        (bounds.first_token_ms, first_token(answer)),
        (bounds.between_tokens_ms, per_token(answer)),
        (bounds.latency_ms, latency(answer)),
    )
    return all(bound is None or seconds * 1e3 <= bound for bound, seconds in measured)


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """p50, p90, p99 and mean in milliseconds; None without a value."""
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1e3
    result = {
        f"p{percentile}": float(np.percentile(values, percentile)) for percentile in (50, 90, 99)
    }
    return {name: round(value, 3) for name, value in {**result, "mean": values.mean()}.items()}


def _timeline(
    answers: Sequence[TimedResponse],
    finished: Sequence[TimedResponse],
    begin: float,
    duration: float,
) -> list[dict[str, int]]:
    """Answers and tokens that came in each second of the run; the last one may be a part."""
    rows: list[dict[str, Any]] = [
        {"second": second, "requests": 0, "tokens": 0}
        for second in range(math.ceil(round(duration, 6)))
    ]
    for answer in finished:
        rows[_second(answer.finished - begin, rows)]["requests"] += 1
    for answer in answers:
        before = 0
        for at, tokens in answer.responses:
            if 0 <= at - begin <= duration:
                rows[_second(at - begin, rows)]["tokens"] += tokens - before
            before = tokens
    return rows


def _second(at: float, rows: Sequence[object]) -> int:
    return min(int(at), len(rows) - 1)


# More clients have to bring this much more, or they only wait.
GAIN = 1.05
# Of an open loop's requests, so many have to be answered in the time that they are asked in.
KEEPS_UP = 0.9
# Of the answers, so many have to be within the bounds.
WITHIN = 0.9
# The search ends when the two loads around the answer are this close.
CLOSE = 1.1

Measure = Callable[[RunLoad], LoadRun]


@dataclass(frozen=True)
class Saturation:
    """The largest load that was carried; text says how the search ended."""

    path: str
    requests_per_second: float
    tokens_per_second: float
    clients: int | None
    rate: float | None
    text: str


def find_saturation(measure: Measure, start: RunLoad, max_runs: int) -> Saturation:
    """Double the load until the server does not carry it, then bisect.

    A load is carried when its run is valid, 90 % of its answers keep the bounds and, in an open
    loop, 90 % of the requests of its time are answered in it. In a closed loop the search ends when
    more clients bring less than 5 % more tokens per second.
    """
    carried: LoadRun | None = None
    rejected: LoadRun | None = None
    load: RunLoad | None = start
    path = why = ""
    for _ in range(max_runs):
        if load is None:
            break
        run = measure(load)
        path, objection = run.path, _objection(run)
        flat = None if carried is None or objection else _flat(run, carried)
        if objection or flat:
            rejected, why = run, objection or flat or ""
        else:
            carried = run
        load = None if flat else _next(carried, rejected)
    return _saturation(path, carried, rejected, why)


def _next(carried: LoadRun | None, rejected: LoadRun | None) -> RunLoad | None:
    """The load to try now; None where the two are close enough."""
    if rejected is None:
        return None if carried is None else _scaled(carried.load, 2.0)
    if carried is None:
        smaller = _scaled(rejected.load, 0.5)
        return None if smaller == rejected.load else smaller
    low, high = _size(carried.load), _size(rejected.load)
    middle = (low + high) / 2
    if rejected.clients is None:
        return None if high / low <= CLOSE else RunLoad(rate=middle)
    near = high - low <= 1 or high / low <= CLOSE
    return None if near else RunLoad(clients=int(middle))


def _scaled(load: RunLoad, factor: float) -> RunLoad:
    if load.clients is not None:
        return RunLoad(clients=max(1, int(load.clients * factor)))
    return RunLoad(rate=_size(load) * factor)


def _size(load: RunLoad) -> float:
    return float(load.clients or load.rate or 0)


def _objection(run: LoadRun) -> str | None:
    """Why the server does not carry a load; None: it does."""
    if not run.valid:
        return f"that run is invalid ({'; '.join(run.invalid_reasons)})"
    if run.goodput is not None and run.goodput < WITHIN * run.requests_per_second:
        return (
            f"there {run.goodput:.2f} of {run.requests_per_second:.2f} answers per second keep "
            "the bounds"
        )
    answered = run.requests_per_second * run.seconds
    if run.rate is not None and answered < KEEPS_UP * run.requests:
        return f"there {answered:.0f} requests are answered while {run.requests} are asked"
    return None


def _flat(run: LoadRun, carried: LoadRun) -> str | None:
    """Return a note if more clients bring no more throughput; None if they do."""
    gain = run.tokens_per_second / max(carried.tokens_per_second, 1e-9)
    if run.clients is None or gain >= GAIN:
        return None
    return f"there tokens per second change by {gain - 1:+.1%}"


def _saturation(
    path: str, carried: LoadRun | None, rejected: LoadRun | None, why: str
) -> Saturation:
    many = "" if rejected is None else rejected.load.text
    if carried is None:
        return Saturation(path, 0.0, 0.0, None, None, f"not even {many} can be carried: {why}")
    if rejected is None:
        text = f"more than {carried.load.text}: the last of the runs was carried, too"
    else:
        text = f"{carried.load.text}; {many} are too many: {why}"
    return Saturation(
        path,
        carried.requests_per_second,
        carried.tokens_per_second,
        carried.clients,
        carried.rate,
        text,
    )


# The event loop's thread has no time left for what arrives.
MAX_BUSY = 0.9
# A client that wakes this late has timed itself: a share of what it times, or this many ms.
LAG_SHARE = 0.1
LAG_MS = 10.0


def invalid_reasons(
    run: LoadRun, driven: Sequence[DriverResult], num_received: tuple[int, int] | None
) -> tuple[str, ...]:
    """Sentences; none for a valid run.

    num_received: number of requests that the servers had received before and after it; None if
    they no longer
           say so
    """
    answers = [answer for result in driven for answer in result.answers]
    failed = [answer for answer in answers if answer.error is not None]
    answered = [answer for answer in answers if answer.error is None]
    short = [answer for answer in answered if 0 < answer.tokens < answer.output_len]
    empty = [answer for answer in answered if answer.tokens == 0]
    reasons = []
    if not run.requests:
        reasons.append("no request was asked after the warm-up")
    if failed:
        first_error = " ".join(str(failed[0].error).split())
        reasons.append(f"{_of(failed, answers)} failed; the first: {first_error}")
    if empty:
        reasons.append(f"{_of(empty, answers)} were answered without a token")
    if short:
        first = short[0]
        reasons.append(
            f"{_of(short, answers)} were answered with fewer tokens than asked for; the first: "
            f"{first.tokens} of {first.output_len}"
        )
    return (*reasons, *_client_reasons(run, driven), *_server_reasons(num_received, len(answered)))


def _client_reasons(run: LoadRun, driven: Sequence[DriverResult]) -> list[str]:
    busy = max((result.busy for result in driven), default=0.0)
    timed = run.first_token_ms or run.latency_ms
    lag, bound = lag_p99(driven) * 1e3, max(LAG_MS, LAG_SHARE * timed["p50"] if timed else 0.0)
    remedy = "more evaluate.load.processes, or a client machine of its own"
    if busy > MAX_BUSY:
        return [f"the client was the bottleneck: busy for {busy:.0%} of the time; {remedy}"]
    if lag > bound:
        return [
            f"the client was the bottleneck: it woke {lag:.1f} ms late (p99, bound {bound:.1f} "
            f"ms); {remedy}"
        ]
    return []


def _server_reasons(num_received: tuple[int, int] | None, answered: int) -> list[str]:
    if num_received is None:
        return ["the server does not answer any more"]
    before, after = num_received
    if after - before < answered:
        return [
            f"the server restarted during the run: it has taken {after} requests since it began, "
            f"{before} before the run, and {answered} were answered in it"
        ]
    return []


def _of(some: Sequence[object], every: Sequence[object]) -> str:
    return f"{len(some)} of {len(every)} requests"
