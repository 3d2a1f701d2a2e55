"""A task's result beside a reference's: transformers or NeMo on the same items, or a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.tasks import RENAMED_TASKS, TaskSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.journal import Journal
from launcher_scripts.evaluation.report_content import read_content, task_result
from launcher_scripts.evaluation.served.tensors import States
from launcher_scripts.evaluation.tasks.nemo_model import NemoModel
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    Comparison,
    EvaluatedModel,
    Model,
    Pace,
    ProgressCallback,
    Task,
    TaskResult,
)
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel

Answer = TypeVar("Answer")


class TimedModel:
    """A task's model that counts what it answers, and the time from request to answer."""

    def __init__(
        self,
        model: Model,
        clock: Callable[[], float] = time.perf_counter,
        earlier: Mapping[str, float] | None = None,
    ) -> None:
        """earlier: the counts of what was answered before, by another such model."""
        self._model = model
        self._clock = clock
        earlier = earlier or {}
        self._requests = int(earlier.get("requests", 0))
        self._tokens = int(earlier.get("tokens", 0))
        self._seconds = float(earlier.get("seconds", 0.0))

    @property
    def counts(self) -> dict[str, float]:
        """What a journal keeps of the answers until now."""
        return {"requests": self._requests, "tokens": self._tokens, "seconds": self._seconds}

    @property
    def pace(self) -> Pace:
        """Of all answers until now."""
        rate = self._tokens / self._seconds if self._tokens and self._seconds else None
        return Pace(self._requests, self._seconds, self._tokens, rate)

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """See Model.score."""
        return self._timed(self._model.score(rows, in_flight))

    def generate_each(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """See Model.generate_each."""
        for output in self._timed(self._model.generate_each(rows, in_flight)):
            self._tokens += len(output.output_ids)
            yield output

    def hidden_states(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[States]:
        """See Model.hidden_states."""
        for states in self._timed(self._model.hidden_states(rows, in_flight)):
            self._tokens += len(states)
            yield states

    def _timed(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        begin = self._clock()
        before = self._seconds
        for answer in answers:
            self._requests += 1
            self._seconds = before + self._clock() - begin
            yield answer


# What two answers to one item are compared by, where the item has it.
ANSWER_KEYS = ("prediction", "correct")
# What the same item has in common in every report.
TARGET_KEYS = ("target", "targets")

Reference = TransformersModel | NemoModel | TaskResult


def timed(
    task: Task,
    settings: TaskSettings,
    asked: EvaluatedModel,
    progress: ProgressCallback,
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
    asked: EvaluatedModel,
    progress: ProgressCallback,
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
                f"{path} is not a report of {settings.name}: {type(error).__name__}: {error}",
                change=REFERENCE_KEY,
            )
        ) from error
    if limit != settings.limit:
        raise ConfigError(
            problem(f"{path} has another limit of items", got=limit, change=REFERENCE_KEY)
        )
    return result
