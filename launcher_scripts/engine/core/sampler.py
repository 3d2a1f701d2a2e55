"""Sampling on the device: logits are processed, tokens are sampled, log-probabilities are kept.

What a row's parameters do to its logits before a token is chosen, on the device.

kernels/reference_sampling.py says what biases, penalties, temperature, words and lengths do, and in
which order. Grammars forbid tokens after all. Here is what is made with a batch: grammars, lists
that are too long for a row's columns, and those of beam searches. All rows of a step are done at
once, without waiting.

From logits to tokens, every row by its own parameters, on the device and without waiting.

kernels/reference_sampling.py says how a token is chosen; sampler.py what is done to the
logits before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from launcher_scripts.contract.requests import ModelLogProbs
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Choice, RowStart
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference_sampling import (
    NEGATIVE_INFINITY,
    Biases,
    Words,
    forbid,
    penalize,
    temper,
)


@dataclass(frozen=True)
class TokenScores:
    """Scores of n tokens: the token itself in column 0, then the K most likely ones of its
    position.

    log_probs: float32 [n, 1 + K]
    ids:       int64 [n, 1 + K]; of the token itself its rank instead, 1 for the likeliest
    """

    log_probs: Tensor
    ids: Tensor

    def from_last_stage(self, communicator: Communicator) -> TokenScores:
        """Fill these with the last pipeline stage's, on every stage."""
        communicator.from_last_stage(self.log_probs)
        communicator.from_last_stage(self.ids)
        return self


def no_scores(tokens: int, count: int, device: torch.device) -> TokenScores:
    """Room for the scores of so many tokens, with the `count` likeliest ones of each place."""
    shape = (tokens, 1 + count)
    return TokenScores(
        torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int64, device=device)
    )


def scores_of(logits: Tensor, tokens: Tensor, count: int) -> TokenScores:
    """Scores of tokens int64 [n] by logits float32 [n, vocab]; 0 everywhere for negative tokens.

    Tokens that are equally likely share the better rank. A virtual token (a negative one) has no
    log-probability.
    """
    real = tokens >= 0
    token_logits = logits.gather(1, tokens.clamp(min=0)[:, None])
    rank = 1 + (logits > token_logits).sum(-1, keepdim=True)
    top, ids = logits.topk(count, dim=-1)
    log_probs = torch.cat([token_logits, top], 1) - logits.logsumexp(-1, keepdim=True)
    return TokenScores(
        torch.where(real[:, None], log_probs, 0.0),
        torch.where(real[:, None], torch.cat([rank, ids], 1), 0),
    )


def model_log_probs(scores: Sequence[TokenScores], count: int, start: int = 0) -> ModelLogProbs:
    """Scores on the host, one after the other from the token `start` on, each with the `count`
    likeliest of its place.
    """
    scores = scores or [no_scores(0, count, torch.device("cpu"))]
    log_probs = torch.cat([score.log_probs[:, : 1 + count] for score in scores])[start:]
    ids = torch.cat([score.ids[:, : 1 + count] for score in scores])[start:].int()
    return ModelLogProbs(log_probs[:, 0], ids[:, 0], ids[:, 1:], log_probs[:, 1:])


@dataclass(frozen=True)
class Processing:
    """Properties of a step's rows known on the host, so that only needed work is launched.

    slots:         [B]
    words, biases: those made with the batch
    listed:        whether any row has such lists in its columns
    guided:        indices into the batch of the rows that have masks, or None
    penalized, scaled, min_length: whether any row has a penalty; a temperature; a minimum length
    longest_ngram: the largest no_repeat_ngram_size; 0 where no row has one
    """

    slots: Tensor
    words: Words | None
    biases: Biases | None
    listed: bool
    guided: Tensor | None
    penalized: bool
    scaled: bool
    min_length: bool
    longest_ngram: int

    @property
    def has_rules(self) -> bool:
        """Return whether any row needs Ops.process."""
        return self.listed or self.penalized or self.forbids

    @property
    def forbids(self) -> bool:
        """Return whether a minimum length or n-grams may forbid tokens."""
        return self.min_length or self.longest_ngram > 0

    def biased(self, logits: Tensor) -> Tensor:
        """Logits float32 [B, vocab] with what is added to them."""
        return logits if self.biases is None else self.biases.added(logits)

    def within_lists(self, scores: Tensor, states: RowStates, history: Tensor) -> Tensor:
        """Scores [B, vocab], -inf at what grammars and bad words forbid.

        history: [cache tokens], the ids in the cache
        """
        if self.guided is not None:
            masks = states.masks[self.slots[self.guided]]
            masked = _within(scores[self.guided], masks)
            scores = scores.index_copy(0, self.guided, masked)
        if self.words is not None:
            scores = self.words.forbid(scores, self.slots, states, history)
        return scores

    def scores(self, logits: Tensor, states: RowStates, history: Tensor, longest: int) -> Tensor:
        """Logits float32 [B, vocab] after bias, penalties and temperature.

        history: [cache tokens], the ids in the cache; row b's are the states' length[b] from
        start[b] on, at most `longest`.
        """
        logits = self.biased(logits)
        if self.penalized:
            logits = penalize(logits, self.slots, states, history, longest)
        return temper(logits, self.slots, states) if self.scaled else logits

    def allowed(self, scores: Tensor, states: RowStates, history: Tensor, longest: int) -> Tensor:
        """Scores [B, vocab] with -inf at the tokens that may not come; see `scores`."""
        scores = self.within_lists(scores, states, history)
        if self.forbids:
            size = self.longest_ngram
            scores = forbid(scores, self.slots, states, history, longest, size)
        return scores


def processing(
    rows: Sequence[RowStart], device: torch.device, *, searches: bool = False
) -> Processing:
    """Look at the rows' parameters once, when the batch's composition changes.

    searches: whether the rows are hypotheses of beam searches
    """
    parameters = [row.request.sampling for row in rows]
    guided = [at for at, row in enumerate(rows) if row.guided]
    in_columns = [not searches and row.fits_columns for row in rows]
    changes = [
        ((), ()) if in_column else (row.request.bad_words, row.request.logit_bias)
        for row, in_column in zip(rows, in_columns, strict=True)
    ]
    return Processing(
        slots=indices([row.slot for row in rows], device),
        words=words_of([words for words, _ in changes], device),
        biases=_biases_of([biases for _, biases in changes], device),
        listed=any(
            in_column and (row.request.bad_words or row.request.logit_bias)
            for row, in_column in zip(rows, in_columns, strict=True)
        ),
        guided=indices(guided, device) if guided else None,
        penalized=any(p.penalizes for p in parameters),
        scaled=any(p.temperature != 1 for p in parameters),
        min_length=any(p.min_length > 0 for p in parameters),
        longest_ngram=max((p.no_repeat_ngram_size for p in parameters), default=0),
    )


def words_of(rows: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> Words | None:
    """The words of every row of a batch on the device; None where there are none."""
    entries = [(index, word) for index, words in enumerate(rows) for word in words]
    if not entries:
        return None
    longest = max(len(word) - 1 for _, word in entries)
    prefixes = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for _, word in entries]
    return Words(
        rows=indices([index for index, _ in entries], device),
        last=indices([word[-1] for _, word in entries], device),
        prefix=torch.tensor(prefixes, dtype=torch.int64).view(len(entries), longest).to(device),
        length=indices([len(word) for _, word in entries], device),
    )


def _biases_of(rows: Sequence[Sequence[tuple[int, float]]], device: torch.device) -> Biases | None:
    """The biases of every row of a batch on the device; None where there are none."""
    entries = [(index, *bias) for index, biases in enumerate(rows) for bias in biases]
    if not entries:
        return None
    at, ids, values = zip(*entries, strict=True)
    added = torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
    return Biases(indices(at, device), indices(ids, device), added)


def _within(scores: Tensor, masks: Tensor) -> Tensor:
    """Scores [R, vocab], -inf where the id's bit of masks int32 [R, words] is 0."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device)) & 1
    allowed = bits.view(masks.shape[0], -1)[:, : scores.shape[1]].bool()
    return scores.masked_fill(~allowed, NEGATIVE_INFINITY)


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
    lower: Choice = Choice.GREEDY

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
        """Return the choice for the batch: work that one of the rows needs is done for all."""
        return max((self.lower, *(row.choice for row in self.rows)))

    @cached_property
    def processing(self) -> Processing:
        """Return the parameters of the rows that an eager choice needs."""
        return processing(self.rows, self.device)

    @cached_property
    def scored(self) -> ScoredRows | None:
        """The rows that want the model's log-probabilities; None where no row does."""
        counts = [row.request.num_log_probs for row in self.rows]
        counts_by_row = {at: count for at, count in enumerate(counts) if count >= 0}
        if not counts_by_row:
            return None
        return ScoredRows(
            tuple(counts_by_row),
            indices(list(counts_by_row), self.device),
            max(counts_by_row.values()),
        )

    @property
    def scored_rows(self) -> tuple[int, ...]:
        """Indices of the rows in the batch that need the model's log-probabilities."""
        return () if self.choice != Choice.EAGER or self.scored is None else self.scored.rows

    @property
    def wants_log_probs(self) -> bool:
        """Return whether any row wants those of its tokens."""
        return any(row.request.return_log_probs for row in self.rows)

    def requested(self, sampled: Sampled) -> Sampled:
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
        """The tensors that are not None."""
        columns = [self.tokens, *([] if self.log_probs is None else [self.log_probs])]
        return (
            columns if self.scores is None else [*columns, self.scores.log_probs, self.scores.ids]
        )

    def copy(self, rows: int) -> Sampled:
        """Copy the first rows into memory that no later step writes to."""
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
