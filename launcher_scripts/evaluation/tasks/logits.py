"""Two models' logits at the same positions: how far apart they are, and in which way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class RowComparison:
    """One row of token ids; arrays have one value per position, [S].

    kl:       Kullback-Leibler divergence of the served from the reference's probabilities, in nats
    same:     whether the likeliest token is the same one
    chosen:   the reference's likeliest token
    served, reference: log-probability of the token that comes next, [S - 1], in nats
    rr, rs, ss: sums over the vocabulary of the products of the reference's (r) and the served (s)
              logits, each less its mean: a number added to all logits of a position means nothing
    """

    kl: Floats
    same: NDArray[np.bool_]
    chosen: NDArray[np.int64]
    served: Floats
    reference: Floats
    rr: Floats
    rs: Floats
    ss: Floats

    @property
    def log_likelihood(self) -> float:
        return float(self.served.sum())

    @property
    def reference_log_likelihood(self) -> float:
        return float(self.reference.sum())

    @property
    def first_divergence(self) -> int | None:
        """The first position at which another token is the likeliest; None: nowhere."""
        positions = np.flatnonzero(~self.same)
        return int(positions[0]) if len(positions) else None

    def plain(self) -> dict[str, list[Any]]:
        """As values of JSON."""
        return {item.name: getattr(self, item.name).tolist() for item in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Sequence[Any]]) -> RowComparison:
        """Restore a comparison from the output of `plain`."""
        types: dict[str, Any] = {"same": np.bool_, "chosen": np.int64}
        arrays: dict[str, Any] = {
            name: np.array(column, types.get(name, np.float64)) for name, column in values.items()
        }
        return cls(**arrays)

    def part(self, first: int, stop: int) -> RowComparison:
        """The positions from `first` up to `stop`, which is not among them."""
        next_ones = slice(first, max(first, stop - 1))
        return RowComparison(
            self.kl[first:stop],
            self.same[first:stop],
            self.chosen[first:stop],
            self.served[next_ones],
            self.reference[next_ones],
            self.rr[first:stop],
            self.rs[first:stop],
            self.ss[first:stop],
        )


@dataclass(frozen=True)
class Fit:
    """The fit of the served logits to the reference's over some positions.

    error:    root mean square of their difference over that of the reference's logits
    scale:    the factor of the reference's logits that comes nearest to the served ones
    residual: what is left beside that factor, over the root mean square of the served logits
    """

    error: float
    scale: float
    residual: float


def compare_logits(
    ids: Sequence[int], served: NDArray[np.float32], reference: NDArray[np.float32]
) -> RowComparison:
    """Compare the logits [S, vocab] of both models at every position of `ids` [S].

    Columns that one of them alone has are padding of its vocabulary and do not count.
    """
    width = min(served.shape[-1], reference.shape[-1])
    served_logits = np.asarray(served[:, :width], dtype=np.float64)
    reference_logits = np.asarray(reference[:, :width], dtype=np.float64)
    best, same = (
        reference_logits.argmax(axis=-1),
        served_logits.argmax(axis=-1) == reference_logits.argmax(axis=-1),
    )
    p, q = _log_softmax(reference_logits), _log_softmax(served_logits)
    kl = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    reference_logits = reference_logits - reference_logits.mean(axis=-1, keepdims=True)
    served_logits = served_logits - served_logits.mean(axis=-1, keepdims=True)
    return RowComparison(
        kl,
        same,
        best,
        _of_next(ids, q),
        _of_next(ids, p),
        (reference_logits * reference_logits).sum(axis=-1),
        (reference_logits * served_logits).sum(axis=-1),
        (served_logits * served_logits).sum(axis=-1),
    )


def next_log_probs(ids: Sequence[int], logits: NDArray[np.float32]) -> Floats:
    """The log-probability, in nats, of every token but the first, [S - 1]; logits: [S, vocab]"""
    return _of_next(ids, _log_softmax(np.asarray(logits, dtype=np.float64)))


def _of_next(ids: Sequence[int], log_probs: Floats) -> Floats:
    targets = np.asarray(ids[1:], dtype=np.int64)
    return np.asarray(log_probs[np.arange(len(targets)), targets])


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def fit(rows: Iterable[RowComparison]) -> Fit:
    """Over all positions of the rows; at least one position."""
    sums = np.array([(row.rr.sum(), row.rs.sum(), row.ss.sum()) for row in rows])
    rr, rs, ss = (float(value) for value in sums.sum(axis=0))
    rr, ss = max(rr, _TINY), max(ss, _TINY)
    return Fit(
        error=float(np.sqrt(max(ss - 2 * rs + rr, 0.0) / rr)),
        scale=rs / rr,
        residual=float(np.sqrt(max(ss - rs * rs / rr, 0.0) / ss)),
    )


def buckets(length: int) -> list[tuple[int, int]]:
    """Position ranges [first, stop) that double: 0, 1, 2-3, 4-7, ... up to `length`.

    >>> buckets(6)
    [(0, 1), (1, 2), (2, 4), (4, 6)]
    """
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class PositionRange:
    """The positions from `first` to `last` of all rows: mean kl and top1, and Fit.error."""

    first: int
    last: int
    kl: float
    top1: float
    error: float


def by_position(rows: Sequence[RowComparison]) -> list[PositionRange]:
    """Test if the difference grows along the rows; at least one row."""
    result = []
    for first, stop in buckets(max(len(row.kl) for row in rows)):
        part = [row.part(first, stop) for row in rows if len(row.kl) > first]
        kl = np.concatenate([row.kl for row in part])
        same = np.concatenate([row.same for row in part])
        result.append(
            PositionRange(first, stop - 1, float(kl.mean()), float(same.mean()), fit(part).error)
        )
    return result


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests of the mean difference of log-probabilities (Schuirmann, "A comparison of
    the two one-sided tests procedure ...", J. Pharmacokinet. Biopharm. 15 (1987), 657-680).

    Positions are paired, and clustered by text: the standard error is that of a ratio of sums over
    texts (CR1), with as many degrees of freedom as texts less one.

    margin:     nats a token;  alpha: the level of either test
    mean:       served less reference, over all positions
    low, high:  the interval of 1 - 2 alpha; inside of the margin exactly if p <= alpha
    p_below, p_above: of the hypotheses that the difference is <= -margin, and >= margin
    """

    margin: float
    alpha: float
    texts: int
    positions: int
    mean: float
    standard_error: float | None
    low: float | None
    high: float | None
    p_below: float
    p_above: float

    @property
    def p(self) -> float:
        return max(self.p_below, self.p_above)

    @property
    def equivalent(self) -> bool:
        return self.p <= self.alpha

    @property
    def different(self) -> bool:
        """Return whether the whole interval is outside of the margin."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.margin or self.high < -self.margin


def equivalence(rows: Sequence[RowComparison], margin: float, alpha: float = 0.05) -> Equivalence:
    """Test the rows, one a text; texts of a single token have no position."""
    sums = [(float((row.served - row.reference).sum()), len(row.served)) for row in rows]
    sums = [pair for pair in sums if pair[1]]
    texts, positions = len(sums), sum(count for _, count in sums)
    mean = sum(total for total, _ in sums) / positions if positions else 0.0
    if texts < 2:
        return Equivalence(margin, alpha, texts, positions, mean, None, None, None, 1.0, 1.0)
    squares = sum((total - count * mean) ** 2 for total, count in sums)
    error = math.sqrt(texts / (texts - 1) * squares) / positions
    free = texts - 1
    below, above = (
        student_tail((margin + side * mean) / error, free)
        if error > 0
        else float(abs(mean) >= margin)
        for side in (1, -1)
    )
    half = student_quantile(alpha, free) * error
    return Equivalence(
        margin, alpha, texts, positions, mean, error, mean - half, mean + half, below, above
    )


def design_effect(values: Sequence[Floats]) -> float:
    """The factor by which clustering widens the variance of a mean over positions; 1 or more.

    values: each text's positions
    """
    values = [row for row in values if len(row)]
    every = np.concatenate(values)
    variance = float(every.var(ddof=1)) if len(every) > 1 else 0.0
    if len(values) < 2 or variance <= 0:
        return 1.0
    mean, count = float(every.mean()), len(values)
    squares = sum(float((row - mean).sum()) ** 2 for row in values)
    clustered = count / (count - 1) * squares / len(every) ** 2
    return max(1.0, clustered * len(every) / variance)


def student_tail(t: float, free: float) -> float:
    """The probability that Student's t with `free` degrees of freedom exceeds t."""
    half = 0.5 * _beta_part(free / (free + t * t), free / 2, 0.5)
    return half if t >= 0 else 1 - half


def student_quantile(tail: float, free: float) -> float:
    """The t >= 0 that Student's t exceeds with probability `tail` <= 0.5."""
    low, high = 0.0, 1.0
    while student_tail(high, free) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, free) > tail else (low, middle)
    return high


def _beta_part(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by Lentz's continued fraction (Numerical Recipes,
    6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_part(1 - x, b, a)
    scale = a * math.log(x) + b * math.log1p(-x)
    scale += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), _TINY)
    result = d
    for m in range(1, 500):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + factor * d)
            c = 1 + factor / c
            result *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return math.exp(scale) * result / a
