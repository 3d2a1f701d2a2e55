"""Small random T5s of every kind, and what a plain forward pass makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.engine import Engine
from launcher_scripts.models.t5 import T5Config
from tests.checkpoint import reference_forward_t5
from tests.engine.small_models import random_tensors

SOURCE = (5, 60, 11, 11, 2, 33, 47, 9, 28, 64, 3, 17)
DECODER = (0, 9, 33, 21, 4, 50)

GOOGLE = {"logits_scale": 24**-0.5}
GATED = {"gated": True, "activation": "gelu", "tied_embeddings": False}
NEMO = {
    "normalization": "layernorm",
    "norm_eps": 1e-5,
    "bias": True,
    "logits_bias": True,
    "attention_scale": 6**-0.5,
    "activation": "gelu_erf",
}
VARIANTS = {
    "google": GOOGLE,
    "gated": GATED,
    "learned": {**NEMO, "position_embedding": "learned", "max_positions": 40},
    "nemo": NEMO,
    "cross_bias": {
        **NEMO,
        "cross_attention_relative_bias": True,
        "relative_bias_layer_scaling": True,
        "shared_embeddings": False,
    },
    "per_layer": {**GATED, "relative_bias_per_layer": True},
    "separate": {
        **GATED,
        "activation": "silu",
        "shared_embeddings": False,
        "position_embedding": "learned",
        "max_positions": 40,
    },
}


def t5_config(**changes: object) -> T5Config:
    """A T5 of two and three layers that runs in milliseconds."""
    values: dict[str, object] = {
        "vocab_size": 67,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "hidden_size": 24,
        "num_heads": 4,
        "head_size": 6,
        "ffn_size": 32,
        "num_buckets": 8,
        "max_distance": 16,
        "start_id": 0,
        "pad_id": 0,
    }
    values |= changes
    return T5Config(**{"end_id": values["vocab_size"], **values})


def t5_tensors(config: T5Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole tensors by canonical name, those that are one in the model being equal."""
    tensors = random_tensors(config, seed)
    tensors["shared.weight"] = np.ascontiguousarray(tensors["shared.weight_T"].T)
    if config.tied_embeddings and not config.encoder_only:
        name = "shared.weight_T" if config.shared_embeddings else "decoder.embed_tokens.weight"
        tensors["lm_head.weight"] = tensors[name]
    return tensors


class Plain:
    """The forward pass written plainly, over the same tensors."""

    def __init__(self, config: T5Config, tensors: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self.weights = {name: torch.from_numpy(values) for name, values in tensors.items()}

    def hidden(self, source: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([source])
        return reference_forward_t5.encode(self.weights, self.config, ids)[0]

    def logits(self, source: Sequence[int], decoder: Sequence[int]) -> torch.Tensor:
        """[T, vocab] after each of the decoder's ids."""
        ids, targets = torch.tensor([source]), torch.tensor([decoder])
        return reference_forward_t5.logits(self.weights, self.config, ids, targets)[0]

    def greedy(self, source: Sequence[int], count: int) -> list[int]:
        return reference_forward_t5.greedy(self.weights, self.config, list(source), count)


def as_encoder(config: T5Config) -> T5Config:
    return replace(config, encoder_only=True)


def encode(engine: Engine, source: Sequence[int], *, attentions: bool = False) -> GenerateOutput:
    request = GenerateRequest(
        tuple(source), output_len=0, return_hidden_state=True, return_attentions=attentions
    )
    return engine.submit(request).result(60)


def decoder_logits(engine: Engine, source: Sequence[int], decoder: Sequence[int]) -> torch.Tensor:
    """Logits after each of the decoder's ids, float32 [T, vocab]."""
    request = GenerateRequest(
        tuple(source), output_len=0, decoder_input_ids=tuple(decoder), return_context_logits=True
    )
    return engine.submit(request).result(60).context_logits
