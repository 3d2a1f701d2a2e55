"""The clients of one process: requests asked in closed or open loop, every response timed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from launcher_scripts.evaluation.load.plan import LoadRequest, Plan

# Asks one request and yields the number of tokens generated so far, with each response.
Ask = Callable[[LoadRequest], AsyncGenerator[int, None]]
LAG_SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it; times are of the event loop, in seconds.

    asked:     when it was sent; in an open loop, when it should have been
    responses: (time, tokens by then) of those that brought tokens
    counts:    whether it was asked after the warm-up
    """

    asked: float
    ended: float
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
    """What one client process saw.

    begin: when the run began to count
    busy:  share of the time in which the event loop's thread computed
    lags:  seconds by which the event loop woke too late, sampled
    """

    answers: tuple[Answer, ...]
    begin: float
    busy: float
    lags: tuple[float, ...]


async def drive(plan: Plan, ask: Ask) -> DriverResult:
    """Do the plan; ends when every request is answered, has failed or has timed out."""
    loop = asyncio.get_running_loop()
    lags: list[float] = []
    sampler = asyncio.create_task(_sample_lags(lags))
    start, computed = loop.time(), time.thread_time()
    try:
        work = _closed(plan, ask, start) if plan.clients else _open(plan, ask, start)
        answers = await work
    finally:
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
    busy = (time.thread_time() - computed) / max(loop.time() - start, 1e-9)
    return DriverResult(tuple(answers), start + plan.warmup, busy, tuple(lags))


async def _closed(plan: Plan, ask: Ask, start: float) -> Sequence[Answer]:
    loop = asyncio.get_running_loop()
    requests = itertools.cycle(plan.requests)
    begin, answers, counted = start + plan.warmup, [], 0

    async def client() -> None:
        nonlocal counted
        while True:
            now = loop.time()
            counts = now >= begin
            if counts and plan.count is not None:
                if counted == plan.count:
                    return
                counted += 1
            if plan.seconds is not None and now >= begin + plan.seconds:
                return
            answers.append(await _asked(ask, next(requests), now, counts, plan.timeout))

    await asyncio.gather(*(client() for _ in range(plan.clients)))
    return answers


async def _open(plan: Plan, ask: Ask, start: float) -> Sequence[Answer]:
    loop = asyncio.get_running_loop()
    tasks = []
    for request in plan.requests:
        await asyncio.sleep(start + request.at - loop.time())
        counts = request.at >= plan.warmup
        asked = _asked(ask, request, start + request.at, counts, plan.timeout)
        tasks.append(asyncio.create_task(asked))
    return await asyncio.gather(*tasks)


async def _asked(
    ask: Ask, request: LoadRequest, asked: float, counts: bool, timeout: float
) -> Answer:
    loop = asyncio.get_running_loop()
    responses: list[tuple[float, int]] = []

    async def read() -> None:
        async with aclosing(ask(request)) as stream:
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
    return Answer(
        asked,
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
    """Of the slowest process, in seconds."""
    return max((float(np.percentile(each.lags, 99)) for each in driven if each.lags), default=0.0)
