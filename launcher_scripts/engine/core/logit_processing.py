"""What a row's parameters do to its logits before a token is chosen, on the device.

kernels/reference_sampling.py says what biases, penalties, temperature, words and lengths do, and in
which order. Grammars forbid tokens after all. Here is what is made with a batch: grammars, lists
that are too long for a row's columns, and those of beam searches. All rows of a step are done at
once, without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.messages.plan import RowStart
from launcher_scripts.kernels.reference_sampling import (
    NEGATIVE_INFINITY,
    Biases,
    Words,
    forbid,
    penalize,
    temper,
)


@dataclass(frozen=True)
class Processing:
    """What is known on the host about the rows of a step, so that only needed work is launched.

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
        """Whether any row needs Ops.process."""
        return self.listed or self.penalized or self.forbids

    @property
    def forbids(self) -> bool:
        """Whether a minimum length or n-grams may forbid tokens."""
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
    made = [
        ((), ()) if inside else (row.request.bad_words, row.request.logit_bias)
        for row, inside in zip(rows, in_columns, strict=True)
    ]
    return Processing(
        slots=indices([row.slot for row in rows], device),
        words=words_of([words for words, _ in made], device),
        biases=_biases_of([biases for _, biases in made], device),
        listed=any(
            inside and (row.request.bad_words or row.request.logit_bias)
            for row, inside in zip(rows, in_columns, strict=True)
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
