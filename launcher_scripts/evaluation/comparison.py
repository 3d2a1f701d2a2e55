"""A task's result beside a reference's: transformers or NeMo on the same items, or a report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.contract_tensors import States
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.config.evaluation import RENAMED_TASKS, TaskSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.journal import Journal, read_content, task_result
from launcher_scripts.evaluation.tasks import task
from launcher_scripts.evaluation.tasks.megatron_models import NemoReference
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    Comparison,
    EvaluatedModel,
    Interval,
    ProgressCallback,
    Speed,
    Task,
    TaskModel,
    TaskResult,
)
from launcher_scripts.evaluation.tasks.transformers_model import TransformersModel

Answer = TypeVar("Answer")


class TimedModel:
    """A task's model that counts what it answers, and the time from request to answer."""

    def __init__(
        self,
        model: TaskModel,
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
        """Return the journal's counts of the answers until now."""
        return {"requests": self._requests, "tokens": self._tokens, "seconds": self._seconds}

    @property
    def pace(self) -> Speed:
        """Pace of all answers until now."""
        rate = self._tokens / self._seconds if self._tokens and self._seconds else None
        return Speed(self._requests, self._seconds, self._tokens, rate)

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """See Model.score."""
        return self._timed(self._model.score(rows, in_flight))

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """See Model.generate_each."""
        for output in self._timed(self._model.generate_rows(rows, in_flight)):
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

Reference = TransformersModel | NemoReference | TaskResult


def timed(
    task: Task,
    settings: TaskSettings,
    requested: EvaluatedModel,
    progress: ProgressCallback,
    journal: Journal | None = None,
) -> TaskResult:
    """The task's result with its pace; what a journal has of it is not asked again."""
    model = TimedModel(requested.model, earlier=journal.counts if journal else None)
    requested = replace(requested, model=model)
    if journal is not None:
        continued = partial(journal.continued, counts=lambda: model.counts)
        requested = replace(requested, continued=continued)
    return replace(task(settings, requested, progress), pace=model.pace)


def open_reference(settings: TaskSettings) -> Reference | None:
    """Open settings.reference before any request: it must not fail afterwards."""
    if settings.reference is None:
        return None
    path = Path(settings.reference)
    if path.suffix == ".nemo":
        return NemoReference(path)
    return TransformersModel(path) if path.is_dir() else read_report(path, settings)


def compared(
    task: Task,
    settings: TaskSettings,
    model: EvaluatedModel,
    progress: ProgressCallback,
    served: TaskResult,
    reference: Reference,
    journal: Journal | None = None,
) -> TaskResult:
    """`served` beside the reference that open_reference gave; journal: of the reference's."""
    source = str(settings.reference)
    if not isinstance(reference, TaskResult):
        source = reference.name
        reference = timed(task, settings, replace(model, model=reference), progress, journal)
    return replace(served, reference=compare(served, reference, source))


def compare(served: TaskResult, reference: TaskResult, source: str) -> Comparison:
    """Raises ConfigError when the reference has other items."""
    by_index = {item["index"]: item for item in reference.items}
    missing = [item["index"] for item in served.items if not same_item(item, by_index)]
    if missing:
        raise ConfigError(
            problem(f"{source} does not have every item", got=missing[:10], change=REFERENCE_KEY)
        )
    different = [
        item["index"]
        for item in served.items
        if answer_value(item) != answer_value(by_index[item["index"]])
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
        items={index: by_index[index] for index in different},
        pace=reference.pace,
        values=_values([by_index[item["index"]] for item in served.items]),
    )


def _values(items: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return every item's numbers and truth values, besides its index and target."""
    names = (set.intersection(*map(set, items)) if items else set()) - {"index", *TARGET_KEYS}
    return {
        name: [item[name] for item in items]
        for name in sorted(names)
        if all(isinstance(item[name], (bool, int, float)) for item in items)
    }


def same_item(item: Mapping[str, Any], by_index: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Return whether the reference has the item, with the same target."""
    other = by_index.get(item["index"])
    shared = [key for key in TARGET_KEYS if other is not None and key in item and key in other]
    return other is not None and all(item[key] == other[key] for key in shared)


def answer_value(item: Mapping[str, Any]) -> Any:
    """Return the key by which two items have the same answer."""
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


# figure -> the items' field that it is made of, where that has another name
FIELDS = {
    "accuracy": "correct",
    "last_token_accuracy": "last_token_correct",
    "perplexity": "log_likelihood",
}
PERPLEXITY = "perplexity"
LOWER_IS_BETTER = frozenset(
    (PERPLEXITY, "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "wer", "brier_score")
)
LOG_LIKELIHOOD = "log_likelihood"

Item = Mapping[str, Any]


@dataclass(frozen=True)
class ComparedAnswers:
    """Other answers to the items of a task.

    source:  what gave them
    metrics: their figures, as a report has them
    pairs:   (an item, the other's), of every item that both have
    alike:   for each pair, whether the answers are the same
    """

    source: str
    metrics: Mapping[str, Mapping[str, Any]]
    pairs: Sequence[tuple[Item, Item]]
    alike: Sequence[bool]


def of_reference(section: Mapping[str, Any]) -> ComparedAnswers | None:
    """Return the reference's answers in a task's section; None if it has none."""
    reference = section.get("reference")
    if reference is None:
        return None
    items, values = section["items"], reference.get("values", {})
    others = [{name: column[row] for name, column in values.items()} for row in range(len(items))]
    different = set(reference["different"])
    pairs = list(zip(items, others, strict=True))
    metrics = reference["metrics"]
    alike = [
        item["index"] not in different and _same_flags(item, other, metrics)
        for item, other in pairs
    ]
    return ComparedAnswers(reference["source"], metrics, pairs, alike)


def of_report(
    items: Sequence[Item],
    others: Sequence[Item],
    metrics: Mapping[str, Mapping[str, Any]],
    source: str,
) -> ComparedAnswers:
    """Return the earlier report's answers to those of `items` that it has, too."""
    by_index = {item["index"]: item for item in others}
    pairs = [(item, by_index[item["index"]]) for item in items if same_item(item, by_index)]
    alike = [
        answer_value(one) == answer_value(other) and _same_flags(one, other, metrics)
        for one, other in pairs
    ]
    return ComparedAnswers(source, metrics, pairs, alike)


def values(items: Sequence[Item], metric: str) -> list[float] | None:
    """Return a metric's values item by item; None if it is one of all items together."""
    items = [item for item in items if _is_of(item, metric)]
    result = [item.get(_field(item, metric)) for item in items]
    numbers = [value for value in result if isinstance(value, (bool, int, float))]
    return numbers if numbers and len(numbers) == len(items) else None


def is_perplexity(metric: str) -> bool:
    """Return whether a figure, through any filter, is one of the items' log-likelihoods."""
    return metric.partition(",")[0] == PERPLEXITY


def flags(of_items: Sequence[float]) -> bool:
    """Return whether the items are right or wrong, and nothing between: lm-eval writes 0.0 and
    1.0."""
    return all(value in (0, 1) for value in of_items)


def drop(
    name: str, metric: Mapping[str, Any], others: ComparedAnswers
) -> tuple[Interval, str] | None:
    """By how much a figure is worse than the others', and a test of it in words.

    Of a percentage it is the difference of the fractions, of another figure a part of the others'.
    None: without an item in common there is nothing to compare.
    """
    pairs = [pair for pair in others.pairs if _is_of(pair[0], name)]
    if not pairs:
        return None
    other = others.metrics[name]
    served, reference = (values(side, name) for side in zip(*pairs, strict=True))
    if served is None or reference is None:
        return _unpaired(name, metric, other, len(pairs)), "the intervals of both"
    if flags(served) and flags(reference):
        lost = sum(a < b for a, b in zip(served, reference, strict=True))
        won = sum(a > b for a, b in zip(served, reference, strict=True))
        test = f"{lost} lost, {won} won, McNemar's p {task.mcnemar(lost, won):.2g}"
        return task.paired_share(lost, won, len(served)), test
    lost_by_item = task.mean([b - a for a, b in zip(served, reference, strict=True)])
    if is_perplexity(name):
        return lost_by_item.mapped(math.expm1), "paired bootstrap"
    return _relative(lost_by_item, name, other), "paired bootstrap"


def log_likelihood_difference(others: ComparedAnswers) -> float | None:
    """The largest difference of an item's log-likelihood, without its sign."""
    both = [
        abs(one[LOG_LIKELIHOOD] - other[LOG_LIKELIHOOD])
        for one, other in others.pairs
        if LOG_LIKELIHOOD in one and LOG_LIKELIHOOD in other
    ]
    return max(both) if both else None


def _same_flags(one: Item, other: Item, metrics: Iterable[str]) -> bool:
    """Return whether the items agree in all that is right or wrong of both."""
    judged = {name.partition(",")[0] for name in metrics}
    return all(
        one[name] == value
        for name, value in other.items()
        if name in one and (isinstance(value, bool) or (name in judged and value in (0, 1)))
    )


def _field(item: Item, metric: str) -> str:
    """Return the item's field of a metric; lm-eval's names end with their filter."""
    name = metric.partition(",")[0]
    field = FIELDS.get(name, name)
    return field if field in item else name


def _is_of(item: Item, metric: str) -> bool:
    """Return whether an item went through the figure's filter; lm-eval's usual one is called
    none."""
    filter_name = metric.partition(",")[2] or "none"
    return bool(item.get("filter", filter_name) == filter_name)


def _unpaired(
    name: str, metric: Mapping[str, Any], other: Mapping[str, Any], items: int
) -> Interval:
    """Other minus ours of figures whose intervals know nothing of each other: conservative."""
    value = other["value"] - metric["value"]
    halves = [
        math.inf if side["low"] is None else (side["high"] - side["low"]) / 2
        for side in (metric, other)
    ]
    half = math.hypot(*halves)
    difference = task.narrowing(value, value - half, value + half, items, "intervals of both")
    return _relative(difference, name, other)


def _relative(lost: Interval, name: str, other: Mapping[str, Any]) -> Interval:
    """A loss in the unit in which drops are bounded, positive where the figure is worse."""
    sign = -1.0 if name.partition(",")[0] in LOWER_IS_BETTER else 1.0
    unit = 1.0 if other["percent"] else abs(other["value"]) or 1.0
    return lost.mapped(lambda value: sign * value / unit)
