"""What a run measured, from the answers of its clients.

Percentiles are of the requests that were asked after the warm-up. Rates are of what came between
the end of the warm-up and the end of the run, whoever had asked for it: in a run of a number of
requests that is the last answer, as in vLLM's benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launcher_scripts.config.load import LoadBounds
from launcher_scripts.evaluation.load.driver import Answer, DriverResult, lag_p99
from launcher_scripts.evaluation.load.plan import Load

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
    def load(self) -> Load:
        return Load(self.clients, self.rate)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LoadRun:
        """The run that a report or a journal has as plain values."""
        lists = {name: tuple(values[name]) for name in ("timeline", "invalid_reasons")}
        return cls(**{**values, **lists})


def run_figures(
    path: str,
    load: Load,
    driven: Sequence[DriverResult],
    seconds: float | None,
    bounds: LoadBounds,
    *,
    streamed: bool = True,
    generator: str = "builtin",
) -> LoadRun:
    """The figures of one run.

    seconds:  how long it counts; None: to the last answer
    streamed: whether tokens were sent as they came; the times of whole answers' tokens are unknown
    """
    begin = min(each.begin for each in driven)
    answers = [answer for each in driven for answer in each.answers]
    counted = [answer for answer in answers if answer.counts]
    last = max((answer.ended for answer in counted), default=begin)
    end = last if seconds is None else begin + seconds
    duration = max(end - begin, 1e-9)
    answered = [answer for answer in counted if answer.error is None and answer.responses]
    inside = [a for a in answers if a.error is None and a.responses and begin <= a.ended <= end]
    timeline = _timeline(answers, inside, begin, duration)
    tokens = sum(each["tokens"] for each in timeline)
    good = [answer for answer in inside if within(answer, bounds)]
    gaps = [gap for answer in answered for gap in token_gaps(answer)]
    return LoadRun(
        path,
        "open" if load.clients is None else "closed",
        load.clients,
        load.rate,
        generator,
        round(duration, 6),
        len(counted),
        sum(answer.error is not None for answer in counted),
        sum(answer.prompt_tokens for answer in counted),
        tokens,
        len(inside) / duration,
        tokens / duration,
        len(good) / duration if bounds.asked else None,
        percentiles([first_token(a) for a in answered]) if streamed else None,
        percentiles(gaps) if streamed else None,
        percentiles([per_token(a) for a in answered if a.tokens > 1]) if streamed else None,
        percentiles([latency(answer) for answer in answered]),
        tuple(timeline),
        {
            "processes": len(driven),
            "busy": round(max(each.busy for each in driven), 3),
            "lag_p99_ms": round(lag_p99(driven) * 1e3, 3),
        },
    )


def latency(answer: Answer) -> float:
    """Seconds to the last token."""
    return answer.responses[-1][0] - answer.asked


def first_token(answer: Answer) -> float:
    return answer.responses[0][0] - answer.asked


def per_token(answer: Answer) -> float:
    """Mean seconds from one token to the next; of an answer that came whole, of its latency."""
    if len(answer.responses) == 1:
        return latency(answer) / answer.tokens
    return (latency(answer) - first_token(answer)) / (answer.tokens - 1)


def token_gaps(answer: Answer) -> list[float]:
    """Seconds between tokens; those that came in one response share its time evenly."""
    gaps = []
    for (before, had), (at, has) in zip(answer.responses, answer.responses[1:], strict=False):
        gaps += [(at - before) / (has - had)] * (has - had)
    return gaps


def within(answer: Answer, bounds: LoadBounds) -> bool:
    """Whether an answer keeps every bound."""
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
    found = {f"p{each}": float(np.percentile(values, each)) for each in (50, 90, 99)}
    return {name: round(value, 3) for name, value in {**found, "mean": values.mean()}.items()}


def _timeline(
    answers: Sequence[Answer], ended: Sequence[Answer], begin: float, duration: float
) -> list[dict[str, int]]:
    """Answers and tokens that came in each second of the run; the last one may be a part."""
    rows: list[dict[str, Any]] = [
        {"second": second, "requests": 0, "tokens": 0}
        for second in range(math.ceil(round(duration, 6)))
    ]
    for answer in ended:
        rows[_second(answer.ended - begin, rows)]["requests"] += 1
    for answer in answers:
        before = 0
        for at, tokens in answer.responses:
            if 0 <= at - begin <= duration:
                rows[_second(at - begin, rows)]["tokens"] += tokens - before
            before = tokens
    return rows


def _second(at: float, rows: Sequence[object]) -> int:
    return min(int(at), len(rows) - 1)
