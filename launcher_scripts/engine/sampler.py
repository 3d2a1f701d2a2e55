"""From logits to tokens, every row by its own parameters, on the device and without waiting.

The order of operations is FasterTransformer's: bad words, temperature, repetition or presence
penalty, minimum length, then top-k (with top-p inside the k) or top-p or, with neither, argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.plan import RowStart
from launcher_scripts.engine.row_state import RowStates

TEMPERATURE_EPSILON = 1e-6
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Words:
    """Bad words of a batch: word w of row `rows[w]` ends in `last[w]` after `prefix[w]`.

    rows, last: [W];  prefix: [W, P], right-aligned, -1 where the word is shorter;  length: [W]
    """

    rows: Tensor
    last: Tensor
    prefix: Tensor
    length: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """What is known on the host about the rows of a step, so that only needed work is launched.

    slots: [B];  top_k_rows, top_p_rows: indices into the batch of the rows each method handles
    """

    slots: Tensor
    greedy: bool
    words: Words | None
    scaled: bool
    penalized: bool
    min_length: bool
    largest_k: int
    top_k_rows: Tensor | None
    top_p_rows: Tensor | None
    log_probs: bool


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
    words = _words(rows, device)
    scaled = any(p.temperature != 1 for p in parameters)
    penalized = any(p.repetition_penalty != 1 or p.presence_penalty != 0 for p in parameters)
    min_length = any(p.min_length > 0 for p in parameters)
    log_probs = any(row.return_log_probs for row in rows)
    changes = bool(words or penalized or min_length)
    return SamplingBatch(
        slots=_indices([row.slot for row in rows], device),
        greedy=not (top_k or top_p or changes or log_probs),
        words=words,
        scaled=scaled,
        penalized=penalized,
        min_length=min_length,
        largest_k=max((p.top_k for p in parameters), default=0),
        top_k_rows=_indices(top_k, device) if top_k else None,
        top_p_rows=_indices(top_p, device) if top_p else None,
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
    logits = _processed(logits, batch, states, history, longest)
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


def _processed(
    logits: Tensor, batch: SamplingBatch, states: RowStates, history: Tensor, longest: int
) -> Tensor:
    slots = batch.slots
    if batch.words is not None:
        logits = _without_words(logits, batch.words, slots, states, history)
    if batch.scaled:
        temperature = states.temperature[slots]
        factor = torch.where(temperature == 1, 1.0, 1.0 / (temperature + TEMPERATURE_EPSILON))
        logits = logits * factor[:, None]
    if batch.penalized:
        logits = _penalized(logits, slots, states, history, longest)
    if batch.min_length:
        logits = _without_early_end(logits, slots, states)
    return logits


def _without_words(
    logits: Tensor, words: Words, slots: Tensor, states: RowStates, history: Tensor
) -> Tensor:
    """Logits with the last token of every bad word whose prefix was just written at -inf."""
    row_slots = slots[words.rows]
    length, start = states.length[row_slots], states.start[row_slots]
    size = words.prefix.shape[1]
    offsets = length[:, None] - size + torch.arange(size, device=logits.device)  # [W, P]
    written = history[start[:, None] + offsets.clamp(min=0)]
    matches = ((words.prefix < 0) | (words.prefix == written)).all(-1)
    banned = matches & (length >= words.length - 1)
    penalty = torch.where(banned, NEGATIVE_INFINITY, 0.0)
    return logits.index_put((words.rows, words.last), penalty, accumulate=True)


def _penalized(
    logits: Tensor, slots: Tensor, states: RowStates, history: Tensor, longest: int
) -> Tensor:
    """Repetition (multiplicative) and presence (additive) penalty on every token seen so far."""
    vocab = logits.shape[1]
    offsets = torch.arange(longest, device=logits.device)
    inside = offsets < states.length[slots][:, None]  # [B, T]
    where = torch.where(inside, states.start[slots][:, None] + offsets, 0)
    written = history[where]
    ids = torch.where(inside & (written >= 0), written, vocab)  # virtual tokens are negative
    seen = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, ids, True)[:, :vocab]
    repetition = states.repetition_penalty[slots][:, None]
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    return torch.where(seen, scaled - states.presence_penalty[slots][:, None], logits)


def _without_early_end(logits: Tensor, slots: Tensor, states: RowStates) -> Tensor:
    """The end token at -inf in rows that have not generated their minimum yet."""
    generated = states.length[slots] - states.prompt_length[slots]
    end_id = states.end_id[slots]
    early = (generated < states.min_length[slots]) & (end_id < logits.shape[1])
    ids = torch.where(early, end_id, 0)
    penalty = torch.where(early, NEGATIVE_INFINITY, 0.0)
    rows = torch.arange(logits.shape[0], device=logits.device)
    return logits.index_put((rows, ids), penalty, accumulate=True)


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


def _words(rows: Sequence[RowStart], device: torch.device) -> Words | None:
    entries = [(index, word) for index, row in enumerate(rows) for word in row.bad_words]
    if not entries:
        return None
    longest = max(len(word) - 1 for _, word in entries)
    prefixes = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for _, word in entries]
    return Words(
        rows=_indices([index for index, _ in entries], device),
        last=_indices([word[-1] for _, word in entries], device),
        prefix=torch.tensor(prefixes, dtype=torch.int64).view(len(entries), longest).to(device),
        length=_indices([len(word) for _, word in entries], device),
    )


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
