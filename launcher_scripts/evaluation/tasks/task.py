"""What a task is: a question asked of a served model, and figures with their certainty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.tokenizer import SpecialIds, Tokenizer
from launcher_scripts.config.tasks import TaskSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.served.tensors import States
from launcher_scripts.evaluation.tasks.statistics import Z, share

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
class Pace:
    """How fast answers came.

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
    pace: Pace | None = None
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskResult:
    """What a task measured: figures by name, per item what they were made of, and its pace."""

    metrics: dict[str, Metric]
    items: list[dict[str, Any]]
    reference: Comparison | None = None
    pace: Pace | None = None


class Model(Protocol):
    """What a task may ask: evaluation/served/client.py's Client, or anything else with logits."""

    def score(
        self, rows: Iterable[Sequence[int]], in_flight: int = 8
    ) -> Iterator[NDArray[np.float32]]:
        """The logits at every position of every row of token ids, [len(row), vocab] each."""
        ...

    def generate_each(
        self, rows: Iterable[GenerateRequest], in_flight: int = 8
    ) -> Iterator[GenerateOutput]:
        """What every row became, in order."""
        ...

    def hidden_states(
        self,
        rows: Iterable[GenerateRequest],  # noqa: ARG002
        in_flight: int = 8,  # noqa: ARG002
    ) -> Iterator[States]:
        """An encoder's states at every position of every row, in order.

        Raises ConfigError for a model that gives none.
        """
        what = f"{type(self).__name__} gives no states of its encoder"
        raise ConfigError(problem(what, change=REFERENCE_KEY))


class NoReferenceError(ConfigError):
    """No library computes the model, which is no fault of the checkpoint."""


class Reference(ABC):
    """What computes the logits of an original, in this process.

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


def refuse_tuned(rows: Sequence[GenerateRequest], who: str, **asked: bool) -> None:
    """What only the served model knows cannot be compared with what `who` answers.

    asked: what else of the rows it does not know
    """
    wrong = [name for name, there in asked.items() if there]
    for name in ("prompt_task", "ia3_task", "lora_adapter"):
        wrong += [name] if any(getattr(row, name) is not None for row in rows) else []
    if wrong:
        what = f"{who} is not a reference for this"
        raise ConfigError(problem(what, got=wrong, change=REFERENCE_KEY))


# Called with the number of items done and the number of all.
ProgressCallback = Callable[[int, int], None]


# Asks for results from a number on, and goes on where an interrupted evaluation was.
Continue = Callable[[Callable[[int], Iterator[Any]]], Iterator[Any]]


def from_the_first(ask: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """All results, of which none is there yet."""
    return ask(0)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with what makes text of its tokens and tokens of text.

    folder:    of the tokenizer's files and, where it is the checkpoint's, of config.ini
    special:   what a model that was trained with them wants around every prompt
    continued: what a task asks its items through, as plain values in order, so that an interrupted
               evaluation goes on where it was
    """

    model: Model
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
