"""Tiny Megatron-LM GPT checkpoints of every version, cut for any ranks, from the same weights."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEADS, SIZE, HIDDEN, FFN, LAYERS, VOCAB, LENGTH = 4, 6, 24, 32, 4, 40, 16
# How version 0 and 1 order (head, [query, key, value], dimension), the later versions' rows.
ORDERS = {0: (1, 0, 2), 1: (0, 2, 1), 2: (0, 1, 2), 3: (0, 1, 2)}


def state_dict(gated: bool = False, groups: int = HEADS) -> dict[str, torch.Tensor]:
    """Names of a classic GPT -> random tensors, query, key and value as in version 3."""
    torch.manual_seed(4)
    up = 2 * FFN if gated else FFN
    rows = (HEADS + 2 * groups) * SIZE
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "input_layernorm.bias": (HIDDEN,),
        "self_attention.query_key_value.weight": (rows, HIDDEN),
        "self_attention.query_key_value.bias": (rows,),
        "self_attention.dense.weight": (HIDDEN, HIDDEN),
        "self_attention.dense.bias": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.bias": (HIDDEN,),
        "mlp.dense_h_to_4h.weight": (up, HIDDEN),
        "mlp.dense_h_to_4h.bias": (up,),
        "mlp.dense_4h_to_h.weight": (HIDDEN, FFN),
        "mlp.dense_4h_to_h.bias": (HIDDEN,),
    }
    shapes = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    shapes["embedding.position_embeddings.weight"] = (LENGTH, HIDDEN)
    for number in range(LAYERS):
        shapes |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    for part in ("weight", "bias"):
        shapes[f"encoder.final_layernorm.{part}"] = (HIDDEN,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Maker:
    """One way of storing state_dict(): checkpoint version, ranks, and more training arguments.

    file:    of a rank
    renamed: parts of tensors' names -> what they are called here
    """

    version: int = 3
    tp_size: int = 1
    pp_size: int = 1
    args: dict[str, Any] = field(default_factory=dict)
    file: str = "model_optim_rng.pt"
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        return int(self.args.get("num_query_groups") or HEADS)

    def write(self, folder: Path) -> Path:
        state = state_dict(bool(self.args.get("swiglu")), self.groups)
        for tp in range(self.tp_size):
            for pp in range(self.pp_size):
                name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp_size > 1 else "")
                (folder / name).mkdir(parents=True)
                torch.save(self._rank(state, tp, pp), folder / name / self.file)
        return folder

    def _rank(self, state: dict[str, torch.Tensor], tp: int, pp: int) -> dict[str, Any]:
        embedding: dict[str, Any] = {}
        encoder: dict[str, torch.Tensor] = {}
        per_stage = LAYERS // self.pp_size
        for name, tensor in state.items():
            part = self._part(name, tensor, tp)
            if name.startswith("embedding."):
                _, module, kind = name.split(".")
                embedding[module] = {kind: part}
            elif ".layers." in name:
                _, _, number, rest = name.split(".", 3)
                for plain, other in self.renamed.items():
                    rest = rest.replace(plain, other)
                if int(number) // per_stage == pp:
                    if self.version == 0:
                        rest = rest.replace("self_attention", "attention")
                    encoder[f"layers.{int(number) % per_stage}.{rest}"] = part
            elif pp == self.pp_size - 1:
                final = name.removeprefix("encoder.")
                for plain, other in self.renamed.items():
                    final = final.replace(plain, other)
                encoder[final] = part
        model: dict[str, Any] = {}
        if pp == 0:
            model["embedding"] = embedding
        model["transformer" if self.version == 0 else "encoder"] = encoder
        loaded: dict[str, Any] = {"iteration": 7, "model": {"language_model": model}}
        if pp == self.pp_size - 1 > 0:
            head = embedding["word_embeddings"]
            loaded["model"]["word_embeddings_for_head"] = head
        if self.version:
            loaded |= {"checkpoint_version": float(self.version), "args": self._arguments()}
        return loaded | self._training_state()

    def _part(self, name: str, tensor: torch.Tensor, tp: int) -> torch.Tensor:
        if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
            return tensor.chunk(self.tp_size, dim=1)[tp].clone()
        if "query_key_value" in name and self.groups < HEADS:
            return tensor.chunk(self.tp_size)[tp].clone()
        if "query_key_value" in name:
            rows = tensor.reshape(HEADS, 3, SIZE, -1).chunk(self.tp_size)[tp]
            order = (*ORDERS[self.version], 3)
            return rows.permute(order).reshape(-1, *tensor.shape[1:]).clone()
        if "dense_h_to_4h" in name and self.args.get("swiglu"):
            halves = (half.chunk(self.tp_size)[tp] for half in tensor.chunk(2))
            return torch.cat(list(halves))
        if "dense_h_to_4h" in name or "word_embeddings" in name:
            return tensor.chunk(self.tp_size)[tp].clone()
        return tensor

    def _arguments(self) -> argparse.Namespace:
        values = {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": FFN,
            "max_position_embeddings": LENGTH,
            "padded_vocab_size": VOCAB,
            "layernorm_epsilon": 1e-5,
            "params_dtype": torch.float32,
        }
        return argparse.Namespace(**(values | self.args))

    def _training_state(self) -> dict[str, Any]:
        """What a training leaves beside the weights."""
        return {
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
            "rng_state": [
                {
                    "random_rng_state": random.Random(1).getstate(),
                    "np_rng_state": np.random.RandomState(1).get_state(),
                    "torch_rng_state": torch.get_rng_state(),
                }
            ],
        }
