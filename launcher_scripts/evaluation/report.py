"""The report of an evaluation: report.json for programs, report.html for people.

Both steps of an evaluation add their section to the same report.json (docs/report.md says what
is in it), and report.html is made from it again. A section carries what it was measured on, so
sections of different days or servers may stand side by side. Steps that share a results folder
run one after another.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.exit_codes import VERDICT_FILE
from launcher_scripts.config.harness import HarnessSettings
from launcher_scripts.config.ladder import LadderSettings
from launcher_scripts.config.load import LoadSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.config.tasks import BenchmarkSettings, TaskSettings
from launcher_scripts.config.twin import TwinSettings
from launcher_scripts.evaluation.gate import Verdict
from launcher_scripts.evaluation.harness import HarnessResult
from launcher_scripts.evaluation.ladder import LadderRow
from launcher_scripts.evaluation.load.figures import LoadRun
from launcher_scripts.evaluation.load.saturation import Saturation
from launcher_scripts.evaluation.page import html
from launcher_scripts.evaluation.provenance import client_versions, digests, project_commit
from launcher_scripts.evaluation.report_content import FILE_NAME, SCHEMA, read_content
from launcher_scripts.evaluation.speed import SpeedRow
from launcher_scripts.evaluation.step_reads import step_reads
from launcher_scripts.evaluation.tasks.task import TaskResult
from launcher_scripts.evaluation.twin.measurement import TwinResult


class Report:
    """The report in one results folder; what is added is on disk when the call returns.

    A verdict is about what was measured until then, so opening a report for more withdraws it.
    """

    def __init__(self, results_dir: Path, model_name: str) -> None:
        """Raises ConfigError when the folder's report is another model's or is not a report."""
        self.results_dir = results_dir
        self.content: dict[str, Any] = {"schema": SCHEMA, "model": model_name, "tasks": {}}
        if self.json_file.exists():
            change = "evaluate.run.results_dir, or remove the file"
            self.content = read_content(self.json_file, change)
            if (model := self.content["model"]) != model_name:
                what = f"{self.json_file} is a report of another model than {model_name}"
                raise ConfigError(problem(what, got=model, change=change))
            self.content.pop("verdict", None)
        self.verdict_file.unlink(missing_ok=True)

    @property
    def json_file(self) -> Path:
        return self.results_dir / FILE_NAME

    @property
    def verdict_file(self) -> Path:
        return self.results_dir / VERDICT_FILE

    @property
    def html_file(self) -> Path:
        return self.results_dir / "report.html"

    def add_task(
        self, settings: TaskSettings, result: TaskResult, measured_on: dict[str, Any]
    ) -> None:
        """One task's section, in place of an earlier one, as all that follow."""
        section = _section(measured_on, settings, dataclasses.asdict(result))
        self.content["tasks"][settings.name] = section
        self._write()

    def add_speed(
        self, settings: BenchmarkSettings, rows: Sequence[SpeedRow], measured_on: dict[str, Any]
    ) -> None:
        """The speed sweep."""
        self._put("speed", _section(measured_on, settings, {"rows": _plain(rows)}))

    def add_twin(
        self, settings: TwinSettings, result: TwinResult, measured_on: dict[str, Any]
    ) -> None:
        """The comparison with the original."""
        self._put("twin", _section(measured_on, settings, dataclasses.asdict(result)))

    def add_harness(
        self, settings: HarnessSettings, result: HarnessResult, measured_on: dict[str, Any]
    ) -> None:
        """What lm_eval measured."""
        self._put("harness", _section(measured_on, settings, dataclasses.asdict(result)))

    def add_load(
        self,
        settings: LoadSettings,
        runs: Sequence[LoadRun],
        saturation: Saturation | None,
        measured_on: dict[str, Any],
    ) -> None:
        """The load test."""
        found = saturation and dataclasses.asdict(saturation)
        values = {"runs": _plain(runs), "saturation": found}
        self._put("load", _section(measured_on, settings, values))

    def add_ladder(
        self, settings: LadderSettings, rows: Sequence[LadderRow], chosen: str | None, why: str
    ) -> None:
        """The comparison of a ladder's rungs."""
        values = {"rows": _plain(rows), "chosen": chosen, "why": why}
        self._put("ladder", _section({"date": _now(), "client": _client()}, settings, values))

    def add_verdict(self, verdict: Verdict) -> None:
        """The verdict, and last of all beside the report as verdict.json."""
        values = dataclasses.asdict(verdict)
        self._put("verdict", values)
        text = json.dumps(values, indent=1, ensure_ascii=False)
        atomic_write(self.verdict_file, text + "\n")

    def _put(self, name: str, section: dict[str, Any]) -> None:
        self.content[name] = section
        self._write()

    def _write(self) -> None:
        self.results_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, indent=1, ensure_ascii=False, allow_nan=False)
        atomic_write(self.json_file, text + "\n")
        # As it is read: JSON's keys are texts.
        atomic_write(self.html_file, html(json.loads(text)))


def _section(measured_on: dict[str, Any], settings: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"measured_on": measured_on, "settings": dataclasses.asdict(settings), **values}


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def measured_on(
    settings: EvaluateSettings,
    ready: dict[str, Any],
    *,
    data: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    seeds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """When, on what, against which server and from which machine a section is measured.

    data:       the files that were read for it
    parameters: the served model's, of its config.pbtxt
    seeds:      of what is random in it
    """
    return {
        "date": _now(),
        "protocol": ready.get("protocol", settings.protocol),
        "server": ready,
        "parameters": dict(parameters or {}),
        "digests": digests(settings, data),
        "seeds": dict(seeds or {}),
        "gpu_price": settings.gpu_price,
        "reads": step_reads(ready, settings.model_name),
        "client": _client(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _client() -> dict[str, Any]:
    """This machine."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "commit": project_commit(),
        **client_versions(),
    }


def _processor() -> str:
    """The processor's name as Linux gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
