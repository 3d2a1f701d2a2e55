"""Beam search on the device: which hypotheses go on, without waiting for the host.

A search of width W owns W slots, one per hypothesis, each with cache tokens of its own. Every step
ranks the continuations of all W by cumulative log-probability; the best that do not end go on, and
take over the keys and values of the hypotheses they continue. Those that end are the host's to keep
(hypotheses.py), which sees the ranking a step later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from msgspec import structs
from torch import Tensor

from launcher_scripts.engine.core.kv_cache import KVCache
from launcher_scripts.engine.core.logit_processing import (
    Processing,
    indices,
    processing,
    words_of,
)
from launcher_scripts.engine.core.plan import RowStart
from launcher_scripts.engine.core.results import BeamCopy
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.kernels.reference_lists import Words

# What a hypothesis that ended loses, so that it goes on only where nothing else can.
ENDED = -1e9
# Decides over any log-probability already, and 63 of it stay below NEVER.
MOST_BONUS = 1e6


@dataclass(frozen=True)
class BeamBatch:
    """The searches of one width in a step, and what is known of them on the host.

    searches:   [G] first slots;  width: W
    siblings:   how many continuations of each hypothesis are looked at
    kept:       how many of each search are ranked: enough for W that do not end
    processing: of the G * W hypotheses
    stop_words: of the G * W hypotheses
    len_penalty, diversity: float32 [G, 1]; no diversity where no search asks for it
    """

    searches: tuple[int, ...]
    width: int
    siblings: int
    kept: int
    processing: Processing
    stop_words: Words | None
    len_penalty: Tensor
    diversity: Tensor | None

    @property
    def slots(self) -> Tensor:
        """[G * W]"""
        return self.processing.slots


@dataclass(frozen=True)
class Candidates:
    """The continuations of each search, best first.

    choices: int64 [3, G, K]: the hypothesis continued (0 to W - 1), the token, whether it ends
    scores:  float32 [3, G, K]: what is ranked, cumulative log-probability, the token's own
    """

    choices: Tensor
    scores: Tensor


def beam_batches(rows: Iterable[RowStart], device: torch.device) -> tuple[BeamBatch, ...]:
    """Searches of one shape side by side; the order of the rows within a shape stays."""
    ordered = sorted(rows, key=_shape)
    return tuple(
        _beam_batch(list(group), *shape, device) for shape, group in groupby(ordered, key=_shape)
    )


def _shape(row: RowStart) -> tuple[int, int]:
    """Width, and how many tokens may end a hypothesis."""
    return len(row.beams), 1 + len({word[-1] for word in row.request.stop_words})


def _beam_batch(
    rows: Sequence[RowStart], width: int, endings: int, device: torch.device
) -> BeamBatch:
    hypotheses = [structs.replace(row, slot=slot) for row in rows for slot in row.beams]
    parameters = [row.request.sampling for row in rows]
    rates = [p.beam_search_diversity_rate for p in parameters]
    return BeamBatch(
        searches=tuple(row.slot for row in rows),
        width=width,
        siblings=2 * width + endings - 1,
        kept=width * (1 + endings),
        processing=processing(hypotheses, device, searches=True),
        stop_words=words_of([row.request.stop_words for row in hypotheses], device),
        len_penalty=_column([p.len_penalty for p in parameters], device),
        diversity=_column(rates, device) if any(rates) else None,
    )


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values)[:, None].to(device, non_blocking=True)


def rank(
    logits: Tensor, batch: BeamBatch, states: RowStates, history: Tensor, longest: int
) -> Candidates:
    """Rank the continuations of logits float32 [G * W, vocab]; history, longest: see Processing.

    Temperature and penalties change the logits; what may not come is taken out of the
    log-probabilities, as in transformers. A sibling gains diversity * (its rank mod W) *
    length^len_penalty, which is FasterTransformer's bonus on length-normalized scores.
    """
    width, changes = batch.width, batch.processing
    slots = batch.slots
    log_probs = changes.scores(logits, states, history, longest).log_softmax(-1)
    log_probs = changes.allowed(log_probs, states, history, longest)
    own, tokens = log_probs.topk(min(batch.siblings, logits.shape[1]))  # [G * W, S]
    ends = tokens == states.end_id[slots][:, None]
    if batch.stop_words is not None:
        ends |= _completed(log_probs, batch.stop_words, slots, states, history).gather(1, tokens)
    total = states.beam_score[slots][:, None] + own
    siblings = own.shape[1]
    parents = torch.arange(width, device=logits.device)[:, None].expand(width, siblings)
    groups = len(batch.searches)
    ranked = total.view(groups, width, siblings)
    if batch.diversity is not None:
        ranked = ranked + _bonus(batch, batch.diversity, siblings, states)[:, None]
    ranked = ranked.view(groups, -1)
    ranking, best = ranked.topk(min(batch.kept, ranked.shape[1]))  # [G, K]
    choices = (parents.reshape(1, -1).expand(groups, -1), tokens, ends.long())
    return Candidates(
        torch.stack([values.reshape(groups, -1).gather(1, best) for values in choices]),
        torch.stack(
            [ranking, *(values.view(groups, -1).gather(1, best) for values in (total, own))]
        ),
    )


def _bonus(batch: BeamBatch, diversity: Tensor, siblings: int, states: RowStates) -> Tensor:
    """What each sibling gains: [G, S]."""
    slots = batch.slots.view(-1, batch.width)[:, 0]
    length = states.length[slots] - states.prompt_length[slots] + 1
    unit = diversity * length.float()[:, None] ** batch.len_penalty  # [G, 1]
    unit = torch.where(diversity == 0, 0.0, unit).clamp(-MOST_BONUS, MOST_BONUS)
    return unit * (torch.arange(siblings, device=slots.device) % batch.width)


def _completed(
    log_probs: Tensor, words: Words, slots: Tensor, states: RowStates, history: Tensor
) -> Tensor:
    """Which tokens would complete a stop word: bool [B, vocab]."""
    completed = words.complete(slots, states, history).float()
    hits = torch.zeros_like(log_probs)
    return hits.index_put_((words.rows, words.last), completed, accumulate=True) > 0


class BeamSearch:
    """One rank's part in the searches in flight."""

    def __init__(
        self, cache: KVCache, communicator: Communicator, states: RowStates, vocab_size: int
    ) -> None:
        self.cache = cache
        self.vocab_size = vocab_size
        self.communicator = communicator
        self.states = states

    def start(self, rows: Iterable[RowStart]) -> None:
        """Give every hypothesis the prompt that the first one's slot has run."""
        for row in rows:
            slots = indices(row.beams, self.states.device)
            prompt = torch.arange(len(row.ids), device=slots.device)
            source, target = (self.states.start[of][:, None] + prompt for of in (slots[:1], slots))
            self.cache.copy(source.expand_as(target)[1:], target[1:])
            self.states.set_length(slots, torch.full_like(slots, len(row.ids)))

    def step(
        self, logits: Tensor | None, batches: Sequence[BeamBatch], longest: int, reorder: int
    ) -> list[BeamCopy]:
        """Choose the next hypotheses of every search from logits [rows of the batches, vocab].

        logits is None but on the last stage, which decides for all. reorder: how many of the last
        tokens in the cache may differ between hypotheses. The rankings go to rank 0.
        """
        copies = []
        first = 0
        for batch in batches:
            rows = batch.slots.shape[0]
            candidates = self._candidates(
                None if logits is None else logits[first : first + rows], batch, longest
            )
            first += rows
            parents = self._go_on(candidates, batch)
            if reorder:
                self._reorder(batch.slots, parents, reorder)
            if self.communicator.rank == 0:
                copies.append(BeamCopy(batch.searches, candidates.choices, candidates.scores))
        return copies

    def _candidates(self, logits: Tensor | None, batch: BeamBatch, longest: int) -> Candidates:
        """The last stage's ranking on every stage."""
        if logits is not None:
            candidates = rank(logits, batch, self.states, self.cache.ids, longest)
        else:
            kept = min(batch.kept, batch.width * min(batch.siblings, self.vocab_size))
            shape = (3, len(batch.searches), kept)
            device = self.states.device
            candidates = Candidates(
                torch.empty(shape, dtype=torch.int64, device=device),
                torch.empty(shape, device=device),
            )
        self.communicator.from_last_stage(candidates.choices)
        self.communicator.from_last_stage(candidates.scores)
        return candidates

    def _go_on(self, candidates: Candidates, batch: BeamBatch) -> Tensor:
        """Make the best W that do not end the next hypotheses: the slots they continue, [G * W]."""
        parent, token, ends = candidates.choices
        total = candidates.scores[1]
        place = torch.arange(ends.shape[1], device=ends.device)
        order = place + ends * ends.shape[1]
        chosen = order.topk(batch.width, largest=False).indices  # [G, W], best first
        states, slots = self.states, batch.slots
        states.token.index_copy_(0, slots, token.gather(1, chosen).view(-1))
        score = (total + ends * ENDED).gather(1, chosen)
        states.beam_score.index_copy_(0, slots, score.view(-1))
        return slots.view(-1, batch.width).gather(1, parent.gather(1, chosen)).view(-1)

    def _reorder(self, slots: Tensor, parents: Tensor, count: int) -> None:
        """Copy the last `count` generated tokens of the parents to the slots."""
        states = self.states
        back = torch.arange(1, count + 1, device=slots.device)
        place = states.length[slots][:, None] - back  # [B, T]
        inside = place >= states.prompt_length[slots][:, None]
        source, target = (
            torch.where(inside, states.start[of][:, None] + place, self.cache.scratch)
            for of in (parents, slots)
        )
        self.cache.copy(source, target)
