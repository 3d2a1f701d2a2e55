"""report.json as it is read again: to add to it, to compare with it, to judge it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.untrusted import parse_json, read_plain
from launcher_scripts.evaluation.tasks.task import Metric, Pace, TaskResult

FILE_NAME = "report.json"
SCHEMA = 1


def read_content(path: Path, change: str) -> dict[str, Any]:
    """The content of a report.json, or of the one in a folder.

    change: what names the file, for the error. Raises ConfigError for what is no report.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        content = parse_json(read_plain(file))
        schema, _ = content["schema"], content["model"]
        if not isinstance(content["tasks"], dict):
            raise TypeError("its tasks are no mapping")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(f"{file} is no report: {type(error).__name__}: {error}", change=change)
        ) from error
    if schema != SCHEMA:
        raise ConfigError(
            problem(f"{file} has another schema", got=schema, choices=[SCHEMA], change=change)
        )
    return dict(content)


def task_result(section: Mapping[str, Any]) -> TaskResult:
    """A task's section without its reference. Raises KeyError, TypeError or ValueError."""
    metrics = {name: Metric(**values) for name, values in section["metrics"].items()}
    items = [{**item, "index": int(item["index"])} for item in section["items"]]
    pace = Pace(**section["pace"]) if section.get("pace") else None
    return TaskResult(metrics, items, pace=pace)
