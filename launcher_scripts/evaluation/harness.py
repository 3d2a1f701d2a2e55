"""lm_eval run on a model behind a gateway, and what its files say.

The working directory of lm_eval is the folder of data sets, where the library `datasets` finds
<owner>/<name> before it would ask the hub; so the tasks keep their owners' definitions unchanged.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.common.http_client import HttpClient
from launcher_scripts.common.processes import signal_when_parent_dies
from launcher_scripts.config.evaluation import KEY, HarnessSettings
from launcher_scripts.config.security import read_keys
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.evaluation.lm_eval_program import NO_DATA
from launcher_scripts.evaluation.tasks.task import Metric, Z

PROGRAM = Path(__file__).with_name("lm_eval_program.py")
INSTALL = "pip install -r requirements/harness.txt"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
POLL_SECONDS = 0.2
# Of the figures: those that are fractions, and those that are exp of a mean.
_FRACTION = re.compile(r"(acc|exact_match|em|f1|pass@\d+)(_\w+)?")
_EXPONENTIAL = re.compile(r"(\w+_)?perplexity")


@dataclass(frozen=True)
class HarnessGateway:
    """A gateway that serves a model. openai: http://host:port/v1; key: its API key, or none."""

    openai: str
    model: str
    max_model_len: int
    key: str | None = None


@dataclass(frozen=True)
class HarnessTask:
    """One task's figures. samples: the file of its items, where there is one."""

    metrics: dict[str, Metric]
    items: int
    samples: str | None
    version: Any


@dataclass(frozen=True)
class HarnessResult:
    """Results of lm_eval; files are below the folder `harness` of the results."""

    version: str
    tasks: dict[str, HarnessTask]
    files: list[str]


def lm_eval_version(settings: HarnessSettings) -> str:
    """Return the version of the interpreter's lm_eval. Raises ConfigError where there is none."""
    python = settings.python or sys.executable
    try:
        done = subprocess.run(
            [python, str(PROGRAM), "version"],
            env=_environment(settings),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            problem(f"cannot run {python}: {error}", change=f"{KEY}.python")
        ) from error
    match = re.search(r"^lm_eval (\S+)$", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        message = f"{python} does not have lm_eval; run: {python} -m {INSTALL}"
        raise ConfigError(problem(message, change=f"{KEY}.python, the interpreter of another one"))
    return match[1]


def find_gateway(
    settings: EvaluateSettings, harness: HarnessSettings, ready: Mapping[str, Any]
) -> HarnessGateway:
    """The gateway to ask, which answers and serves the model.

    ready: what the server's ready file says
    Waits for it, settings.ready_timeout seconds at most. Raises ConfigError where there is none,
    ServerError where it does not answer.
    """
    deadline = time.monotonic() + settings.ready_timeout
    while True:
        try:
            return _gateway(settings, harness, ready)
        except ServerError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_SECONDS)


def _gateway(
    settings: EvaluateSettings, harness: HarnessSettings, ready: Mapping[str, Any]
) -> HarnessGateway:
    address = _address(harness, ready, settings.ready_file)
    key = None
    if harness.api_keys is not None:
        key = next(iter(read_keys(Path(harness.api_keys), f"{KEY}.api_keys").values()))
    models = models_of(address, key)
    if settings.model_name not in models:
        raise ConfigError(
            problem(
                f"the gateway at {address} does not serve the model",
                got=settings.model_name,
                choices=sorted(models),
                change="evaluate.model_name, or deploy.gateway.models",
            )
        )
    return HarnessGateway(
        address, settings.model_name, int(models[settings.model_name]["max_model_len"]), key
    )


def models_of(openai: str, key: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the gateway's data of each model that it serves, by name."""
    return {model["id"]: model for model in _query(f"{openai}/models", key)["data"]}


def run_harness(
    harness: HarnessSettings,
    version: str,
    gateway: HarnessGateway,
    folder: Path,
    answers: Path | None = None,
) -> HarnessResult:
    """lm_eval's tasks on the gateway's model; its files replace those that are in `folder`.

    version: what lm_eval_version gave
    answers: where lm_eval keeps what the model answers, and looks before it asks
    """
    model = {
        "model": gateway.model,
        "base_url": f"{gateway.openai}/completions",
        "num_concurrent": harness.concurrency,
        "max_length": gateway.max_model_len,
    }
    # Not on the command line, which other users of the machine may read.
    secret = {"OPENAI_API_KEY": gateway.key} if gateway.key else {}
    return run_lm_eval(harness, version, ("gateway-completions", model), folder, secret, answers)


def run_lm_eval(
    harness: HarnessSettings,
    version: str,
    model: tuple[str, Mapping[str, Any]],
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    answers: Path | None = None,
) -> HarnessResult:
    """lm_eval's tasks on any of its models: its type, and its arguments. The others: as in run.

    Raises ConfigError where a data set is missing, ServerError when lm_eval fails.
    """
    output = folder.with_name(folder.name + ".partial")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="lm_eval_") as cache:
        code = subprocess.run(
            lm_eval_command(harness, model, output, answers),
            cwd=harness.data,
            env={**_environment(harness), **environment, "HF_HOME": cache},
            preexec_fn=partial(signal_when_parent_dies, signal.SIGKILL),
            check=False,
        ).returncode
    if code == NO_DATA:
        message = f"{harness.data} does not have a data set of the tasks, which lm_eval names above"
        raise ConfigError(problem(message, change=f"{KEY}.data (docs/evaluation.md)"))
    if code:
        raise ServerError(f"lm_eval ended with exit status {code}; its last lines are above")
    result = read_results(output, version)
    shutil.rmtree(folder, ignore_errors=True)
    output.rename(folder)
    return result


def lm_eval_command(
    harness: HarnessSettings,
    model: tuple[str, Mapping[str, Any]],
    output: Path,
    answers: Path | None = None,
) -> list[str]:
    """The command line of lm_eval."""
    kind, arguments = model
    options = {
        "--limit": harness.limit,
        "--num_fewshot": harness.num_fewshot,
        "--use_cache": answers and answers.absolute(),
    }
    values = {name: str(value) for name, value in options.items() if value is not None}
    return [
        *(harness.python or sys.executable, str(PROGRAM), "run"),
        *("--model", kind, "--model_args", json.dumps(arguments)),
        *("--tasks", *harness.tasks),
        *("--output_path", str(output.absolute()), "--log_samples"),
        *(word for pair in values.items() for word in pair),
    ]


def read_results(folder: Path, version: str) -> HarnessResult:
    """Read the files that one run of lm_eval has written below `folder`.

    Raises ServerError when there is no file of results, or one that is none.
    """
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    results = [name for name in files if Path(name).name.startswith("results_")]
    if len(results) != 1:
        raise ServerError(problem("lm_eval wrote no file of results, or several", got=files))
    stamp = Path(results[0]).stem.removeprefix("results_")
    samples = {Path(name).name: name for name in files}
    try:
        content = json.loads((folder / results[0]).read_text(encoding="utf-8"))
        tasks = {
            name: _task(name, values, content, samples.get(f"samples_{name}_{stamp}.jsonl"))
            for name, values in content["results"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"{results[0]} is not a file of lm_eval's results: {type(error).__name__}: {error}"
        )
        raise ServerError(message) from error
    return HarnessResult(version, tasks, files)


def _task(
    name: str, values: Mapping[str, Any], content: Mapping[str, Any], samples: str | None
) -> HarnessTask:
    """One task, or one group of tasks."""
    counts = content.get("n-samples", {}).get(name, {})
    return HarnessTask(
        metrics={
            key.removesuffix(",none"): _metric(name, key, value, values.get(_stderr_key(key)))
            for key, value in values.items()
            if "," in key and "_stderr," not in key and isinstance(value, (int, float))
        },
        items=int(counts.get("effective", values.get("sample_len") or 0)),
        samples=samples,
        version=content.get("versions", {}).get(name),
    )


def _stderr_key(key: str) -> str:
    metric, _, of_filter = key.partition(",")
    return f"{metric}_stderr,{of_filter}"


def _metric(task: str, key: str, value: float, stderr: Any) -> Metric:
    """A figure with the interval that its standard error gives; lm_eval writes N/A for none.

    That of a perplexity is one of its logarithm, as its error is.
    """
    if not math.isfinite(value):
        raise ServerError(
            f"{key} of {task} is {value}: lm_eval got log-probabilities that are none"
        )
    metric, _, of_filter = key.partition(",")
    percent = _FRACTION.fullmatch(metric) is not None
    suffix = "" if of_filter == "none" else f", filter {of_filter}"
    meaning = f"lm_eval's {metric}{suffix}"
    if not isinstance(stderr, (int, float)) or not math.isfinite(stderr):
        return Metric(value, None, None, percent, meaning)
    if _EXPONENTIAL.fullmatch(metric) and value:
        factor = math.exp(Z * stderr / value)
        return Metric(value, value / factor, value * factor, percent, meaning)
    low, high = value - Z * stderr, value + Z * stderr
    if percent:
        low, high = max(0.0, low), min(1.0, high)
    return Metric(value, low, high, percent, meaning)


def _environment(settings: HarnessSettings) -> dict[str, str]:
    """For another interpreter without the packages of the job's."""
    others = {"PYTHONPATH", "PYTHONHOME"} if settings.python else set()
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    return inherited | OFFLINE


def _address(harness: HarnessSettings, ready: Mapping[str, Any], ready_file: str) -> str:
    """http://host:port/v1, as given, or as a ready file says it."""
    openai = harness.gateway or ready.get("openai")
    if openai is None:
        raise ConfigError(
            problem(
                f"the server of {ready_file} has no gateway, and lm_eval asks one",
                change=f"deploy.gateway.port=0, or {KEY}.gateway=http://host:port/v1",
            )
        )
    if harness.gateway_is_file:
        try:
            openai = json.loads(Path(str(harness.gateway)).read_text(encoding="utf-8"))["openai"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{harness.gateway} names no gateway: {type(error).__name__}"
            raise ServerError(problem(message, change=f"{KEY}.gateway")) from error
    return str(openai).rstrip("/")


def _query(url: str, key: str | None) -> dict[str, Any]:
    server, slash, path = url.rpartition("/")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with HttpClient(server, 30, use_proxies=True) as client:
            status, text = client.request("GET", slash + path, headers=headers)
        if status == 401:
            message = f"the gateway at {url} wants an API key" + (
                ", and another one" if key else ""
            )
            raise ConfigError(problem(message, change=f"{KEY}.api_keys"))
        if status != 200:
            raise ServerError(f"the gateway answered {url} with {status}")
        return dict(json.loads(text))
    except (OSError, ValueError) as error:
        message = f"the gateway does not answer: {error}"
        raise ServerError(problem(message, got=url, change=f"{KEY}.gateway")) from error
