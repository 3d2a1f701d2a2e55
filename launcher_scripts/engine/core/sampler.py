"""From logits to tokens, every row by its own parameters, on the device and without waiting.

After what the row's parameters do to its logits (logit_processing.py) come min-p and then top-k
(with top-p inside the k) or top-p or, with neither, argmax, as in FasterTransformer. Probabilities
of top-k and top-p are shares of what min-p has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.core.log_probs import TokenScores, scores_of
from launcher_scripts.engine.core.logit_processing import Processing, indices, processing
from launcher_scripts.engine.core.plan import RowStart
from launcher_scripts.engine.core.row_state import RowStates


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

    top_k_rows, top_p_rows: indices into the batch of the rows each method handles
    min_p: whether any of them has one
    """

    processing: Processing
    greedy: bool
    largest_k: int
    top_k_rows: Tensor | None
    top_p_rows: Tensor | None
    min_p: bool
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


@dataclass(frozen=True)
class Sampled:
    """tokens: int64 [B];  log_probs: float32 [2, B] or None.

    log_probs[0] is log p over the whole vocabulary, log_probs[1] over the candidates of the row's
    method (of the k largest those that min-p has left, the vocabulary for top-p). scores are those
    of the batch's scored rows.
    """

    tokens: Tensor
    log_probs: Tensor | None = None
    scores: TokenScores | None = None


def sampling_batch(rows: Sequence[RowStart], device: torch.device) -> SamplingBatch:
    """Look at the rows' parameters once, when the batch's composition changes."""
    parameters = [row.request.sampling for row in rows]
    top_k = [index for index, p in enumerate(parameters) if p.top_k > 1]
    top_p = [index for index, p in enumerate(parameters) if p.top_k == 0 and p.top_p > 0]
    changes = processing(rows, device)
    log_probs = any(row.request.return_log_probs for row in rows)
    scored = _scored_rows(rows, device)
    return SamplingBatch(
        processing=changes,
        greedy=not (top_k or top_p or changes.reorders or log_probs or scored),
        largest_k=max((p.top_k for p in parameters), default=0),
        top_k_rows=indices(top_k, device) if top_k else None,
        top_p_rows=indices(top_p, device) if top_p else None,
        min_p=any(p.min_p > 0 for p in parameters),
        log_probs=log_probs,
        scored=scored,
    )


def _scored_rows(rows: Sequence[RowStart], device: torch.device) -> ScoredRows | None:
    counts = [row.request.num_log_probs for row in rows]
    asked = {at: count for at, count in enumerate(counts) if count >= 0}
    if not asked:
        return None
    return ScoredRows(tuple(asked), indices(list(asked), device), max(asked.values()))


def sample(
    logits: Tensor, batch: SamplingBatch, states: RowStates, history: Tensor, longest: int
) -> Sampled:
    """Choose one token per row from logits float32 [B, vocab].

    history: [cache tokens], the ids in the cache; row b's are the states' length[b] from start[b]
    on, at most `longest`. Rows in the states' top-p method move their top_p afterwards.
    """
    slots = batch.slots
    changes = batch.processing
    unmodified = logits
    logits = changes.scores(logits, states, history, longest)
    logits = changes.allowed(logits, states, history, longest)
    tokens = logits.argmax(-1)
    candidates = torch.zeros_like(tokens, dtype=torch.float32)
    generated = states.length[slots] - states.prompt_length[slots]
    uniform = uniforms(states.seed[slots], generated)
    if batch.top_k_rows is not None:
        rows = batch.top_k_rows
        chosen, log_p = _top_k(logits[rows], uniform[rows], slots[rows], states, batch)
        tokens, candidates = (
            tokens.index_copy(0, rows, chosen),
            candidates.index_copy(0, rows, log_p),
        )
    if batch.top_p_rows is not None:
        rows = batch.top_p_rows
        chosen, log_p = _top_p(logits[rows], uniform[rows], slots[rows], states, batch)
        tokens, candidates = (
            tokens.index_copy(0, rows, chosen),
            candidates.index_copy(0, rows, log_p),
        )
        _decay_top_p(chosen, slots[rows], states)
    log_probs = scores = None
    if batch.log_probs:
        whole = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        log_probs = torch.stack([whole, candidates])
    if batch.scored is not None:
        at = batch.scored.at
        scores = scores_of(unmodified[at], tokens[at], batch.scored.count)
    return Sampled(tokens, log_probs, scores)


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


def _top_k(
    logits: Tensor, uniform: Tensor, slots: Tensor, states: RowStates, batch: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """Among the k largest, the first whose running mass reaches u * p * (mass of the k)."""
    values, ids = logits.topk(min(batch.largest_k, logits.shape[1]), dim=-1)  # [B, K]
    k = states.top_k[slots].clamp(max=values.shape[1])
    kept = torch.arange(values.shape[1], device=logits.device) < k[:, None]
    weights = torch.where(kept, (values - values[:, :1]).exp(), 0.0)
    if batch.min_p:
        weights = torch.where(weights < states.min_p[slots][:, None], 0.0, weights)
    running = weights.cumsum(-1)
    p = states.top_p[slots]
    mass = uniform * torch.where(p > 0, p, 1.0) * running[:, -1]
    position = (running < mass[:, None]).sum(-1).minimum(k - 1)[:, None]
    chosen = weights.gather(1, position)[:, 0]
    return ids.gather(1, position)[:, 0], (chosen / running[:, -1]).log()


def _top_p(
    logits: Tensor, uniform: Tensor, slots: Tensor, states: RowStates, batch: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """In descending order, the first whose running probability reaches u * p * (mass left)."""
    log_probs = logits.log_softmax(-1)
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    p = states.top_p[slots]
    weights = ordered.exp()
    if batch.min_p:
        least = weights[:, :1] * states.min_p[slots][:, None]
        weights = torch.where(weights < least, 0.0, weights)
        p = torch.where(states.min_p[slots] > 0, p * weights.sum(-1), p)
    running = weights.cumsum(-1)
    # What is rounded may sum up to less than p, and the last of the tokens may be forbidden ones.
    mass = (uniform * p).minimum(running[:, -1])
    position = (running < mass[:, None]).sum(-1)
    position = torch.where(running[:, 0] >= p, 0, position)[:, None]
    return ids.gather(1, position)[:, 0], ordered.gather(1, position)[:, 0]


def _decay_top_p(tokens: Tensor, slots: Tensor, states: RowStates) -> None:
    decayed = (states.top_p[slots] * states.top_p_decay[slots]).maximum(states.top_p_min[slots])
    reset = tokens == states.reset_id[slots]
    states.top_p.index_copy_(0, slots, torch.where(reset, states.initial_top_p[slots], decayed))
