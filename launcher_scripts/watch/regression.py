"""Regressions in a series of evaluations, with a bounded probability of a false alarm.

Every checkpoint is compared over the same items with the baseline, with the last one that was GO,
and, for a decline that no single step shows, the mean over the last 2, 4 and 8 checkpoints with the
mean over as many before them. A regression passes two tests:

- There is a drop: the exact sign test of the items that became worse or better. The k-th evaluation
  of a series may use level * 6 / (pi * k)^2, split evenly over its comparisons. These sum to
  `level` however long the series is (Bonferroni), and however its checkpoints depend on each other.
- It matters: the mean drop is larger than `max_drop`, at `level` split over the comparisons of this
  evaluation. Drops of a few items weigh most in a mean, so it has little power at the level of the
  first test; that one bounds false alarms without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher_scripts.evaluation import comparison as paired
from launcher_scripts.evaluation.checks import TaskSection

WINDOWS = (2, 4, 8)
MAX_BEFORE = 2 * max(WINDOWS) - 1  # earlier checkpoints that any comparison needs
MIN_ITEMS = 30

# task -> its section of a report
Tasks = Mapping[str, TaskSection]
# index of an item -> value, the larger the better
Values = Mapping[object, float]


@dataclass(frozen=True)
class Regression:
    """A figure that dropped by more than it may.

    drop:    mean over the items: of a percentage in points, of a perplexity as a part of it, of
             another figure as a part of the earlier value
    p:       of the sign test
    level:   what p had to stay below
    against: what the checkpoint was compared with, in words
    """

    task: str
    figure: str
    against: str
    drop: float
    p: float
    level: float
    items: int

    def text(self) -> str:
        """One sentence for a person."""
        return (
            f"{self.task}'s {self.figure} dropped by {100 * self.drop:.2g} % against "
            f"{self.against} ({self.items} items, p {self.p:.1g}, level {self.level:.1g})"
        )


@dataclass(frozen=True)
class RegressionComparison:
    """Evaluations `recent` against `earlier`: each a report's tasks, oldest first."""

    against: str
    recent: Sequence[Tasks]
    earlier: Sequence[Tasks]


def comparisons(
    tasks: Tasks, before: Sequence[Tasks], references: Mapping[str, Tasks]
) -> list[RegressionComparison]:
    """The comparisons of a checkpoint.

    before:     the checkpoints of lower steps that are not NO-GO, oldest first
    references: baseline and last GO, by what they are called
    """
    series = [*before, tasks]
    windows = [
        RegressionComparison(
            f"the {size} checkpoints before", series[-size:], series[-2 * size : -size]
        )
        for size in WINDOWS
        if len(series) >= 2 * size
    ]
    return [
        *(
            RegressionComparison(name, [tasks], [reference])
            for name, reference in references.items()
        ),
        *windows,
    ]


def regressions(
    checked: Sequence[RegressionComparison], number: int, level: float, max_drop: float
) -> list[Regression]:
    """Return the figures that dropped, worst first.

    number: of this evaluation in the series, from 1
    level:  probability that a whole series without a drop has a regression here
    """
    pairs = [
        (comparison, task, metric, values)
        for comparison in checked
        for task, section in comparison.recent[-1].items()
        for metric in section.metrics
        if (values := _paired_values(comparison, task, metric)) is not None
    ]
    if not pairs:
        return []
    share = level * 6 / (math.pi * number) ** 2 / len(pairs)
    result = []
    for comparison, task, figure, (recent, earlier) in pairs:
        drops = [earlier[index] - recent[index] for index in recent]
        margin = _margin(comparison, task, figure, max_drop)
        if _mean_test(drops, margin) < level / len(pairs) and (p := _sign_test(drops)) < share:
            drop = _in_unit(comparison, task, figure, sum(drops) / len(drops))
            result.append(Regression(task, figure, comparison.against, drop, p, share, len(drops)))
    return sorted(result, key=lambda regression: regression.p)


def _paired_values(
    comparison: RegressionComparison, task: str, metric: str
) -> tuple[Values, Values] | None:
    """Means per item of both sides over the items that all evaluations have; None: too few."""
    sides = [
        [_values(tasks.get(task), metric) for tasks in evaluations]
        for evaluations in (comparison.recent, comparison.earlier)
    ]
    every = [values for side in sides for values in side]
    shared = set.intersection(*map(set, every)) if every else set()
    if len(shared) < MIN_ITEMS:
        return None
    recent, earlier = (
        {index: sum(values[index] for values in side) / len(side) for index in shared}
        for side in sides
    )
    return recent, earlier


def _values(section: TaskSection | None, metric: str) -> Values:
    """What a figure is made of, by item; {} if the figure is one of all items together."""
    if section is None or metric not in section.metrics:
        return {}
    values = paired.values(section.items, metric)
    if values is None or len(values) != len(section.items):
        return {}
    sign = -1.0 if _lower_is_better(metric) else 1.0
    return {
        _key(item["index"]): sign * value for item, value in zip(section.items, values, strict=True)
    }


def _key(index: object) -> object:
    return tuple(index) if isinstance(index, list) else index


def _lower_is_better(metric: str) -> bool:
    """True for an error rate; a perplexity is made of log-likelihoods, of which more is better."""
    return not paired.is_perplexity(metric) and metric.partition(",")[0] in paired.LOWER_IS_BETTER


def _margin(comparison: RegressionComparison, task: str, metric: str, max_drop: float) -> float:
    """max_drop in the unit of the items' values."""
    if paired.is_perplexity(metric):
        return math.log1p(max_drop)
    return max_drop * _unit(comparison, task, metric)


def _in_unit(comparison: RegressionComparison, task: str, metric: str, drop: float) -> float:
    if paired.is_perplexity(metric):
        return math.expm1(drop)
    return drop / _unit(comparison, task, metric)


def _unit(comparison: RegressionComparison, task: str, figure: str) -> float:
    metric = comparison.earlier[-1][task].metrics[figure]
    return 1.0 if metric["percent"] else abs(metric["value"]) or 1.0


def _sign_test(drops: Sequence[float]) -> float:
    """Exact p that no more items became worse than better; equal ones do not count."""
    worse, better = sum(drop > 0 for drop in drops), sum(drop < 0 for drop in drops)
    count = worse + better
    tail, ways = 0, 1  # of `count` items to choose k
    for k in range(count, worse - 1, -1):
        tail += ways
        ways = ways * k // (count - k + 1)
    return float(tail / 2**count)


def _mean_test(drops: Sequence[float], margin: float) -> float:
    """p that the mean drop is at most `margin`, by the normal distribution."""
    count = len(drops)
    mean = sum(drops) / count
    variance = sum((drop - mean) ** 2 for drop in drops) / (count - 1)
    if variance == 0:
        return 0.0 if mean > margin else 1.0
    return math.erfc((mean - margin) / math.sqrt(2 * variance / count)) / 2
