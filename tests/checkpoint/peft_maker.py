"""Adapters as Hugging Face PEFT stores them, and by its published formulas what they make of a
model (arXiv:2106.09685 for LoRA, arXiv:2402.09353 for DoRA)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

STEM = "base_model.model."


class PeftMaker:
    """An adapter of a model, with random values.

    tensors: what the adapter's file holds
    merged:  the model's state dict with the adapter merged
    """

    def __init__(self, model: PreTrainedModel, seed: int = 3) -> None:
        self.merged = {name: value.clone() for name, value in model.state_dict().items()}
        self.tensors: dict[str, torch.Tensor] = {}
        self.inputs_first = model.config.model_type == "gpt_oss"
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    def modules(self, *endings: str) -> list[str]:
        """Every linear layer whose name ends so."""
        names = [name.removesuffix(".weight") for name in self.merged if name.endswith(".weight")]
        return [name for name in names if name.endswith(endings)]

    def lora(
        self, module: str, scale: float, rank: int = 4, *, conv: bool = False, dora: bool = False
    ) -> None:
        """conv: GPT-2's layers, which are stored [in, out]."""
        weight = self.merged[f"{module}.weight"]
        weight = weight.T if conv else weight
        down, up = self.random(rank, weight.shape[1]), self.random(weight.shape[0], rank)
        merged = weight + scale * (up @ down)
        self._put(module, lora_A=down, lora_B=up)
        if dora:
            magnitude = 1 + self.random(weight.shape[0]).abs()
            self.tensors[f"{STEM}{module}.lora_magnitude_vector"] = magnitude
            merged = magnitude[:, None] * merged / merged.norm(dim=1, keepdim=True)
        self.merged[f"{module}.weight"] = (merged.T if conv else merged).contiguous()

    def experts(
        self, module: str, *names: str, scale: float, rank: int = 4, swapped: bool = False
    ) -> None:
        """LoRA of parameters of all experts: A has an expert's ranks together, B a rank's experts.

        module:  the model's module of experts, which PEFT wraps once for each name
        swapped: A and B as PEFT before 0.20 has them for weights [experts, out, in]
        """
        for depth, name in enumerate(reversed(names)):
            weight = self.merged[f"{module}.{name}"]
            count, first, second = weight.shape
            inputs_first = swapped or self.inputs_first
            inputs, outputs = (first, second) if inputs_first else (second, first)
            down, up = self.random(rank * count, inputs), self.random(outputs, rank * count)
            for expert in range(count):
                own = up[:, expert::count] @ down[expert * rank : (expert + 1) * rank]
                weight[expert] += scale * (own.T if inputs_first else own)
            self._put(module + ".base_layer" * depth, lora_A=down, lora_B=up)

    def embedding(self, module: str, scale: float, rank: int = 4) -> None:
        """LoRA of a table [vocabulary, hidden]."""
        table = self.merged[f"{module}.weight"]
        down, up = self.random(rank, table.shape[0]), self.random(table.shape[1], rank)
        self.tensors[f"{STEM}{module}.lora_embedding_A"] = down
        self.tensors[f"{STEM}{module}.lora_embedding_B"] = up
        self.merged[f"{module}.weight"] = table + scale * (up @ down).T

    def lora_bias(self, module: str, scale: float) -> None:
        """A bias of lora_B."""
        bias = self.random(*self.merged[f"{module}.bias"].shape)
        self.tensors[f"{STEM}{module}.lora_B.bias"] = bias
        self.merged[f"{module}.bias"] += scale * bias

    def full(self, name: str, stored: str | None = None) -> None:
        """A tensor that was trained as a whole. stored: its name in the file"""
        values = self.random(*self.merged[name].shape)
        self.tensors[STEM + (stored or name)] = values
        self.merged[name] = values.clone()

    def tokens(self, module: str, rows: list[int]) -> None:
        """Rows of a table that were trained."""
        values = self.random(len(rows), self.merged[f"{module}.weight"].shape[1])
        self.tensors[f"{STEM}{module}.token_adapter.trainable_tokens_delta"] = values
        self.merged[f"{module}.weight"][rows] = values

    def _put(self, module: str, **parts: torch.Tensor) -> None:
        for part, values in parts.items():
            self.tensors[f"{STEM}{module}.{part}.weight"] = values

    def write(self, folder: Path, *, binary: bool = False, **config: Any) -> str:
        """The adapter's folder."""
        folder.mkdir(parents=True)
        values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.2", **config}
        (folder / "adapter_config.json").write_text(json.dumps(values))
        if binary:
            torch.save(self.tensors, folder / "adapter_model.bin")
        else:
            stored = {name: values.contiguous() for name, values in self.tensors.items()}
            save_file(stored, folder / "adapter_model.safetensors")
        return str(folder)
