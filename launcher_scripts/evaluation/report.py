"""The report of an evaluation: report.json for programs, report.html for people.

Both steps of an evaluation add their section to the same report.json (docs/report.md says what
is in it), and report.html is made anew from it. A section carries what it was measured on, so
sections of different days or servers may stand side by side. Steps that share a results folder
run one after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.config.tasks import BenchmarkSettings, TaskSettings
from launcher_scripts.evaluation.page import html
from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.step_reads import step_reads
from launcher_scripts.evaluation.tasks.task import TaskResult

SCHEMA = 1
CLIENT_PACKAGES = ("tritonclient", "numpy")


class Report:
    """The report in one results folder; what is added is on disk when the call returns."""

    def __init__(self, results_dir: Path, model_name: str) -> None:
        """Raises ConfigError when the folder's report is another model's or is no report."""
        self.results_dir = results_dir
        self.content: dict[str, Any] = {"schema": SCHEMA, "model": model_name, "tasks": {}}
        if self.json_file.exists():
            self.content = _read(self.json_file, model_name)

    @property
    def json_file(self) -> Path:
        return self.results_dir / "report.json"

    @property
    def html_file(self) -> Path:
        return self.results_dir / "report.html"

    def add_task(
        self, settings: TaskSettings, result: TaskResult, measured_on: dict[str, Any]
    ) -> None:
        """Put one task's section into the report, in place of an earlier one."""
        self.content["tasks"][settings.name] = {
            "measured_on": measured_on,
            "settings": dataclasses.asdict(settings),
            **dataclasses.asdict(result),
        }
        self._write()

    def add_speed(
        self,
        settings: BenchmarkSettings,
        rows: Sequence[SpeedRow],
        measured_on: dict[str, Any],
    ) -> None:
        """Put the speed section into the report, in place of an earlier one."""
        self.content["speed"] = {
            "measured_on": measured_on,
            "settings": dataclasses.asdict(settings),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        self._write()

    def _write(self) -> None:
        self.results_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, indent=1, ensure_ascii=False, allow_nan=False)
        atomic_write(self.json_file, text + "\n")
        # As it is read: JSON's keys are texts.
        atomic_write(self.html_file, html(json.loads(text)))


def measured_on(settings: EvaluateSettings, ready: dict[str, Any]) -> dict[str, Any]:
    """When, against which server and from which machine a section is measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "protocol": settings.protocol,
        "server": ready,
        "gpu_price": settings.gpu_price,
        "reads": step_reads(ready, settings.model_name),
        "client": {
            "host": platform.node(),
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
            ),
            "python": platform.python_version(),
            **_versions(),
        },
    }


def _versions() -> dict[str, str]:
    """Of the packages that a client is made of, where they are there: NeMo is asked without any."""
    found = {}
    for package in CLIENT_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _read(path: Path, model_name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema, model = content["schema"], content["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(
                f"{path} is no report to add to: {type(error).__name__} {error}",
                change="evaluate.run.results_dir, or remove the file",
            )
        ) from error
    if (schema, model) != (SCHEMA, model_name):
        raise ConfigError(
            problem(
                f"{path} is a report of another kind or model than {model_name}",
                got=f"schema {schema} of {model}",
                change="evaluate.run.results_dir, or remove the file",
            )
        )
    return dict(content)
