"""The load generator guidellm before the gateway: the same requests, its own client and clock.

It runs as a command of its own (requirements/load.txt) and writes when each request began, brought
its first token and brought its last. Of these the figures are made as of our own client's.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.common.processes import signal_when_parent_dies
from launcher_scripts.evaluation.load.driver import Answer, DriverResult
from launcher_scripts.evaluation.load.paths import Target
from launcher_scripts.evaluation.load.plan import Load, Plan

_LAST_WORDS = 2000


def find_guidellm() -> str:
    """Its command, beside this Python or on the PATH. Raises ConfigError without one."""
    beside = shutil.which("guidellm", path=str(Path(sys.executable).parent))
    result = beside or shutil.which("guidellm")
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
    target: Target, load: Load, plan: Plan, texts: Sequence[str], seed: int, limit: float
) -> list[DriverResult]:
    """What guidellm saw. texts: the plan's prompts; limit: seconds for its whole command.

    Raises ServerError when it fails as a whole or takes longer; requests that fail are answers with
    an error.
    """
    command = find_guidellm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(target, load, plan, seed, folder)
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


def configuration(
    target: Target, load: Load, plan: Plan, seed: int, folder: Path
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


def driven_of(benchmark: Mapping[str, Any], plan: Plan, limit: float) -> DriverResult:
    """Its requests as answers; tokens between the first and the last one came evenly.

    Raises ServerError for times that lie further apart than the `limit` seconds of its command.
    """
    found = [each for kind in ("successful", "errored") for each in benchmark["requests"][kind]]
    answers = [_answer(each, plan) for each in found]
    begin = min((answer.asked for answer in answers), default=0.0) + plan.warmup
    end = max((answer.ended for answer in answers), default=0.0)
    if not 0 <= end - begin + plan.warmup <= limit:
        raise ServerError(f"guidellm reports requests from {begin:.3f} s to {end:.3f} s")
    counted = tuple(replace(answer, counts=answer.asked >= begin) for answer in answers)
    times = [each["info"]["timings"] for each in found]
    lags = tuple(max(0.0, time["request_start"] - time["targeted_start"]) for time in times)
    return DriverResult(counted, begin, 0.0, () if plan.clients else lags)


def _answer(request: Mapping[str, Any], plan: Plan) -> Answer:
    times, tokens = request["info"]["timings"], int(request["output_tokens"] or 0)
    first, last = times["first_token_iteration"], times["last_token_iteration"]
    responses: tuple[tuple[float, int], ...] = ()
    if tokens and first is not None and last is not None:
        steps = max(tokens - 1, 1)
        responses = tuple(
            (last if tokens == 1 else first + (last - first) * place / steps, place + 1)
            for place in range(tokens)
        )
    wanted = json.loads(request["request_args"])["body"]["max_tokens"]
    return Answer(
        times["request_start"] if plan.clients else times["targeted_start"],
        times["request_end"],
        int(request["prompt_tokens"] or 0),
        int(wanted),
        responses,
        error=request["info"]["error"],
    )
