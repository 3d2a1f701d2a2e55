"""From logits to tokens, every row by its own parameters, on the device and without waiting.

kernels/reference_sampling.py says how a token is chosen; logit_processing.py what is done to the
logits before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import TokenScores, scores_of
from launcher_scripts.engine.core.logit_processing import Processing, processing
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.messages.plan import Choice, RowStart
from launcher_scripts.kernels.ops import Ops


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a batch that want the model's log-probabilities.

    rows, at: their indices into the batch, on the host and on the device
    count:    of how many of the likeliest tokens, the most that any of them wants
    """

    rows: tuple[int, ...]
    at: Tensor
    count: int


@dataclass(frozen=True)
class SamplingBatch:
    """The rows of a step, of which the host looks at what a step needs, once.

    device: where the tensors are made
    least:  the simplest way of choosing that is used, whatever the rows need
    """

    rows: Sequence[RowStart]
    device: torch.device
    least: Choice = Choice.GREEDY

    @cached_property
    def slots(self) -> Tensor:
        """[B]"""
        return self.host_slots.to(self.device, non_blocking=True)

    @cached_property
    def host_slots(self) -> Tensor:
        """[B], on the host."""
        return torch.tensor([row.slot for row in self.rows])

    @cached_property
    def choice(self) -> Choice:
        """What one of the rows needs is done for all."""
        return max((self.least, *(row.choice for row in self.rows)))

    @cached_property
    def processing(self) -> Processing:
        """What an eager choice needs to know of the rows' parameters."""
        return processing(self.rows, self.device)

    @cached_property
    def scored(self) -> ScoredRows | None:
        """The rows that want the model's log-probabilities; None where no row does."""
        counts = [row.request.num_log_probs for row in self.rows]
        asked = {at: count for at, count in enumerate(counts) if count >= 0}
        if not asked:
            return None
        return ScoredRows(tuple(asked), indices(list(asked), self.device), max(asked.values()))

    @property
    def scored_rows(self) -> tuple[int, ...]:
        """Which rows of the batch want the model's log-probabilities."""
        return () if self.choice != Choice.EAGER or self.scored is None else self.scored.rows

    @property
    def wants_log_probs(self) -> bool:
        """Whether any row wants those of its tokens."""
        return any(row.request.return_log_probs for row in self.rows)

    def wanted(self, sampled: Sampled) -> Sampled:
        """Without the log-probabilities of tokens, where no row wants them."""
        if sampled.log_probs is None or self.wants_log_probs:
            return sampled
        return replace(sampled, log_probs=None)


@dataclass(frozen=True)
class Sampled:
    """tokens: int64 [B];  log_probs: float32 [2, B] or None, see reference_sampling.sample.

    scores are those of the batch's scored rows. arrives: whether the step that has chosen the
    tokens has written them into the host's memory, too.
    """

    tokens: Tensor
    log_probs: Tensor | None = None
    scores: TokenScores | None = None
    arrives: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        own = [self.tokens, *([] if self.log_probs is None else [self.log_probs])]
        return own if self.scores is None else [*own, self.scores.log_probs, self.scores.ids]

    def copy(self, rows: int) -> Sampled:
        """Of the first rows, in memory that no later step writes to."""
        log_probs = None if self.log_probs is None else self.log_probs[:, :rows].clone()
        return Sampled(self.tokens[:rows].clone(), log_probs, self.scores)


def sample(
    logits: Tensor, batch: SamplingBatch, states: RowStates, history: Tensor, kernels: Ops
) -> Sampled:
    """Choose one token per row from logits float32 [B, vocab], which may be overwritten.

    history: [cache tokens], the ids in the cache; row b's are the states' length[b] from start[b]
    on.
    """
    slots, changes, scored = batch.slots, batch.processing, batch.scored
    unmodified = None if scored is None else logits[scored.at]
    logits = changes.biased(logits)
    if changes.has_rules:
        logits = kernels.process(logits, slots, states, history)
    logits = changes.within_lists(logits, states, history)
    tokens, log_probs = kernels.sample(logits, slots, states)
    scores = None
    if scored is not None and unmodified is not None:
        scores = scores_of(unmodified, tokens[scored.at], scored.count)
    return Sampled(tokens, log_probs, scores)
