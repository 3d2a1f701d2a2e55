"""Continuations of a sequence: hypotheses of a beam search, and drafts from its own text.

The hypotheses of one beam search on the host: those that go on, those that have ended.

As in transformers with early_stopping=True, which is what FasterTransformer does for T5: a
continuation that ends among the W best of its step becomes an ended hypothesis, the search is over
when there are W of them or at the length asked for, and the best by cumulative log-probability over
length^len_penalty are the answer.

What followed the last tokens the last time they came: drafts of the next ones.

Prompt lookup decoding (Saxena 2023): answers often repeat parts of their prompts, or of themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from launcher_scripts.contract.requests import Beam
from launcher_scripts.engine.core.results import Candidate

LOOKUP_WINDOW = 64


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A text by its last token and the hypothesis it continues.

    total: cumulative log-probability;  score: what ended hypotheses are compared by
    """

    parent: Hypothesis | None
    token: int
    log_prob: float
    total: float
    score: float

    def beam(self, *, log_probs: bool) -> Beam:
        """The whole text, its log-probabilities if asked."""
        chain = []
        last: Hypothesis | None = self
        while last is not None:
            chain.append(last)
            last = last.parent
        chain.reverse()
        return Beam(
            tuple(item.token for item in chain),
            self.total if log_probs else None,
            tuple(item.log_prob for item in chain) if log_probs else (),
        )


class Hypotheses:
    """A search of `width` hypotheses over at most `output_len` tokens.

    length: tokens so far
    shared: how many first tokens all have in common that go on, so far as LOOK_BACK shows it
    """

    def __init__(self, width: int, len_penalty: float, output_len: int) -> None:
        self._width = width
        self._len_penalty = len_penalty
        self._output_len = output_len
        self.length = 0
        self._running: list[Hypothesis | None] = [None] * width
        self._completed: list[Hypothesis] = []
        self.shared = 0

    @property
    def finished(self) -> bool:
        return len(self._completed) >= self._width or self.length >= self._output_len

    def take(self, candidates: Sequence[Candidate]) -> None:
        """Add a step's ranking, best first; the device lets the same ones go on."""
        self.length += 1
        norm = float(self.length) ** self._len_penalty
        last = self.length >= self._output_len
        grown = [
            Hypothesis(
                self._running[candidate.parent],
                candidate.token,
                candidate.log_prob,
                candidate.total,
                (candidate.ranking if candidate.ends else candidate.total) / norm,
            )
            for candidate in candidates
        ]
        for hypothesis, item in zip(grown[: self._width], candidates, strict=False):
            if last or (item.ends and math.isfinite(item.total)):
                self._completed.append(hypothesis)
        self._completed = _best(self._completed, self._width)
        pairs = sorted(zip(candidates, grown, strict=True), key=lambda pair: pair[0].ends)
        self._running = [hypothesis for _, hypothesis in pairs[: self._width]]
        self._find_shared()

    def _find_shared(self) -> None:
        """Go back from the last tokens to the one that all descend from."""
        last = set(self._running)
        for back in range(min(LOOKUP_WINDOW, self.length - self.shared)):
            if len(last) == 1:
                self.shared = self.length - back
                return
            last = {parent and parent.parent for parent in last}

    def best(self) -> list[Hypothesis]:
        """The W best so far, best first: ended ones, and until the end those that go on."""
        if self.finished:
            return self._completed
        running = [hypothesis for hypothesis in self._running if hypothesis is not None]
        return _best([*self._completed, *running], self._width)


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    """Return the best hypotheses, of equal ones the earlier."""
    return sorted(hypotheses, key=lambda item: -item.score)[:count]


NGRAMS = (3, 2)  # lengths of the texts that are looked for, the longest first


class PromptLookup:
    """The ids of one row, and what came after each run of a few of them."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        """The row goes on with `ids`."""
        for token in ids:
            index = len(self._ids)
            for size in NGRAMS:
                if index >= size:
                    self._following[tuple(self._ids[-size:])] = index
            self._ids.append(token)

    def draft(self, maximum: int, minimum: int = 0) -> tuple[int, ...]:
        """Tokens that may come next, no more than `maximum`; none where nothing is known.

        minimum: number of last tokens that must have come before, if more than those of NGRAMS
        """
        for size in NGRAMS:
            index = self._following.get(tuple(self._ids[-size:]))
            if index is not None:
                if minimum and self._ids[max(index - minimum, 0) : index] != self._ids[-minimum:]:
                    return ()
                draft = self._ids[index : index + maximum]
                return tuple(takewhile(lambda token: token >= 0, draft))  # virtual ones are below
        return ()
