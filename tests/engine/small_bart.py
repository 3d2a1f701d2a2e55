"""A small random BART, and what a plain forward pass makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from launcher_scripts.models.bart import BartConfig
from tests.checkpoint import reference_forward_bart
from tests.engine.small_models import random_tensors


def bart_config(**changes: Any) -> BartConfig:
    """A BART of two and three layers that runs in milliseconds."""
    values: dict[str, Any] = {
        "vocab_size": 67,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "hidden_size": 24,
        "num_heads": 4,
        "num_decoder_heads": 4,
        "ffn_size": 32,
        "decoder_ffn_size": 40,
        "max_positions": 40,
    }
    values |= changes
    return BartConfig(**{"end_id": values["vocab_size"], **values})


def plain_logits(config: BartConfig, source: Sequence[int], decoder: Sequence[int]) -> torch.Tensor:
    """[T, vocab] after each of the decoder's ids, of the model with random_tensors(config)."""
    weights = {name: torch.from_numpy(each) for name, each in random_tensors(config).items()}
    ids, targets = torch.tensor([source]), torch.tensor([decoder])
    return reference_forward_bart.logits(weights, config, ids, targets)[0]


def plain_greedy(config: BartConfig, source: Sequence[int], count: int) -> list[int]:
    out = [config.start_id]
    for _ in range(count):
        out.append(int(plain_logits(config, source, out)[-1].argmax()))
    return out[1:]
