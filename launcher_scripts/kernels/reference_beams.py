"""Beam searches in plain torch: which hypotheses go on, and with which keys and values.

A search of width W has W hypotheses in slots of their own. See reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import BeamColumns

# What a hypothesis that ended loses, so that it goes on only where nothing else can.
ENDED = -1e9
COPIED_TOKENS = 4096


@dataclass(frozen=True)
class BeamShape:
    """width: W, of all searches of a batch
    siblings: how many continuations of each hypothesis are looked at
    kept:     how many of each search are ranked: enough for W that do not end
    """

    width: int
    siblings: int
    kept: int

    def within(self, vocab: int) -> BeamShape:
        """Where there are not as many tokens."""
        siblings = min(self.siblings, vocab)
        return BeamShape(self.width, siblings, min(self.kept, self.width * siblings))


def rank_beams(
    logits: Tensor,
    allowed: Tensor,
    slots: Tensor,
    columns: BeamColumns,
    shape: BeamShape,
    completed: Tensor | None = None,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank the continuations of G searches, and let the best go on, as `continue_beams` does.

    Returns choices int64 [3, G, K]: the hypothesis continued (0 to W - 1), the token, whether it
    ends; scores float32 [3, G, K]: what is ranked, cumulative log-probability, the token's own;
    and what `continue_beams` returns. K is the shape's `kept`, the best come first.

    logits, allowed: float32 [G * W, vocab]; the second has -inf at the tokens that may not come,
               of which the log-probabilities of others know nothing, as in transformers
    slots:     int64 [G * W], those of a search one after the other
    completed: bool [G * W, vocab], which tokens end a text beside the end id
    bonus:     float32 [G, S], what the siblings of a hypothesis gain by their rank among them
    """
    shape = shape.within(logits.shape[1])
    width, count = shape.width, shape.siblings
    log_probs = logits.log_softmax(-1)
    if allowed is not logits:
        log_probs = log_probs.masked_fill(allowed == -torch.inf, -torch.inf)
    own, tokens = log_probs.topk(count)  # [G * W, S]
    ends = tokens == columns.end_id[slots][:, None]
    if completed is not None:
        ends |= completed.gather(1, tokens)
    total = columns.beam_score[slots][:, None] + own
    ranked = total.view(-1, width, count)
    groups = ranked.shape[0]
    if bonus is not None:
        ranked = ranked + bonus[:, None, :count]
    ranking, best = ranked.view(groups, -1).topk(shape.kept)  # [G, K]
    parents = torch.arange(width, device=logits.device)[:, None].expand(width, count)
    facts = (parents.reshape(1, -1).expand(groups, -1), tokens, ends.long())
    choices = torch.stack([each.reshape(groups, -1).gather(1, best) for each in facts])
    values = [each.view(groups, -1).gather(1, best) for each in (total, own)]
    scores = torch.stack([ranking, *values])
    return choices, scores, continue_beams(choices, scores, slots, columns, width)


def continue_beams(
    choices: Tensor, scores: Tensor, slots: Tensor, columns: BeamColumns, width: int
) -> Tensor:
    """Make the best W that do not end the next hypotheses: the slots they continue, int64 [G * W].

    Their tokens and cumulative log-probabilities go to the columns; see `rank_beams`.
    """
    parent, token, ends = choices
    place = torch.arange(ends.shape[1], device=ends.device)
    chosen = (place + ends * ends.shape[1]).topk(width, largest=False).indices  # [G, W]
    columns.token.index_copy_(0, slots, token.gather(1, chosen).view(-1))
    score = (scores[1] + ends * ENDED).gather(1, chosen)
    columns.beam_score.index_copy_(0, slots, score.view(-1))
    return slots.view(-1, width).gather(1, parent.gather(1, chosen)).view(-1)


def reorder_beams(
    pool: Tensor,
    ids: Tensor,
    slots: Tensor,
    parents: Tensor,
    columns: BeamColumns,
    width: int,  # noqa: ARG001 - searches are all the same here
    count: int,
) -> None:
    """Copy the last `count` generated tokens of the parents to the slots, int64 [G * W] both.

    pool: [layers, 2, heads, cache tokens, head size];  ids: int64 [cache tokens]
    """
    back = torch.arange(1, count + 1, device=slots.device)
    place = columns.length[slots][:, None] - back  # [B, T]
    inside = place >= columns.prompt_length[slots][:, None]
    nowhere = ids.shape[0] - 1  # the token that belongs to no row
    source, target = (
        torch.where(inside, columns.start[of][:, None] + place, nowhere) for of in (parents, slots)
    )
    copy_tokens(pool, ids, source, target)


def copy_tokens(pool: Tensor, ids: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the cache tokens source int64 [B, T] to target [B, T]; see `reorder_beams`.

    A column is read before it is written, so its tokens may change places; no token may be in two
    columns.
    """
    if pool.element_size() == 1:  # torch copies no e4m3 by index
        pool = pool.view(torch.uint8)
    columns = max(1, COPIED_TOKENS // max(1, source.shape[0]))
    for first in range(0, source.shape[1], columns):
        some = slice(first, first + columns)
        read, written = source[:, some].flatten(), target[:, some].flatten()
        if looking_is_free(read.device):  # and most tokens stay where they are
            moves = read != written
            read, written = read[moves], written[moves]
        pool.index_copy_(3, written, pool.index_select(3, read))
        ids.index_copy_(0, written, ids[read])


def looking_is_free(device: torch.device) -> bool:
    """Whether the host can use a tensor's values without waiting for the device."""
    return device.type == "cpu"
