"""Mixed requests of many clients in processes of their own, by the evaluation's load test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS
from launcher_scripts.config.evaluation import GoodputBounds, LoadPrompts, LoadSettings
from launcher_scripts.evaluation.load.driver import (
    DriverResult,
    Prompts,
    RunLoad,
    TimedResponse,
    plan_clients,
)
from launcher_scripts.evaluation.load.figures import percentiles, run_figures
from launcher_scripts.evaluation.load.load_test import run_plan
from launcher_scripts.evaluation.load.paths import LoadTarget, TokenRequest
from launcher_scripts.models.t5 import T5Config

PROCESSES = 8
SECONDS = 8.0  # that count
TIMEOUT_SECONDS = 120.0
# Lengths are uniform over INPUTS and OUTPUTS, which are spread alike.
MIXED = LoadPrompts(
    input=sum(INPUTS) // 2,
    output=sum(OUTPUTS) // 2,
    spread=(INPUTS[1] - INPUTS[0]) / sum(INPUTS),
)


def load_target(path: str, address: str, model: RandomModel, *, stream: bool) -> LoadTarget:
    """The way to a model of `benchmarks.repositories`."""
    kind = "T5" if isinstance(model.config, T5Config) else "GPT"
    return LoadTarget(path, (address,), TokenRequest(model.name, kind), stream)


def settle_seconds(clients: int) -> float:
    """In which clients that begin together, with as many prompts, stop going together."""
    return 3.0 + clients / 40


def measured(target: LoadTarget, vocab_size: int, clients: int, processes: int = PROCESSES) -> dict:
    """The figures of SECONDS once clients have settled. Raises RuntimeError for failed requests."""
    warmup = settle_seconds(clients)
    settings = LoadSettings(clients=(clients,), seconds=SECONDS, warmup=warmup)
    load = RunLoad(clients=clients)
    prompts = Prompts(MIXED, settings.seed, vocab_size)
    plan = plan_clients(settings, load, prompts, TIMEOUT_SECONDS)
    return figures(load, run_plan(target, plan, processes))


def all_answered(driven: Sequence[DriverResult]) -> list[TimedResponse]:
    """The answers of all clients. Raises RuntimeError when a request failed."""
    answers = [answer for each in driven for answer in each.answers]
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0]}")
    return answers


def figures(load: RunLoad, driven: Sequence[DriverResult]) -> dict:
    """Of requests asked in the time that counts; tokens per second of all that came in it."""
    answers = all_answered(driven)
    run = run_figures("", load, driven, SECONDS, GoodputBounds())
    counted = [answer for answer in answers if answer.counts]
    if not counted:
        raise RuntimeError("no request was asked after the clients had settled")
    responses = sum(len(answer.responses) for answer in counted)
    return {
        "clients": run.clients,
        "requests": run.requests,
        "tokens_per_s": round(run.tokens_per_second),
        "tokens": sum(answer.tokens for answer in answers),
        "first_token_ms": run.first_token_ms,
        "between_responses_ms": percentiles([gap for each in counted for gap in _gaps(each)]),
        "per_token_ms": run.per_token_ms,
        "tokens_per_response": round(sum(answer.tokens for answer in counted) / responses, 2),
        "client_busy": run.client["busy"],
    }


def _gaps(answer: TimedResponse) -> Sequence[float]:
    return [float(gap) for gap in np.diff([at for at, _ in answer.responses])]
