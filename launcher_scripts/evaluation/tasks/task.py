"""Tasks: questions to a served model, and metrics with confidence intervals.

95 % confidence intervals of what an evaluation counts, and how many items would be enough.

Right and wrong items are counted, so their intervals come from the binomial distribution; they hold
for few items and near 0 and 1 too. Other figures are means over items, whose intervals are made by
resampling. docs/evaluation.md says which one is used where.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.contract_tensors import States
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.tokenizer import SpecialIds, Tokenizer
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest

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

    def items_to_decide(self, limit: float, minimum: int = 1) -> int | None:
        """Return the number of items that leave `limit` outside the interval; None if no number
        does."""

        def decides(items: int) -> bool:
            low, high = self.grown(items)
            return not low < limit < high

        counts = range(max(self.items, minimum), _ENOUGH)
        index = bisect.bisect_left(counts, True, key=decides)
        return counts[index] if index < len(counts) else None


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
        inner, outside = value, float(side)
        for _ in range(60):
            middle = (inner + outside) / 2
            if abs(score(middle, n)) <= Z:
                inner = middle
            else:
                outside = middle
        return inner

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


REFERENCE_KEY = "evaluate.tasks.<task>.reference"


@dataclass(frozen=True)
class Metric:
    """One figure over all items, and the ends of its 95 % confidence interval.

    low, high: None when there are too few items to tell
    percent:   whether people read it as a percentage; `value` is a fraction all the same
    meaning:   one sentence
    """

    value: float
    low: float | None
    high: float | None
    percent: bool
    meaning: str


@dataclass(frozen=True)
class Speed:
    """Speed of the responses.

    requests: how many were answered, `batch_size` of them at a time
    seconds:  from the first request to the last answer; of an interrupted evaluation the sum over
              its runs, without what was not answered in any
    tokens:   generated in all, or read by an encoder; 0 where prompts were scored
    tokens_per_second: None without tokens
    """

    requests: int
    seconds: float
    tokens: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class Comparison:
    """A task's result beside the same one of a reference.

    source:     what the reference is
    metrics:    the reference's figures
    difference: figure -> the served model's value minus the reference's
    different:  indices of the items that were answered otherwise
    items:      what the reference made of those, by index
    pace:       how fast the reference answered, where that is known
    values:     the reference's own figures of every item, in the served items' order
    """

    source: str
    metrics: dict[str, Metric]
    difference: dict[str, float]
    different: list[int]
    items: dict[int, dict[str, Any]]
    pace: Speed | None = None
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskResult:
    """Results of a task: metrics by name, the items that they are made of, and its pace."""

    metrics: dict[str, Metric]
    items: list[dict[str, Any]]
    reference: Comparison | None = None
    pace: Speed | None = None


class TaskModel(Protocol):
    """The model that a task uses: clients/model_client.py's Client, or anything else with
    logits."""

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """The logits at every position of every row of token ids, [len(row), vocab] each."""
        ...

    def generate_rows(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """Iterate over the outputs of the rows, in order."""
        ...

    def hidden_states(
        self,
        rows: Iterable[GenerateRequest],  # noqa: ARG002
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[States]:
        """An encoder's states at every position of every row, in order.

        Raises ConfigError for a model that gives none.
        """
        message = f"{type(self).__name__} gives no states of its encoder"
        raise ConfigError(problem(message, change=REFERENCE_KEY))


class NoReferenceError(ConfigError):
    """No library computes the model, which is no fault of the checkpoint."""


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of one row of token ids, float32 [tokens, hidden].

    layers: stack (encoder, decoder) -> the input and the output of each layer
    source: the encoder's states as a decoder reads them; None without an encoder
    normed: behind the final norm, as the output projection reads them
    logits: [tokens, vocab]
    """

    layers: Mapping[str, Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]]
    source: NDArray[np.float32] | None
    normed: NDArray[np.float32]
    logits: NDArray[np.float32]


_EXACT = ("e_score_correction_bias",)  # weights that an export keeps as they are


class Reference(ABC):
    """A model that computes the logits of an original, in this process.

    name: of what, and of which files
    """

    name: str

    @abstractmethod
    def logits(self, ids: Sequence[int], decoder_ids: Sequence[int] = ()) -> NDArray[np.float32]:
        """float32 [tokens, vocab] at every position of the prompt, or of the decoder's."""

    def score(
        self,
        rows: Iterable[Sequence[int]],
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[NDArray[np.float32]]:
        """See Model.score."""
        return map(self.logits, rows)


class TorchReference(Reference):
    """A reference whose weights are those of a module of torch."""

    _torch: Any
    _model: Any

    def round_weights(self, data_type: str) -> None:
        """Give every weight the value that it has in files of `data_type`; one way."""
        dtype = {"fp16": self._torch.float16, "bf16": self._torch.bfloat16}.get(data_type)
        if dtype is not None:
            for name, weight in self._model.named_parameters():
                if not name.endswith(_EXACT):
                    weight.data.copy_(weight.data.to(dtype))


def reject_tuned(rows: Sequence[GenerateRequest], who: str, **features: bool) -> None:
    """Reject models with adapters: the served model cannot be compared with `who` then.

    features: what else of the rows it does not know
    """
    wrong = [name for name, is_used in features.items() if is_used]
    for name in ("prompt_task", "ia3_task", "lora_adapter"):
        wrong += [name] if any(getattr(row, name) is not None for row in rows) else []
    if wrong:
        message = f"{who} is not a reference for this"
        raise ConfigError(problem(message, got=wrong, change=REFERENCE_KEY))


# Called with the number of items done and the number of all.
ProgressCallback = Callable[[int, int], None]


# Asks for results from a number on, and goes on where an interrupted evaluation was.
Continue = Callable[[Callable[[int], Iterator[Any]]], Iterator[Any]]


def from_the_first(send: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """All results, of which none is there yet."""
    return send(0)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with what makes text of its tokens and tokens of text.

    folder:    of the tokenizer's files and, where it is the checkpoint's, of config.ini
    special:   what a model that was trained with them wants around every prompt
    continued: what a task asks its items through, as plain values in order, so that an interrupted
               evaluation goes on where it was
    """

    model: TaskModel
    tokenizer: Tokenizer
    folder: Path
    special: SpecialIds = field(default_factory=SpecialIds)
    continued: Continue = from_the_first

    def between(self, source: str | None, target: str | None) -> EvaluatedModel:
        """For prompts in one language and answers in another; None: as the checkpoint says.

        Raises ConfigError for a name that is not one of the model's languages.
        """
        languages = self._language("source", source), self._language("target", target)
        return replace(self, special=self.special.between(*languages))

    def _language(self, role: str, name: str | None) -> int | None:
        if name is None:
            return None
        result = self.special.language_id(name, self.tokenizer)
        if result is None:
            knows = "no languages" if self.special.language is None else "no such language"
            key = f"evaluate.tasks.<task>.generation.{role}_language"
            raise ConfigError(problem(f"the model knows {knows}", got=name, change=key))
        return result


Task = Callable[[TaskSettings, EvaluatedModel, ProgressCallback], TaskResult]


def fraction(flags: Sequence[bool], meaning: str) -> Metric:
    """The part of the items for which a flag holds, with Wilson's interval."""
    part = share(sum(map(bool, flags)), len(flags))
    return Metric(part.value, part.low, part.high, True, meaning)


def average(values: Sequence[float], percent: bool, meaning: str) -> Metric:
    """The mean over the items."""
    mean, half_width = mean_95(np.array(values, dtype=np.float64))
    if half_width is None:
        return Metric(mean, None, None, percent, meaning)
    return Metric(mean, mean - half_width, mean + half_width, percent, meaning)


def mean_95(values: NDArray[np.float64]) -> tuple[float, float | None]:
    """The mean and half its 95 % confidence interval: 1.96 standard errors (n - 1 degrees)."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, None
    return mean, Z * float(values.std(ddof=1)) / float(np.sqrt(len(values)))
