"""A small random Agm, and what a plain forward pass makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from launcher_scripts.models.agm import AgmConfig
from tests.checkpoint import reference_forward_bart
from tests.engine.small_models import random_tensors


def agm_config(**changes: object) -> AgmConfig:
    """An Agm of three layers that runs in milliseconds."""
    values: dict[str, object] = {
        "vocab_size": 67,
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_size": 48,
        "num_buckets": 8,
        "max_distance": 12,
        "attention_scale": 1.0,
        "start_id": 2,
    }
    values |= changes
    return AgmConfig(**{"end_id": values["vocab_size"], **values})


def agm_tensors(config: AgmConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole tensors by canonical name."""
    tensors = random_tensors(config, seed)
    if config.tied_embeddings:
        tensors["lm_head.decoder.weight"] = tensors["shared.weight"]
    return tensors


def plain_logits(
    config: AgmConfig, tensors: Mapping[str, np.ndarray], ids: Sequence[int]
) -> torch.Tensor:
    """[T, vocab] after each of the ids."""
    weights = {name: torch.from_numpy(values) for name, values in tensors.items()}
    return reference_forward_bart.agm_logits(weights, config, torch.tensor([ids]))[0]


def plain_greedy(
    config: AgmConfig, tensors: Mapping[str, np.ndarray], ids: Sequence[int], count: int
) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(plain_logits(config, tensors, out)[-1].argmax()))
    return out[len(ids) :]
