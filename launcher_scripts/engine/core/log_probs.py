"""What the model's own logits say of tokens: log-probabilities, ranks and the likeliest others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.contract.requests import ModelLogProbs
from launcher_scripts.engine.distributed.communicator import Communicator


@dataclass(frozen=True)
class TokenScores:
    """Of n tokens, the token itself in column 0 and the K likeliest ones of its place after it.

    log_probs: float32 [n, 1 + K]
    ids:       int64 [n, 1 + K]; of the token itself its rank instead, 1 for the likeliest
    """

    log_probs: Tensor
    ids: Tensor

    def from_last_stage(self, communicator: Communicator) -> TokenScores:
        """Fill these with the last pipeline stage's, on every stage."""
        communicator.from_last_stage(self.log_probs)
        communicator.from_last_stage(self.ids)
        return self


def no_scores(tokens: int, count: int, device: torch.device) -> TokenScores:
    """Room for the scores of so many tokens, with the `count` likeliest ones of each place."""
    shape = (tokens, 1 + count)
    return TokenScores(
        torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int64, device=device)
    )


def scores_of(logits: Tensor, tokens: Tensor, count: int) -> TokenScores:
    """Scores of tokens int64 [n] by logits float32 [n, vocab]; 0 everywhere for negative tokens.

    Tokens that are equally likely share the better rank. A virtual token (a negative one) has no
    log-probability.
    """
    real = tokens >= 0
    own = logits.gather(1, tokens.clamp(min=0)[:, None])
    rank = 1 + (logits > own).sum(-1, keepdim=True)
    top, ids = logits.topk(count, dim=-1)
    log_probs = torch.cat([own, top], 1) - logits.logsumexp(-1, keepdim=True)
    return TokenScores(
        torch.where(real[:, None], log_probs, 0.0),
        torch.where(real[:, None], torch.cat([rank, ids], 1), 0),
    )


def model_log_probs(scores: Sequence[TokenScores], count: int, start: int = 0) -> ModelLogProbs:
    """Scores on the host, one after the other from the token `start` on, each with the `count`
    likeliest of its place.
    """
    scores = scores or [no_scores(0, count, torch.device("cpu"))]
    log_probs = torch.cat([score.log_probs[:, : 1 + count] for score in scores])[start:]
    ids = torch.cat([score.ids[:, : 1 + count] for score in scores])[start:].int()
    return ModelLogProbs(log_probs[:, 0], ids[:, 0], ids[:, 1:], log_probs[:, 1:])
