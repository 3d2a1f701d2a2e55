"""From logits to tokens in plain torch, every row by its own parameters: see reference.py.

First the logits change, in this order: bias; repetition penalty (tokens of the prompt and generated
ones); frequency and presence penalty of generated tokens; presence penalty of all tokens, in units
of what the temperature makes of logits; temperature. Bad words, the minimum length and repeated
n-grams forbid tokens. The order is vLLM's, with FasterTransformer's presence penalty where it has
it: after the temperature. Then come top-k, with top-p inside the k, or top-p or, with neither, the
likeliest token, as in FasterTransformer; min-p leaves tokens out of what top-k and top-p take
shares of.

Shares of the likeliest token's probability are counted in whole units of 2^-40. So a sum of shares
is exact, and the same in any order.

Beam searches in plain torch: which hypotheses go on, and with which keys and values.

A search of width W has W hypotheses in slots of their own. See reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import BlockTable, locate

# What a hypothesis that ended loses, so that it goes on only where nothing else can.
DONE_SCORE = -1e9
COPIED_TOKENS = 4096


class SamplingColumns(Protocol):
    """Sampling parameters of the rows in flight, [slots + 1] each, the last slot one for padding.

    Integers are int64, others float32. start: first address in the table, where there is one;
    length: tokens in the cache;
    prompt_length: those that the row has not generated;  token: the last id chosen;  reset_id: the
    id behind which top_p is initial_top_p again. Most others are named as a request's parameters.

    bias_ids, word_ids, word_lengths: int32 [slots + 1, MAX_LISTED], and bias_values float32: what
    is added to which logits; the bad words, one after the other, and at the end of each how many
    tokens it has, 0 elsewhere.  bias_count, word_count: how many entries the lists have
    """

    table: BlockTable | None
    start: Tensor
    length: Tensor
    prompt_length: Tensor
    token: Tensor
    seed: Tensor
    end_id: Tensor
    min_length: Tensor
    top_k: Tensor
    no_repeat_ngram_size: Tensor
    bias_count: Tensor
    word_count: Tensor
    reset_id: Tensor
    temperature: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    output_presence_penalty: Tensor
    min_p: Tensor
    top_p: Tensor
    initial_top_p: Tensor
    top_p_decay: Tensor
    top_p_min: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    word_ids: Tensor
    word_lengths: Tensor


class BeamColumns(Protocol):
    """States of beam search hypotheses, [slots + 1] each; see SamplingColumns.

    beam_score: float32, cumulative log-probability
    """

    table: BlockTable | None
    start: Tensor
    length: Tensor
    prompt_length: Tensor
    token: Tensor
    end_id: Tensor
    beam_score: Tensor


@dataclass(frozen=True)
class BeamShape:
    """width: W, of all searches of a batch
    siblings: how many continuations of each hypothesis are looked at
    kept:     how many of each search are ranked: enough for W that do not end
    """

    width: int
    siblings: int
    candidates: int

    def within(self, vocab: int) -> BeamShape:
        """Return the shape for fewer tokens."""
        siblings = min(self.siblings, vocab)
        return BeamShape(self.width, siblings, min(self.candidates, self.width * siblings))


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
    token_scores, tokens = log_probs.topk(count)  # [G * W, S]
    ends = tokens == columns.end_id[slots][:, None]
    if completed is not None:
        ends |= completed.gather(1, tokens)
    total = columns.beam_score[slots][:, None] + token_scores
    ranked = total.view(-1, width, count)
    groups = ranked.shape[0]
    if bonus is not None:
        ranked = ranked + bonus[:, None, :count]
    ranking, best = ranked.view(groups, -1).topk(shape.candidates)  # [G, K]
    parents = torch.arange(width, device=logits.device)[:, None].expand(width, count)
    fields = (parents.reshape(1, -1).expand(groups, -1), tokens, ends.long())
    choices = torch.stack([fact.reshape(groups, -1).gather(1, best) for fact in fields])
    values = [field.view(groups, -1).gather(1, best) for field in (total, token_scores)]
    scores = torch.stack([ranking, *values])
    return choices, scores, continue_beams(choices, scores, slots, columns, width)


def continue_beams(
    choices: Tensor, scores: Tensor, slots: Tensor, columns: BeamColumns, width: int
) -> Tensor:
    """Make the best W that do not end the next hypotheses: the slots they continue, int64 [G * W].

    Their tokens and cumulative log-probabilities go to the columns; see `rank_beams`.
    """
    parent, token, ends = choices
    order = torch.arange(ends.shape[1], device=ends.device)
    selected = (order + ends * ends.shape[1]).topk(width, largest=False).indices  # [G, W]
    columns.token.index_copy_(0, slots, token.gather(1, selected).view(-1))
    score = (scores[1] + ends * DONE_SCORE).gather(1, selected)
    columns.beam_score.index_copy_(0, slots, score.view(-1))
    return slots.view(-1, width).gather(1, parent.gather(1, selected)).view(-1)


def reorder_beams(
    pool: Tensor,
    ids: Tensor | None,
    slots: Tensor,
    parents: Tensor,
    columns: BeamColumns,
    width: int,  # noqa: ARG001 - searches are all the same here
    count: int,
) -> None:
    """Copy the last `count` generated tokens of the parents to the slots, int64 [G * W] both.

    pool: [layers, parts, heads, cache tokens, width];  ids: int64 [cache tokens], or None
    """
    back = torch.arange(1, count + 1, device=slots.device)
    positions = columns.length[slots][:, None] - back  # [B, T]
    mask = positions >= columns.prompt_length[slots][:, None]
    nowhere = pool.shape[3] - 1  # the token that belongs to no row
    source, target = (
        torch.where(mask, locate(columns.table, columns.start[of][:, None] + positions), nowhere)
        for of in (parents, slots)
    )
    copy_tokens(pool, ids, source, target)


def copy_tokens(pool: Tensor, ids: Tensor | None, source: Tensor, target: Tensor) -> None:
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
        if ids is not None:
            ids.index_copy_(0, written, ids[read])


def looking_is_free(device: torch.device) -> bool:
    """Return whether the host can use a tensor's values without waiting for the device."""
    return device.type == "cpu"


TEMPERATURE_EPSILON = 1e-6
FLOAT_MAX = torch.finfo(torch.float32).max
FLOAT_TINY = torch.finfo(torch.float32).tiny
UNITS = 2.0**40
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
        """Return the words that their last token would complete now: bool [W]."""
        row_slots = slots[self.rows]
        length, start = columns.length[row_slots], columns.start[row_slots]
        size = self.prefix.shape[1]
        offsets = length[:, None] - size + torch.arange(size, device=slots.device)  # [W, P]
        written = history[locate(columns.table, start[:, None] + offsets.clamp(min=0))]
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
    """Addends of logits: values float32 [N], to the tokens ids [N] of the rows [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    def added(self, logits: Tensor) -> Tensor:
        return logits.index_put((self.rows, self.ids), self.values, accumulate=True)


def process(logits: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor) -> Tensor:
    """Logits float32 [B, vocab] after the rows' biases and penalties, -inf at the tokens that their
    bad words, minimum length and n-grams forbid. The given ones may be overwritten.

    slots: int64 [B];  history: int64 [cache tokens], the ids in the cache; row b's are the columns'
    length[b] from start[b] on
    """
    longest = int(columns.length[slots].max())
    size = int(columns.no_repeat_ngram_size[slots].max())
    logits = _biases_in(columns, slots).added(logits)
    logits = penalize(logits, slots, columns, history, longest)
    logits = _words_in(columns, slots).forbid(logits, slots, columns, history)
    return forbid(logits, slots, columns, history, longest, size)


def sample(logits: Tensor, slots: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """One token per row of logits float32 [B, vocab]: ids int64 [B], log-probs float32 [2, B].

    The ids become the last tokens of the rows in slots [B], and rows that choose by top-p alone
    move their top_p. log_probs[0] is log p over the whole vocabulary, log_probs[1] over the
    candidates of the row's method (of the k largest those that min-p has left, the vocabulary for
    top-p).
    """
    scores = temper(logits, slots, columns).clamp(max=FLOAT_MAX)
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    top = ordered[:, :1].clamp(min=-FLOAT_MAX)
    shares = (ordered - top).exp()
    weights = (shares * UNITS).long()
    p = columns.top_p[slots]
    by_p = (columns.top_k[slots] == 0) & (p > 0)
    k = torch.where(by_p, ids.shape[1], columns.top_k[slots].clamp(min=1))
    mask = torch.arange(ids.shape[1], device=ids.device) < k[:, None]
    mask &= shares >= columns.min_p[slots][:, None]
    running = torch.where(mask, weights, 0).cumsum(-1)
    mass = running[:, -1]
    generated = columns.length[slots] - columns.prompt_length[slots]
    part = uniforms(columns.seed[slots], generated).double() * torch.where(p > 0, p, 1.0).double()
    target = (part * mass.double()).ceil().long().clamp(min=1).minimum(mass)
    position = (running < target[:, None]).sum(-1, keepdim=True)
    tokens, sampled = (values.gather(1, position)[:, 0] for values in (ids, ordered))
    below = sampled - top[:, 0]
    log_sum = below - _log_of(weights.sum(-1))
    candidates = torch.where(by_p, log_sum, below - _log_of(mass))
    columns.token.index_copy_(0, slots, tokens)
    columns.top_p.index_copy_(0, slots, torch.where(by_p, _moved(p, tokens, slots, columns), p))
    return tokens, torch.stack([log_sum, candidates])


def _words_in(columns: SamplingColumns, slots: Tensor) -> Words:
    """The bad words that the columns have of the rows in slots [B]."""
    ids, lengths = columns.word_ids[slots].long(), columns.word_lengths[slots].long()  # [B, L]
    lengths = torch.where(_held(lengths, columns.word_count[slots]), lengths, 0)
    rows, ends = lengths.nonzero(as_tuple=True)
    length = lengths[rows, ends][:, None]
    back = torch.arange(int(lengths.max().clamp(min=1)) - 1, 0, -1, device=slots.device)[None]
    before = ids[rows[:, None], (ends[:, None] - back).clamp(min=0)]
    prefix = torch.where(back < length, before, -1)
    return Words(rows, ids[rows, ends], prefix, length[:, 0])


def _biases_in(columns: SamplingColumns, slots: Tensor) -> Biases:
    """The biases that the columns have of the rows in slots [B]."""
    ids = columns.bias_ids[slots].long()
    rows, indices = _held(ids, columns.bias_count[slots]).nonzero(as_tuple=True)
    return Biases(rows, ids[rows, indices], columns.bias_values[slots][rows, indices])


def _held(lists: Tensor, counts: Tensor) -> Tensor:
    """Return a mask of the first counts [B] entries of lists [B, L]."""
    return torch.arange(lists.shape[1], device=lists.device) < counts[:, None]


def penalize(
    logits: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor, longest: int
) -> Tensor:
    """Logits float32 [B, vocab] after the penalties, before the temperature; see `process`.

    longest: bounds the rows' lengths
    """
    positions = torch.arange(longest, device=slots.device)
    mask = positions < columns.length[slots][:, None]  # [B, T]
    generated = mask & (positions >= columns.prompt_length[slots][:, None])
    seen = _counts(mask, slots, columns, history, logits.shape[1]) > 0
    counts = _counts(generated, slots, columns, history, logits.shape[1])
    repetition, frequency, output_presence, presence = (
        column[slots][:, None]
        for column in (
            columns.repetition_penalty,
            columns.frequency_penalty,
            columns.output_presence_penalty,
            columns.presence_penalty,
        )
    )
    changed = torch.where(logits < 0, logits * repetition, logits / repetition)
    changed = changed - frequency * counts - torch.where(counts > 0, output_presence, 0.0)
    changed = changed - presence / _factor(slots, columns)[:, None]
    return torch.where(seen, changed.clamp(-FLOAT_MAX, FLOAT_MAX), logits)


def temper(logits: Tensor, slots: Tensor, columns: SamplingColumns) -> Tensor:
    """Logits float32 [B, vocab] divided by the rows' temperatures."""
    return logits * _factor(slots, columns)[:, None]


def _factor(slots: Tensor, columns: SamplingColumns) -> Tensor:
    temperature = columns.temperature[slots]
    factor = torch.where(temperature == 1, 1.0, 1.0 / (temperature + TEMPERATURE_EPSILON))
    return factor.clamp(min=FLOAT_TINY)


def forbid(
    scores: Tensor,
    slots: Tensor,
    columns: SamplingColumns,
    history: Tensor,
    longest: int,
    size: int,
) -> Tensor:
    """Scores [B, vocab], -inf at what the minimum length and n-grams forbid; see `process`.

    Nothing may complete an n-gram that the row already has. n is the row's own
    no_repeat_ngram_size, 0 for none; `size` bounds it. A token follows the row if it followed the
    same n - 1 tokens before (Paulus et al. 2018).
    """
    length, start = columns.length[slots][:, None], columns.start[slots][:, None]  # [B, 1]
    end_id = columns.end_id[slots][:, None]
    early = length - columns.prompt_length[slots][:, None] < columns.min_length[slots][:, None]
    forbidden = early & (torch.arange(scores.shape[1], device=slots.device) == end_id)
    if size:
        n = columns.no_repeat_ngram_size[slots][:, None]
        positions = torch.arange(longest, device=slots.device)[None]  # [1, T]
        follows = (n > 0) & (positions >= n - 1) & (positions < length)  # [B, T]
        for back in range(1, min(size, longest + 1)):
            before = (positions - back).clamp(min=0).minimum(length - 1)
            earlier = history[locate(columns.table, start + before)]
            latest = history[locate(columns.table, start + (length - back).clamp(min=0))]
            follows &= (earlier == latest) | (back >= n)
        forbidden |= _counts(follows, slots, columns, history, scores.shape[1]) > 0
    return scores.masked_fill(forbidden, NEGATIVE_INFINITY)


def _counts(
    chosen: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor, vocab: int
) -> Tensor:
    """Return how often the rows have each id where `chosen`, bool [B, T]: float32 [B, vocab]."""
    offsets = torch.arange(chosen.shape[1], device=slots.device)
    where = torch.where(chosen, columns.start[slots][:, None] + offsets, 0)
    written = history[locate(columns.table, where)]
    valid = chosen & (written >= 0) & (written < vocab)  # virtual tokens are negative
    ids = torch.where(valid, written, vocab)
    counts = torch.zeros(slots.shape[0], vocab + 1, device=slots.device)
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))[:, :vocab]


def _log_of(mass: Tensor) -> Tensor:
    return (mass.clamp(min=1).float() / UNITS).log()


def _moved(p: Tensor, tokens: Tensor, slots: Tensor, columns: SamplingColumns) -> Tensor:
    """The next top_p [B] of rows that have chosen the tokens [B]."""
    decayed = (p * columns.top_p_decay[slots]).maximum(columns.top_p_min[slots])
    return torch.where(tokens == columns.reset_id[slots], columns.initial_top_p[slots], decayed)


def uniforms(seeds: Tensor, steps: Tensor) -> Tensor:
    """One number in (0, 1] per row, a pure function of (seed, step): float32 [B].

    A counter-based generator (Salmon et al. 2011) built on the SplitMix64 finalizer (Steele et
    al. 2014): rows are reproducible whatever else is in the batch. Multiples of 2^-24, so float32
    holds them exactly.
    """
    bits = _mix(_mix(seeds) + (steps + 1) * -7046029254386353131)
    return (((bits >> 40) & 0xFFFFFF) + 1).float() * 2.0**-24


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer on 64-bit patterns held in signed integers."""
    bits = (bits ^ _shifted(bits, 30)) * -4658895280553007687
    bits = (bits ^ _shifted(bits, 27)) * -7723592293110705685
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift: the sign does not come in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
