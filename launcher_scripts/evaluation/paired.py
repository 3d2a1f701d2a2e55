"""The same items answered twice: by how much a figure is worse, and how many answers are alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.evaluation.comparison import answer, same_item
from launcher_scripts.evaluation.tasks import statistics
from launcher_scripts.evaluation.tasks.statistics import Interval

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
    """What the reference of a task's section answered; None: it has none."""
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
    """What an earlier report has of those of `items` that it has too."""
    known = {item["index"]: item for item in others}
    pairs = [(item, known[item["index"]]) for item in items if same_item(item, known)]
    alike = [
        answer(one) == answer(other) and _same_flags(one, other, metrics) for one, other in pairs
    ]
    return ComparedAnswers(source, metrics, pairs, alike)


def values(items: Sequence[Item], figure: str) -> list[float] | None:
    """What a figure is made of, item by item; None: it is one of all items together."""
    items = [item for item in items if _is_of(item, figure)]
    found = [item.get(_field(item, figure)) for item in items]
    numbers = [value for value in found if isinstance(value, (bool, int, float))]
    return numbers if numbers and len(numbers) == len(items) else None


def is_perplexity(figure: str) -> bool:
    """Whether a figure, through any filter, is one of the items' log-likelihoods."""
    return figure.partition(",")[0] == PERPLEXITY


def flags(of_items: Sequence[float]) -> bool:
    """Whether the items are right or wrong, and nothing between: lm-eval writes 0.0 and 1.0."""
    return all(value in (0, 1) for value in of_items)


def drop(
    figure: str, metric: Mapping[str, Any], others: ComparedAnswers
) -> tuple[Interval, str] | None:
    """By how much a figure is worse than the others', and a test of it in words.

    Of a percentage it is the difference of the fractions, of another figure a part of the others'.
    None: without an item in common there is nothing to compare.
    """
    pairs = [pair for pair in others.pairs if _is_of(pair[0], figure)]
    if not pairs:
        return None
    other = others.metrics[figure]
    ours, theirs = (values(side, figure) for side in zip(*pairs, strict=True))
    if ours is None or theirs is None:
        return _unpaired(figure, metric, other, len(pairs)), "the intervals of both"
    if flags(ours) and flags(theirs):
        lost = sum(a < b for a, b in zip(ours, theirs, strict=True))
        won = sum(a > b for a, b in zip(ours, theirs, strict=True))
        test = f"{lost} lost, {won} won, McNemar's p {statistics.mcnemar(lost, won):.2g}"
        return statistics.paired_share(lost, won, len(ours)), test
    lost_each = statistics.mean([b - a for a, b in zip(ours, theirs, strict=True)])
    if is_perplexity(figure):
        return lost_each.mapped(math.expm1), "paired bootstrap"
    return _relative(lost_each, figure, other), "paired bootstrap"


def largest_difference(others: ComparedAnswers) -> float | None:
    """The largest difference of an item's log-likelihood, without its sign."""
    both = [
        abs(one[LOG_LIKELIHOOD] - other[LOG_LIKELIHOOD])
        for one, other in others.pairs
        if LOG_LIKELIHOOD in one and LOG_LIKELIHOOD in other
    ]
    return max(both) if both else None


def _same_flags(one: Item, other: Item, metrics: Iterable[str]) -> bool:
    """Whether the items agree in all that is right or wrong of both."""
    judged = {figure.partition(",")[0] for figure in metrics}
    return all(
        one[name] == value
        for name, value in other.items()
        if name in one and (isinstance(value, bool) or (name in judged and value in (0, 1)))
    )


def _field(item: Item, figure: str) -> str:
    """What an item calls what the figure is made of; lm-eval's names end with their filter."""
    name = figure.partition(",")[0]
    own = FIELDS.get(name, name)
    return own if own in item else name


def _is_of(item: Item, figure: str) -> bool:
    """Whether an item went through the figure's filter; lm-eval's usual one is called none."""
    wanted = figure.partition(",")[2] or "none"
    return bool(item.get("filter", wanted) == wanted)


def _unpaired(
    figure: str, metric: Mapping[str, Any], other: Mapping[str, Any], items: int
) -> Interval:
    """Other minus ours of figures whose intervals know nothing of each other: conservative."""
    value = other["value"] - metric["value"]
    halves = [
        math.inf if side["low"] is None else (side["high"] - side["low"]) / 2
        for side in (metric, other)
    ]
    half = math.hypot(*halves)
    whole = statistics.narrowing(value, value - half, value + half, items, "intervals of both")
    return _relative(whole, figure, other)


def _relative(lost: Interval, figure: str, other: Mapping[str, Any]) -> Interval:
    """A loss in the unit in which drops are bounded, positive where the figure is worse."""
    sign = -1.0 if figure.partition(",")[0] in LOWER_IS_BETTER else 1.0
    unit = 1.0 if other["percent"] else abs(other["value"]) or 1.0
    return lost.mapped(lambda value: sign * value / unit)
