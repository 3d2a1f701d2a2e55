"""What a row's parameters do to its logits before a token is chosen, on the device.

First the scores change, in this order: logit bias; repetition penalty (tokens of the prompt and
generated ones); frequency and presence penalty of generated tokens; temperature; presence penalty
of all tokens. Then a grammar, bad words, the minimum length and repeated n-grams forbid tokens. The
order is vLLM's, with FasterTransformer's presence penalty where it has it: after the temperature.
All rows of a step are done at once, without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.core.plan import RowStart
from launcher_scripts.engine.core.row_state import RowStates

TEMPERATURE_EPSILON = 1e-6
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Words:
    """Words of a batch: word w of row `rows[w]` ends in `last[w]` after `prefix[w]`.

    rows, last: [W];  prefix: [W, P], right-aligned, -1 where the word is shorter;  length: [W]
    """

    rows: Tensor
    last: Tensor
    prefix: Tensor
    length: Tensor

    def complete(self, slots: Tensor, states: RowStates, history: Tensor) -> Tensor:
        """Which words their last token would complete now: bool [W]."""
        row_slots = slots[self.rows]
        length, start = states.length[row_slots], states.start[row_slots]
        size = self.prefix.shape[1]
        offsets = length[:, None] - size + torch.arange(size, device=slots.device)  # [W, P]
        written = history[start[:, None] + offsets.clamp(min=0)]
        matches = ((self.prefix < 0) | (self.prefix == written)).all(-1)
        return matches & (length >= self.length - 1)


@dataclass(frozen=True)
class Biases:
    """What is added to logits: values float32 [N], to the tokens ids [N] of the rows [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    def added(self, logits: Tensor) -> Tensor:
        return logits.index_put((self.rows, self.ids), self.values, accumulate=True)


@dataclass(frozen=True)
class Processing:
    """What is known on the host about the rows of a step, so that only needed work is launched.

    slots:         [B]
    repeats, counted, scaled, penalized: whether any row has a repetition penalty; a penalty of its
                   generated tokens; a temperature; a presence penalty
    longest_ngram: the largest no_repeat_ngram_size; 0 where no row has one
    guided:        indices into the batch of the rows that have masks, or None
    """

    slots: Tensor
    words: Words | None
    biases: Biases | None
    repeats: bool
    counted: bool
    scaled: bool
    penalized: bool
    min_length: bool
    longest_ngram: int
    guided: Tensor | None

    @property
    def reorders(self) -> bool:
        """Whether the likeliest token of a row may become another."""
        changes = self.biases or self.repeats or self.counted or self.penalized
        forbids = self.words or self.min_length or self.longest_ngram or self.guided is not None
        return bool(changes or forbids)

    def scores(self, logits: Tensor, states: RowStates, history: Tensor, longest: int) -> Tensor:
        """Logits float32 [B, vocab] after bias, penalties and temperature.

        history: [cache tokens], the ids in the cache; row b's are the states' length[b] from
        start[b] on, at most `longest`.
        """
        slots, vocab = self.slots, logits.shape[1]
        if self.biases is not None:
            logits = self.biases.added(logits)
        if self.repeats or self.penalized:
            inside = torch.arange(longest, device=slots.device) < states.length[slots][:, None]
            seen = _seen(inside, slots, states, history, vocab)
        if self.repeats:
            penalty = states.repetition_penalty[slots][:, None]
            scaled = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(seen, scaled, logits)
        if self.counted:
            counts = _generated_counts(slots, states, history, longest, vocab)
            presence = states.output_presence_penalty[slots][:, None]
            logits = logits - states.frequency_penalty[slots][:, None] * counts
            logits = logits - torch.where(counts > 0, presence, 0.0)
        if self.scaled:
            temperature = states.temperature[slots]
            factor = torch.where(temperature == 1, 1.0, 1.0 / (temperature + TEMPERATURE_EPSILON))
            logits = logits * factor[:, None]
        if self.penalized:
            presence = states.presence_penalty[slots][:, None]
            logits = logits - torch.where(seen, presence, 0.0)
        return logits

    def allowed(self, scores: Tensor, states: RowStates, history: Tensor, longest: int) -> Tensor:
        """Scores [B, vocab] with -inf at the tokens that may not come; see `scores`."""
        if self.guided is not None:
            masks = states.masks[self.slots[self.guided]]
            masked = _within(scores[self.guided], masks)
            scores = scores.index_copy(0, self.guided, masked)
        if self.words is not None:
            banned = self.words.complete(self.slots, states, history)
            penalty = torch.where(banned, NEGATIVE_INFINITY, 0.0)
            at = (self.words.rows, self.words.last)
            scores = scores.index_put(at, penalty, accumulate=True)
        if self.min_length:
            scores = _without_early_end(scores, self.slots, states)
        if self.longest_ngram:
            size = min(self.longest_ngram, longest + 1)
            scores = _without_repeats(scores, self.slots, states, history, longest, size)
        return scores


def processing(rows: Sequence[RowStart], device: torch.device) -> Processing:
    """Look at the rows' parameters once, when the batch's composition changes."""
    parameters = [row.request.sampling for row in rows]
    guided = [at for at, row in enumerate(rows) if row.guided]
    return Processing(
        slots=indices([row.slot for row in rows], device),
        words=words_of([row.request.bad_words for row in rows], device),
        biases=_biases_of([row.request.logit_bias for row in rows], device),
        repeats=any(p.repetition_penalty != 1 for p in parameters),
        counted=any(p.frequency_penalty or p.output_presence_penalty for p in parameters),
        scaled=any(p.temperature != 1 for p in parameters),
        penalized=any(p.presence_penalty != 0 for p in parameters),
        min_length=any(p.min_length > 0 for p in parameters),
        longest_ngram=max((p.no_repeat_ngram_size for p in parameters), default=0),
        guided=indices(guided, device) if guided else None,
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


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _ids_at(
    chosen: Tensor, slots: Tensor, states: RowStates, history: Tensor, vocab: int
) -> Tensor:
    """The ids that the rows have at the places `chosen`, bool [B, T], else `vocab`: [B, T]."""
    offsets = torch.arange(chosen.shape[1], device=slots.device)
    where = torch.where(chosen, states.start[slots][:, None] + offsets, 0)
    written = history[where]
    return torch.where(chosen & (written >= 0), written, vocab)  # virtual tokens are negative


def _seen(chosen: Tensor, slots: Tensor, states: RowStates, history: Tensor, vocab: int) -> Tensor:
    """Which ids the rows have at the places `chosen`, bool [B, T]: bool [B, vocab]."""
    ids = _ids_at(chosen, slots, states, history, vocab)
    seen = torch.zeros(slots.shape[0], vocab + 1, dtype=torch.bool, device=slots.device)
    return seen.scatter_(1, ids, True)[:, :vocab]


def _generated_counts(
    slots: Tensor, states: RowStates, history: Tensor, longest: int, vocab: int
) -> Tensor:
    """How often the rows have generated each id: float32 [B, vocab]."""
    place = torch.arange(longest, device=slots.device)
    generated = place >= states.prompt_length[slots][:, None]  # [B, T]
    generated &= place < states.length[slots][:, None]
    ids = _ids_at(generated, slots, states, history, vocab)
    counts = torch.zeros(slots.shape[0], vocab + 1, device=slots.device)
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))[:, :vocab]


def _within(scores: Tensor, masks: Tensor) -> Tensor:
    """Scores [R, vocab], -inf where the id's bit of masks int32 [R, words] is 0."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device)) & 1
    allowed = bits.view(masks.shape[0], -1)[:, : scores.shape[1]].bool()
    return scores.masked_fill(~allowed, NEGATIVE_INFINITY)


def _without_early_end(scores: Tensor, slots: Tensor, states: RowStates) -> Tensor:
    """The end token at -inf in rows that have not generated their minimum yet."""
    generated = states.length[slots] - states.prompt_length[slots]
    end_id = states.end_id[slots]
    early = (generated < states.min_length[slots]) & (end_id < scores.shape[1])
    ids = torch.where(early, end_id, 0)
    penalty = torch.where(early, NEGATIVE_INFINITY, 0.0)
    rows = torch.arange(scores.shape[0], device=scores.device)
    return scores.index_put((rows, ids), penalty, accumulate=True)


def _without_repeats(
    scores: Tensor, slots: Tensor, states: RowStates, history: Tensor, longest: int, size: int
) -> Tensor:
    """-inf at every token that would complete an n-gram the row already has.

    n is the row's own no_repeat_ngram_size, 0 for none; `size` bounds it, or the row is too short.
    A token follows the row if it followed the same n - 1 tokens before (Paulus et al. 2018).
    """
    length, start = states.length[slots][:, None], states.start[slots][:, None]  # [B, 1]
    n = states.no_repeat_ngram_size[slots][:, None]
    place = torch.arange(longest, device=slots.device)[None]  # [1, T]
    follows = (n > 0) & (place >= n - 1) & (place < length)  # [B, T]
    for back in range(1, size):
        earlier = history[start + (place - back).clamp(min=0).minimum(length - 1)]
        latest = history[start + (length - back).clamp(min=0)]
        follows &= (earlier == latest) | (back >= n)
    return scores.masked_fill(
        _seen(follows, slots, states, history, scores.shape[1]), NEGATIVE_INFINITY
    )
