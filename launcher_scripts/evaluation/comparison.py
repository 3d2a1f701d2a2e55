"""A task's result beside a reference's: transformers or NeMo on the same items, or a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.tasks import RENAMED_TASKS, TaskSettings
from launcher_scripts.evaluation.journal import Journal
from launcher_scripts.evaluation.nemo_model import NemoModel
from launcher_scripts.evaluation.pace import TimedModel
from launcher_scripts.evaluation.report_content import read_content, task_result
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    Asked,
    Comparison,
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


def timed(
    task: Task,
    settings: TaskSettings,
    asked: Asked,
    progress: Progress,
    journal: Journal | None = None,
) -> TaskResult:
    """The task's result with its pace; what a journal has of it is not asked again."""
    model = TimedModel(asked.model, earlier=journal.counts if journal else None)
    asked = replace(asked, model=model)
    if journal is not None:
        continued = partial(journal.continued, counts=lambda: model.counts)
        asked = replace(asked, continued=continued)
    return replace(task(settings, asked, progress), pace=model.pace)


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
    journal: Journal | None = None,
) -> TaskResult:
    """`served` beside the reference that open_reference gave; journal: of the reference's."""
    source = str(settings.reference)
    if not isinstance(reference, TaskResult):
        source = reference.name
        reference = timed(task, settings, replace(asked, model=reference), progress, journal)
    return replace(served, reference=compare(served, reference, source))


def compare(served: TaskResult, reference: TaskResult, source: str) -> Comparison:
    """Raises ConfigError when the reference has other items."""
    known = {item["index"]: item for item in reference.items}
    missing = [item["index"] for item in served.items if not same_item(item, known)]
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
        values=_values([known[item["index"]] for item in served.items]),
    )


def _values(items: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """What every item has a number or a truth value for, besides its index and target."""
    names = (set.intersection(*map(set, items)) if items else set()) - {"index", *TARGET_KEYS}
    return {
        name: [item[name] for item in items]
        for name in sorted(names)
        if all(isinstance(item[name], (bool, int, float)) for item in items)
    }


def same_item(item: Mapping[str, Any], known: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether the reference has the item, with the same target."""
    other = known.get(item["index"])
    shared = [key for key in TARGET_KEYS if other is not None and key in item and key in other]
    return other is not None and all(item[key] == other[key] for key in shared)


def answer(item: Mapping[str, Any]) -> Any:
    """What makes two items the same answer."""
    return next((item[key] for key in ANSWER_KEYS if key in item), None)


def read_report(path: Path, settings: TaskSettings) -> TaskResult:
    """The task's section of another evaluation's report.json, over the same items."""
    content = read_content(path, REFERENCE_KEY)
    try:
        tasks = {RENAMED_TASKS.get(name, name): task for name, task in content["tasks"].items()}
        section = tasks[settings.name]
        result = task_result(section)
        limit = section["settings"]["limit"]
    except (ValueError, KeyError, TypeError) as error:
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
    return result
