"""Beam search written plainly: whole texts, one forward pass each, no cache and no batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Text = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """What a search depends on; change: (text so far, logits [vocab]) -> logits."""

    width: int
    count: int
    end: int
    len_penalty: float = 0.0
    diversity: float = 0.0
    change: Callable[[Text, torch.Tensor], torch.Tensor] = lambda _, logits: logits


@dataclass(frozen=True)
class Candidate:
    text: Text
    total: float
    ranking: float


def search(
    logits_after: Callable[[Text], torch.Tensor], prompt: Text, settings: Settings
) -> list[tuple[Text, float]]:
    """The generated texts and their cumulative log-probabilities, best first.

    logits_after: text -> float32 [vocab]
    """
    running = [(prompt, 0.0)]
    ended: list[tuple[float, Text, float]] = []
    for length in range(1, settings.count + 1):
        norm = length**settings.len_penalty
        candidates = sorted(
            (
                candidate
                for text, total in running
                for candidate in _continuations(logits_after, text, total, norm, settings)
            ),
            key=lambda candidate: -candidate.ranking,
        )
        last = length == settings.count
        for each in candidates[: settings.width]:
            if last or each.text[-1] == settings.end:
                score = each.ranking if each.text[-1] == settings.end else each.total / norm
                ended.append((score, each.text, each.total))
        ended = sorted(ended, key=lambda each: -each[0])[: settings.width]
        if len(ended) == settings.width:
            break
        going = [each for each in candidates if each.text[-1] != settings.end]
        running = [(each.text, each.total) for each in going[: settings.width]]
    return [(text[len(prompt) :], total) for _, text, total in ended]


def _continuations(
    logits_after: Callable[[Text], torch.Tensor],
    text: Text,
    total: float,
    norm: float,
    settings: Settings,
) -> list[Candidate]:
    """The 2 W likeliest, with FasterTransformer's bonus for their rank among each other."""
    log_probs = settings.change(text, logits_after(text)).double().log_softmax(-1)
    values, tokens = log_probs.topk(2 * settings.width)
    return [
        Candidate(
            (*text, token),
            total + value,
            (total + value) / norm + settings.diversity * (rank % settings.width),
        )
        for rank, (value, token) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True))
    ]
