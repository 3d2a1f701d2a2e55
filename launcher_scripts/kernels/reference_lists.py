"""Lists that rows choose their tokens by, in plain torch: see reference_sampling.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import SamplingColumns

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

    def complete(self, slots: Tensor, columns: SamplingColumns, history: Tensor) -> Tensor:
        """Which words their last token would complete now: bool [W]."""
        row_slots = slots[self.rows]
        length, start = columns.length[row_slots], columns.start[row_slots]
        size = self.prefix.shape[1]
        offsets = length[:, None] - size + torch.arange(size, device=slots.device)  # [W, P]
        written = history[start[:, None] + offsets.clamp(min=0)]
        matches = ((self.prefix < 0) | (self.prefix == written)).all(-1)
        return matches & (length >= self.length - 1)

    def forbid(
        self, scores: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor
    ) -> Tensor:
        """Scores [B, vocab], -inf at the tokens that would complete words."""
        completed = self.complete(slots, columns, history)
        penalty = torch.where(completed, NEGATIVE_INFINITY, 0.0)
        return scores.index_put((self.rows, self.last), penalty, accumulate=True)


@dataclass(frozen=True)
class Biases:
    """What is added to logits: values float32 [N], to the tokens ids [N] of the rows [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    def added(self, logits: Tensor) -> Tensor:
        return logits.index_put((self.rows, self.ids), self.values, accumulate=True)


def words_in(columns: SamplingColumns, slots: Tensor) -> Words:
    """The bad words that the columns have of the rows in slots [B]."""
    ids, lengths = columns.word_ids[slots].long(), columns.word_lengths[slots].long()  # [B, L]
    lengths = torch.where(_held(lengths, columns.word_count[slots]), lengths, 0)
    rows, ends = lengths.nonzero(as_tuple=True)
    length = lengths[rows, ends][:, None]
    back = torch.arange(int(lengths.max().clamp(min=1)) - 1, 0, -1, device=slots.device)[None]
    before = ids[rows[:, None], (ends[:, None] - back).clamp(min=0)]
    prefix = torch.where(back < length, before, -1)
    return Words(rows, ids[rows, ends], prefix, length[:, 0])


def biases_in(columns: SamplingColumns, slots: Tensor) -> Biases:
    """The biases that the columns have of the rows in slots [B]."""
    ids = columns.bias_ids[slots].long()
    rows, places = _held(ids, columns.bias_count[slots]).nonzero(as_tuple=True)
    return Biases(rows, ids[rows, places], columns.bias_values[slots][rows, places])


def _held(lists: Tensor, counts: Tensor) -> Tensor:
    """Which entries of lists [B, L] are among the first counts [B]."""
    return torch.arange(lists.shape[1], device=lists.device) < counts[:, None]
