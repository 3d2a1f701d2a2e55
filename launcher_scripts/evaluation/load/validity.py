"""Whether a run measured the server: the reasons why its figures must not be used."""

from __future__ import annotations

from collections.abc import Sequence

from launcher_scripts.evaluation.load.driver import DriverResult, lag_p99
from launcher_scripts.evaluation.load.figures import LoadRun

# The event loop's thread has no time left for what arrives.
MAX_BUSY = 0.9
# A client that wakes this late has timed itself: a share of what it times, or this many ms.
LAG_SHARE = 0.1
LAG_MS = 10.0


def invalid_reasons(
    run: LoadRun, driven: Sequence[DriverResult], taken: tuple[int, int] | None
) -> tuple[str, ...]:
    """Sentences; none for a valid run.

    taken: how many requests the servers had taken before and after it; None where they no longer
           say so
    """
    answers = [answer for each in driven for answer in each.answers]
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
    return (*reasons, *_client_reasons(run, driven), *_server_reasons(taken, len(answered)))


def _client_reasons(run: LoadRun, driven: Sequence[DriverResult]) -> list[str]:
    busy = max((each.busy for each in driven), default=0.0)
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


def _server_reasons(taken: tuple[int, int] | None, answered: int) -> list[str]:
    if taken is None:
        return ["the server does not answer any more"]
    before, after = taken
    if after - before < answered:
        return [
            f"the server restarted during the run: it has taken {after} requests since it began, "
            f"{before} before the run, and {answered} were answered in it"
        ]
    return []


def _of(some: Sequence[object], every: Sequence[object]) -> str:
    return f"{len(some)} of {len(every)} requests"
