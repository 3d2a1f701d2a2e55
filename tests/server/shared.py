"""The server that tests share which only ask, and what its metrics say of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.contract import metric_names as names
from tests.http_requests import send
from tests.processes import wait_for
from tests.server.processes import RunningStep, running
from tests.server.repositories import export, export_t5, text_config

LONG = text_config(max_positions=16384)


@contextlib.contextmanager
def shared_server(folder: Path) -> Iterator[RunningStep]:
    """A GPT `gpt` and a T5 `t5` that stream, with their text models, and the same GPT, `plain`,
    that does not. Text models have a numpy of their own.

    The config.pbtxt of `gpt` is edited by hand, as the documents say; the T5 was exported so.
    """
    settings = export(folder, LONG, name="gpt")
    for name in ("gpt", "ensemble", "text"):
        config = settings.model_repository / name / "config.pbtxt"
        text = config.read_text()
        assert text.count("{ decoupled: false }") == 1
        config.write_text(text.replace("{ decoupled: false }", "{\n  decoupled: True\n}"))
    export(folder, LONG, name="plain")
    export_t5(folder, name="t5", tp=2, decoupled=True)
    numpy_dir = own_numpy(folder / "numpy")
    with running(folder / "job", settings.model_repository, numpy_dir=str(numpy_dir)) as step:
        step.wait_until_ready()
        yield step
        assert step.stop() == 0, step.err
        assert step.survivors() == []


def own_numpy(folder: Path) -> Path:
    """A folder with a copy of the numpy that is installed, as pip would fill it."""
    site = Path(np.__file__).parents[1]
    for path in (site / "numpy", site / "numpy.libs", *site.glob("numpy-*.dist-info")):
        ignored = shutil.ignore_patterns("tests", "__pycache__", "f2py")
        shutil.copytree(path, folder / path.name, ignore=ignored)
    return folder


def cache_tokens_used(served: dict[str, Any], model: str) -> float:
    """The cache tokens that belong to the model's rows."""
    return _value(served, names.CACHE_USED, model)


def tokens_generated(served: dict[str, Any], model: str) -> float:
    """Of all requests so far."""
    return _value(served, names.GENERATION_TOKENS, model)


def requests_given_up(served: dict[str, Any], model: str) -> float:
    """How many requests were cancelled or took longer than their timeout."""
    return _value(served, names.PREEMPTED, model)


@contextlib.contextmanager
def given_up(served: dict[str, Any], model: str) -> Iterator[None]:
    """What is asked here and would go on for long ends before its end."""
    before = requests_given_up(served, model)
    yield
    wait_for(lambda: requests_given_up(served, model) > before)
    wait_for(lambda: cache_tokens_used(served, model) == 0)


def _value(served: dict[str, Any], metric: names.MetricSpec, model: str) -> float:
    samples = map(names.parse_sample, send(f"{served['metrics']}/metrics").text.splitlines())
    key = (metric.name, f'{metric.labels[0]}="{model}"')
    (sample,) = [sample for sample in samples if sample and sample[:2] == key]
    return float(sample.value)
