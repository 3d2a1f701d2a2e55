"""How fast a task's answers came, beside how good they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.evaluation.tasks.task import Model, Pace, States

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
