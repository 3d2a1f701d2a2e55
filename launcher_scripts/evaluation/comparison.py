"""A task's result beside a reference's: transformers or NeMo on the same items, or a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.tasks import RENAMED_TASKS, TaskSettings
from launcher_scripts.evaluation.nemo_model import NemoModel
from launcher_scripts.evaluation.pace import TimedModel
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    Asked,
    Comparison,
    Metric,
    Pace,
    Progress,
    Task,
    TaskResult,
)
from launcher_scripts.evaluation.transformers_model import TransformersModel

# What two answers to one item are compared by, where the item has it.
ANSWER_KEYS = ("prediction", "correct")
# What the same item has in common in every report.
TARGET_KEYS = ("target", "targets")

Reference = TransformersModel | NemoModel | TaskResult


def timed(task: Task, settings: TaskSettings, asked: Asked, progress: Progress) -> TaskResult:
    """The task's result with its pace."""
    model = TimedModel(asked.model)
    result = task(settings, replace(asked, model=model), progress)
    return replace(result, pace=model.pace)


def open_reference(settings: TaskSettings) -> Reference | None:
    """What settings.reference names, read before anything is asked: it must not fail afterwards."""
    if settings.reference is None:
        return None
    path = Path(settings.reference)
    if path.suffix == ".nemo":
        return NemoModel(path)
    return TransformersModel(path) if path.is_dir() else read_report(path, settings)


def compared(
    task: Task,
    settings: TaskSettings,
    asked: Asked,
    progress: Progress,
    served: TaskResult,
    reference: Reference,
) -> TaskResult:
    """`served` beside the reference that open_reference gave."""
    source = str(settings.reference)
    if not isinstance(reference, TaskResult):
        source = reference.name
        reference = timed(task, settings, replace(asked, model=reference), progress)
    return replace(served, reference=compare(served, reference, source))


def compare(served: TaskResult, reference: TaskResult, source: str) -> Comparison:
    """Raises ConfigError when the reference has other items."""
    known = {item["index"]: item for item in reference.items}
    missing = [item["index"] for item in served.items if not _same_item(item, known)]
    if missing:
        raise ConfigError(
            problem(f"{source} does not have every item", got=missing[:10], change=REFERENCE_KEY)
        )
    different = [
        item["index"] for item in served.items if answer(item) != answer(known[item["index"]])
    ]
    return Comparison(
        source=source,
        metrics=reference.metrics,
        difference={
            name: metric.value - reference.metrics[name].value
            for name, metric in served.metrics.items()
            if name in reference.metrics
        },
        different=different,
        items={index: known[index] for index in different},
        pace=reference.pace,
    )


def _same_item(item: dict[str, Any], known: dict[Any, dict[str, Any]]) -> bool:
    """Whether the reference has the item, with the same target."""
    other = known.get(item["index"])
    shared = [key for key in TARGET_KEYS if other is not None and key in item and key in other]
    return other is not None and all(item[key] == other[key] for key in shared)


def answer(item: dict[str, Any]) -> Any:
    """What makes two items the same answer."""
    return next((item[key] for key in ANSWER_KEYS if key in item), None)


def read_report(path: Path, settings: TaskSettings) -> TaskResult:
    """The task's section of another evaluation's report.json, over the same items."""
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        section = {RENAMED_TASKS.get(name, name): task for name, task in tasks.items()}[
            settings.name
        ]
        metrics = {name: Metric(**values) for name, values in section["metrics"].items()}
        items = [{**item, "index": int(item["index"])} for item in section["items"]]
        limit = section["settings"]["limit"]
        pace = Pace(**section["pace"]) if section.get("pace") else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            problem(
                f"{path} is no report of {settings.name}: {type(error).__name__}: {error}",
                change=REFERENCE_KEY,
            )
        ) from error
    if limit != settings.limit:
        raise ConfigError(
            problem(f"{path} has another limit of items", got=limit, change=REFERENCE_KEY)
        )
    return TaskResult(metrics, items, pace=pace)
