"""Beam search on the device: which hypotheses go on, without waiting for the host.

A search of width W owns W slots, one per hypothesis, each with cache tokens of its own. Every step
ranks the continuations of all W by cumulative log-probability; the best that do not end go on, and
take over the keys and values of the hypotheses they continue. Those that end are the host's to keep
(hypotheses.py), which sees the ranking a step later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from msgspec import structs
from torch import Tensor

from launcher_scripts.engine.core.results import BeamCopy
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.core.sampler import Processing, processing, words_of
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import RowStart
from launcher_scripts.engine.model.network import Network
from launcher_scripts.kernels.reference_sampling import (
    BeamShape,
    Words,
    continue_beams,
    copy_tokens,
)

# Decides over any log-probability already, and 63 of it stay below NEVER.
MAX_BONUS = 1e6


@dataclass(frozen=True)
class BeamBatch:
    """The searches of one width in a step, and what is known of them on the host.

    searches:   [G] first slots
    shape:      their width W, and what is looked at
    processing: of the G * W hypotheses
    stop_words: of the G * W hypotheses
    len_penalty, diversity: float32 [G, 1]; no diversity where no search asks for it
    """

    searches: tuple[int, ...]
    shape: BeamShape
    processing: Processing
    stop_words: Words | None
    len_penalty: Tensor
    diversity: Tensor | None

    @property
    def slots(self) -> Tensor:
        """[G * W]"""
        return self.processing.slots

    @property
    def kernels_key(self) -> Hashable | None:
        """Return a key of everything the kernels of a step depend on besides its slots; None if
        they read tensors that were made with the batch.
        """
        changes = self.processing
        settings = (changes.words, changes.biases, changes.guided, self.stop_words, self.diversity)
        if any(item is not None for item in settings):
            return None
        rules = (changes.penalized, changes.scaled, changes.min_length, changes.longest_ngram)
        return (self.shape, *rules)

    def on(self, slots: Tensor) -> BeamBatch:
        """The same searches in other slots, [G * W]; there may be padding ones behind them."""
        return replace(self, processing=replace(self.processing, slots=slots))


@dataclass(frozen=True)
class Candidates:
    """The continuations of each search, best first: see reference_beams.rank_beams.

    choices: int64 [3, G, K];  scores: float32 [3, G, K]
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
        shape=BeamShape(width, 2 * width + endings - 1, width * (1 + endings)),
        processing=processing(hypotheses, device, searches=True),
        stop_words=words_of([row.request.stop_words for row in hypotheses], device),
        len_penalty=_column([p.len_penalty for p in parameters], device),
        diversity=_column(rates, device) if any(rates) else None,
    )


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values)[:, None].to(device, non_blocking=True)


def _bonus(batch: BeamBatch, diversity: Tensor, states: RowStates) -> Tensor:
    """Return the bonus of each sibling: [G, S], diversity * (its rank mod W) * length^len_penalty,
    which is FasterTransformer's bonus on length-normalized scores.
    """
    width = batch.shape.width
    slots = batch.slots.view(-1, width)[:, 0]
    length = states.length[slots] - states.prompt_length[slots] + 1
    unit = diversity * length.float()[:, None] ** batch.len_penalty  # [G, 1]
    unit = torch.where(diversity == 0, 0.0, unit).clamp(-MAX_BONUS, MAX_BONUS)
    return unit * (torch.arange(batch.shape.siblings, device=slots.device) % width)


def _completed(
    logits: Tensor, words: Words, slots: Tensor, states: RowStates, history: Tensor
) -> Tensor:
    """Return the tokens that would complete a stop word: bool [B, vocab]."""
    completed = words.complete(slots, states, history).float()
    hits = torch.zeros_like(logits)
    return hits.index_put_((words.rows, words.last), completed, accumulate=True) > 0


class BeamSearch:
    """One rank's part in the searches in flight."""

    def __init__(self, network: Network, communicator: Communicator, states: RowStates) -> None:
        self._cache, self._kernels = network.cache, network.kernels
        self._vocab_size = network.config.vocab_size
        self._communicator = communicator
        self._states = states

    def start(self, rows: Iterable[RowStart]) -> None:
        """Give every hypothesis the prompt that the first one's slot has run."""
        states, cache = self._states, self._cache
        for row in rows:
            slots = indices(row.beams, states.device)
            # Whole blocks of the prompt are all hypotheses'.
            shared = len(row.ids) // cache.table.tokens * cache.table.tokens
            prompt = torch.arange(shared, len(row.ids), device=slots.device)
            source, target = (
                cache.table.locate(states.start[of][:, None] + prompt) for of in (slots[:1], slots)
            )
            for pool, ids in cache.pools_with_ids:
                copy_tokens(pool, ids, source.expand_as(target)[1:], target[1:])
            cache.row_states.gather(slots[1:], slots[:1].expand(len(slots) - 1))
            states.set_length(slots, torch.full_like(slots, len(row.ids)))

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
            plain_logits = None if logits is None else logits[first : first + rows]
            first += rows
            copies += self.copies(batch, self.go_on(plain_logits, batch, longest, reorder))
        return copies

    def copies(self, batch: BeamBatch, candidates: Candidates) -> list[BeamCopy]:
        """Return a step's candidates for rank 0, without padding."""
        if self._communicator.rank != 0:
            return []
        count = len(batch.searches)
        choices, scores = candidates.choices[:, :count], candidates.scores[:, :count]
        return [BeamCopy(batch.searches, choices, scores)]

    def go_on(
        self, logits: Tensor | None, batch: BeamBatch, longest: int, reorder: int
    ) -> Candidates:
        """`step` of one batch, without waiting: its slots are all that the host has to know."""
        states, slots, shape = self._states, batch.slots, batch.shape
        candidates, parents = self._ranked(logits, batch, longest)
        if parents is None or self._communicator.parallelism.pp_size > 1:
            self._communicator.from_last_stage(candidates.choices)
            self._communicator.from_last_stage(candidates.scores)
        if parents is None:
            selection = candidates.choices, candidates.scores
            parents = continue_beams(*selection, slots, states, shape.width)
        cache = self._cache
        cache.row_states.gather(slots, parents)
        for pool, ids in cache.pools_with_ids if reorder else ():
            self._kernels.reorder_beams(pool, ids, slots, parents, states, shape.width, reorder)
        return candidates

    def _ranked(
        self, logits: Tensor | None, batch: BeamBatch, longest: int
    ) -> tuple[Candidates, Tensor | None]:
        """The last stage's ranking, and the slots that go on; on another stage room for it.

        Temperature and penalties change the logits; what may not come is taken out of the
        log-probabilities, as in transformers.
        """
        states, slots, changes = self._states, batch.slots, batch.processing
        if logits is None:
            shape = batch.shape.within(self._vocab_size)
            result_shape = (3, slots.shape[0] // shape.width, shape.candidates)
            device = states.device
            choices = torch.empty(result_shape, dtype=torch.int64, device=device)
            return Candidates(choices, torch.empty(result_shape, device=device)), None
        history = self._cache.ids
        logits = changes.scores(logits, states, history, longest)
        allowed = changes.allowed(logits, states, history, longest)
        completed = bonus = None
        if batch.stop_words is not None:
            completed = _completed(logits, batch.stop_words, slots, states, history)
        if batch.diversity is not None:
            bonus = _bonus(batch, batch.diversity, states)
        choices, scores, parents = self._kernels.rank_beams(
            logits, allowed, slots, states, batch.shape, completed, bonus
        )
        return Candidates(choices, scores), parents
