"""From logits to tokens, every row by its own parameters, on the device and without waiting.

After what the row's parameters do to its logits (logit_processing.py) come top-k (with top-p inside
the k) or top-p or, with neither, argmax, as in FasterTransformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.logit_processing import Processing, indices, processing
from launcher_scripts.engine.plan import RowStart
from launcher_scripts.engine.row_state import RowStates


@dataclass(frozen=True)
class SamplingBatch:
    """What is known on the host about the rows of a step, so that only needed work is launched.

    top_k_rows, top_p_rows: indices into the batch of the rows each method handles
    """

    processing: Processing
    greedy: bool
    largest_k: int
    top_k_rows: Tensor | None
    top_p_rows: Tensor | None
    log_probs: bool

    @property
    def slots(self) -> Tensor:
        """[B]"""
        return self.processing.slots


@dataclass(frozen=True)
class Sampled:
    """tokens: int64 [B];  log_probs: float32 [2, B] or None.

    log_probs[0] is log p over the whole vocabulary, log_probs[1] over the candidates of the row's
    method (the k largest for top-k, the vocabulary for top-p).
    """

    tokens: Tensor
    log_probs: Tensor | None


def sampling_batch(rows: Sequence[RowStart], device: torch.device) -> SamplingBatch:
    """Look at the rows' parameters once, when the batch's composition changes."""
    parameters = [row.sampling for row in rows]
    top_k = [index for index, p in enumerate(parameters) if p.top_k > 1]
    top_p = [index for index, p in enumerate(parameters) if p.top_k == 0 and p.top_p > 0]
    changes = processing(rows, device)
    log_probs = any(row.return_log_probs for row in rows)
    return SamplingBatch(
        processing=changes,
        greedy=not (top_k or top_p or changes.penalized or changes.forbids or log_probs),
        largest_k=max((p.top_k for p in parameters), default=0),
        top_k_rows=indices(top_k, device) if top_k else None,
        top_p_rows=indices(top_p, device) if top_p else None,
        log_probs=log_probs,
    )


def sample(
    logits: Tensor, batch: SamplingBatch, states: RowStates, history: Tensor, longest: int
) -> Sampled:
    """Choose one token per row from logits float32 [B, vocab].

    history: [cache tokens], the ids in the cache; row b's are the states' length[b] from start[b]
    on, at most `longest`. Rows in the states' top-p method move their top_p afterwards.
    """
    slots = batch.slots
    changes = batch.processing
    logits = changes.scores(logits, states, history, longest)
    logits = changes.allowed(logits, states, history, longest)
    tokens = logits.argmax(-1)
    candidates = torch.zeros_like(tokens, dtype=torch.float32)
    generated = states.length[slots] - states.prompt_length[slots]
    uniform = uniforms(states.seed[slots], generated)
    if batch.top_k_rows is not None:
        rows = batch.top_k_rows
        chosen, log_p = _top_k(logits[rows], uniform[rows], slots[rows], states, batch.largest_k)
        tokens, candidates = (
            tokens.index_copy(0, rows, chosen),
            candidates.index_copy(0, rows, log_p),
        )
    if batch.top_p_rows is not None:
        rows = batch.top_p_rows
        chosen, log_p = _top_p(logits[rows], uniform[rows], slots[rows], states)
        tokens, candidates = (
            tokens.index_copy(0, rows, chosen),
            candidates.index_copy(0, rows, log_p),
        )
        _decay_top_p(chosen, slots[rows], states)
    if not batch.log_probs:
        return Sampled(tokens, None)
    whole = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Sampled(tokens, torch.stack([whole, candidates]))


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
    logits: Tensor, uniform: Tensor, slots: Tensor, states: RowStates, largest: int
) -> tuple[Tensor, Tensor]:
    """Among the k largest, the first whose running mass reaches u * p * (mass of the k)."""
    values, ids = logits.topk(min(largest, logits.shape[1]), dim=-1)  # [B, K]
    k = states.top_k[slots].clamp(max=values.shape[1])
    kept = torch.arange(values.shape[1], device=logits.device) < k[:, None]
    weights = torch.where(kept, (values - values[:, :1]).exp(), 0.0)
    running = weights.cumsum(-1)
    p = states.top_p[slots]
    mass = uniform * torch.where(p > 0, p, 1.0) * running[:, -1]
    position = (running < mass[:, None]).sum(-1).minimum(k - 1)[:, None]
    chosen = weights.gather(1, position)[:, 0]
    return ids.gather(1, position)[:, 0], (chosen / running[:, -1]).log()


def _top_p(
    logits: Tensor, uniform: Tensor, slots: Tensor, states: RowStates
) -> tuple[Tensor, Tensor]:
    """In descending order, the first whose running probability reaches u * p."""
    log_probs = logits.log_softmax(-1)
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    p = states.top_p[slots]
    running = ordered.exp().cumsum(-1)
    position = (running < (uniform * p)[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
    position = torch.where(running[:, 0] >= p, 0, position)[:, None]
    return ids.gather(1, position)[:, 0], ordered.gather(1, position)[:, 0]


def _decay_top_p(tokens: Tensor, slots: Tensor, states: RowStates) -> None:
    decayed = (states.top_p[slots] * states.top_p_decay[slots]).maximum(states.top_p_min[slots])
    reset = tokens == states.reset_id[slots]
    states.top_p.index_copy_(0, slots, torch.where(reset, states.initial_top_p[slots], decayed))
