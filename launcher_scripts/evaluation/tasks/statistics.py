"""95 % confidence intervals of what an evaluation counts, and how many items would be enough.

Right and wrong items are counted, so their intervals come from the binomial distribution; they hold
for few items and near 0 and 1 too. Other figures are means over items, whose intervals are made by
resampling. docs/evaluation.md says which one is used where.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Z = NormalDist().inv_cdf(0.975)  # a normal variable is within so many deviations 95 % of the time
RESAMPLES = 10_000
SEED = 0
# The methods for items that are right or wrong, which hold for few items too.
COUNTED = WILSON, TANGO = ("Wilson", "Tango")
_BLOCK = 2_000_000  # random indices at once
# More items than any data set has.
_ENOUGH = 10**9

Ends = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A figure over `items` items with its 95 % confidence interval.

    method: how the interval was made
    grown:  the ends that n items would give if they were like these
    """

    value: float
    low: float
    high: float
    items: int
    method: str
    grown: Callable[[int], Ends] = field(compare=False, repr=False)

    def mapped(self, change: Callable[[float], float]) -> Interval:
        """The same of a function of the figure that grows or falls everywhere."""

        def ends(both: Ends) -> Ends:
            first, second = change(both[0]), change(both[1])
            return min(first, second), max(first, second)

        low, high = ends((self.low, self.high))
        value = change(self.value)
        return replace(self, value=value, low=low, high=high, grown=lambda n: ends(self.grown(n)))

    def items_to_decide(self, limit: float, least: int = 1) -> int | None:
        """How many items leave `limit` outside the interval; None: no number of them."""

        def decides(items: int) -> bool:
            low, high = self.grown(items)
            return not low < limit < high

        counts = range(max(self.items, least), _ENOUGH)
        place = bisect.bisect_left(counts, True, key=decides)
        return counts[place] if place < len(counts) else None


def share(successes: int, items: int) -> Interval:
    """Part of the items. Wilson, "Probable Inference", J. Am. Stat. Assoc. 22 (1927), 209-212."""
    value = successes / items

    def ends(n: int) -> Ends:
        middle, spread = value + Z**2 / (2 * n), value * (1 - value) / n + Z**2 / (4 * n**2)
        half, scale = Z * math.sqrt(spread), 1 + Z**2 / n
        return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)

    return Interval(value, *ends(items), items, WILSON, ends)


def paired_share(only_first: int, only_second: int, items: int) -> Interval:
    """Share of the first minus that of the second, over the same items.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design", Statistics in Medicine 17 (1998), 891-908: the differences that his score
    test does not reject. At a difference of zero that test is McNemar's.

    only_first, only_second: items that only the one answered rightly
    """
    first, second = only_first / items, only_second / items
    value = first - second

    def score(difference: float, n: int) -> float:
        b = -(first + second) + (2 - value) * difference
        c = -second * difference * (1 - difference)
        # The likeliest share of only_second where the shares differ by `difference`.
        nuisance = (math.sqrt(max(0.0, b * b - 8 * c)) - b) / 4
        variance = (2 * nuisance + difference * (1 - difference)) / n
        excess = value - difference
        if variance <= 0:
            return math.copysign(math.inf, excess) if excess else 0.0
        return excess / math.sqrt(variance)

    def end(side: int, n: int) -> float:
        inside, outside = value, float(side)
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(score(middle, n)) <= Z:
                inside = middle
            else:
                outside = middle
        return inside

    def ends(n: int) -> Ends:
        return end(-1, n), end(1, n)

    return Interval(value, *ends(items), items, TANGO, ends)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: that both are right equally often.

    McNemar, "Note on the sampling error of the difference between correlated proportions or
    percentages", Psychometrika 12 (1947), 153-157, by the binomial distribution.
    """
    both, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(both, count) for count in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**both))


def mean(values: Sequence[float]) -> Interval:
    """Mean over items, by the bias-corrected and accelerated bootstrap (BCa) with a fixed seed.

    Efron, "Better Bootstrap Confidence Intervals", J. Am. Stat. Assoc. 82 (1987), 171-185.
    """
    of_items = np.asarray(values, dtype=np.float64)
    value = float(of_items.mean())
    low, high = _bca(of_items) if float(np.ptp(of_items)) > 0 else (value, value)
    return narrowing(value, low, high, len(of_items), "bootstrap (BCa)")


def narrowing(value: float, low: float, high: float, items: int, method: str) -> Interval:
    """An interval whose ends approach its value with the root of the number of items."""

    def ends(n: int) -> Ends:
        narrower = math.sqrt(items / n)
        return value - (value - low) * narrower, value + (high - value) * narrower

    return Interval(value, low, high, items, method, ends)


def _bca(values: NDArray[np.float64]) -> Ends:
    """The interval of the mean of values that are not all the same."""
    normal, items = NormalDist(), len(values)
    means = np.sort(_resampled_means(values))
    middle = float(values.mean())
    # Half of the resamples that give the very same mean count as below it.
    below = (np.count_nonzero(means < middle) + np.count_nonzero(means <= middle)) / 2
    bias = normal.inv_cdf(min(max(below / RESAMPLES, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    left_out = middle - values  # of the jackknife, up to a factor that cancels
    cubes, squares = float((-(left_out**3)).sum()), float((left_out**2).sum())
    acceleration = cubes / (6 * squares**1.5) if items > 1 else 0.0

    def quantile(z: float) -> float:
        moved = bias + (bias + z) / (1 - acceleration * (bias + z))
        return float(np.quantile(means, normal.cdf(moved)))

    return quantile(-Z), quantile(Z)


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The means of RESAMPLES draws of as many items with replacement."""
    random, items = np.random.default_rng(SEED), len(values)
    rows = max(1, _BLOCK // items)
    blocks = [
        values[random.integers(0, items, size=(min(rows, RESAMPLES - start), items))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(blocks)
