"""From logits to tokens, every row by its own parameters, on the device and without waiting.

kernels/reference_sampling.py says how a token is chosen; logit_processing.py what is done to the
logits before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import TokenScores, scores_of
from launcher_scripts.engine.core.logit_processing import Processing, indices, processing
from launcher_scripts.engine.core.plan import Choice, RowStart
from launcher_scripts.engine.core.row_state import RowStates
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
    """What is known on the host about the rows of a step, so that only needed work is launched.

    log_probs: whether any row wants those of its tokens
    """

    processing: Processing
    choice: Choice
    log_probs: bool
    scored: ScoredRows | None

    @property
    def slots(self) -> Tensor:
        """[B]"""
        return self.processing.slots

    @property
    def scored_rows(self) -> tuple[int, ...]:
        """Which rows of the batch want the model's log-probabilities."""
        return () if self.scored is None else self.scored.rows

    def wanted(self, sampled: Sampled) -> Sampled:
        """Without the log-probabilities of tokens, where no row wants them."""
        return sampled if self.log_probs else replace(sampled, log_probs=None)


@dataclass(frozen=True)
class Sampled:
    """tokens: int64 [B];  log_probs: float32 [2, B] or None, see reference_sampling.sample.

    scores are those of the batch's scored rows.
    """

    tokens: Tensor
    log_probs: Tensor | None = None
    scores: TokenScores | None = None


def sampling_batch(rows: Sequence[RowStart], device: torch.device) -> SamplingBatch:
    """Look at the rows' parameters once, when the batch's composition changes."""
    parameters = [row.request.sampling for row in rows]
    changes = processing(rows, device)
    log_probs = any(row.request.return_log_probs for row in rows)
    scored = _scored_rows(rows, device)
    choice = Choice.GREEDY
    if changes.has_lists or scored:
        choice = Choice.EAGER
    elif changes.has_rules:
        choice = Choice.PROCESSED
    elif log_probs or any(p.top_k > 1 or (p.top_k == 0 and p.top_p > 0) for p in parameters):
        choice = Choice.SAMPLED
    return SamplingBatch(changes, choice, log_probs, scored)


def _scored_rows(rows: Sequence[RowStart], device: torch.device) -> ScoredRows | None:
    counts = [row.request.num_log_probs for row in rows]
    asked = {at: count for at, count in enumerate(counts) if count >= 0}
    if not asked:
        return None
    return ScoredRows(tuple(asked), indices(list(asked), device), max(asked.values()))


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
