"""An open GGUF file: which architecture it is of, and what config.json would say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import ReaderTensor

from launcher_scripts.checkpoint.formats.gguf_fields import Fields
from launcher_scripts.checkpoint.formats.gguf_file import open_gguf, read_tensor
from launcher_scripts.checkpoint.sources.gguf_architectures import (
    ARCHITECTURES,
    GGUFArchitecture,
    Model,
)
from launcher_scripts.checkpoint.sources.gguf_restored import Heads
from launcher_scripts.checkpoint.sources.gguf_rope import FACTORS


@dataclass(frozen=True)
class GGUFModel:
    """What was read.

    row:     the architecture
    names:   what its tensors are called in Hugging Face
    raw:     config.json, without token ids
    tensors: name -> tensor, without those that are part of `raw`
    """

    fields: Fields
    row: GGUFArchitecture
    names: Mapping[str, str]
    raw: dict[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def heads(self) -> Heads:
        return Heads(self.raw["num_attention_heads"], self.raw["num_key_value_heads"])


def read_model(path: Path) -> GGUFModel:
    """Raises CheckpointError for what is damaged or not supported; problems that only the model's
    family can see are left to it."""
    reader = open_gguf(path)
    fields = Fields(reader, path)
    _check_kind(fields)
    row = ARCHITECTURES[fields.architecture]
    if row.experts is not None and fields.value(f"{fields.architecture}.expert_count", 0):
        row = row.experts
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {
        name: tuple(int(size) for size in reversed(tensor.shape))
        for name, tensor in tensors.items()
    }
    factors = {name: read_tensor(tensors.pop(name)) for name in FACTORS if name in tensors}
    model = Model(fields, shapes, factors)
    if fields.size("block_count") > max(len(tensors), 1):
        fields.problems.add(
            "block_count is more than there are tensors", got=fields.get("block_count")
        )
    fields.raise_problems()
    raw = {"model_type": row.model_type, **row.config(model)}
    if factors and "rope_parameters" not in raw:
        fields.problems.add("there are no rotary positions to divide", got=sorted(factors))
    fields.refuse_others()
    fields.raise_problems()
    return GGUFModel(fields, row, {**row.names, **row.renamed(model)}, raw, tensors)


def _check_kind(fields: Fields) -> None:
    """Raise for files that hold no model of a known architecture, or only a part of one."""
    if fields.architecture not in ARCHITECTURES:
        fields.problems.add(
            "unknown architecture", got=fields.architecture, choices=sorted(ARCHITECTURES)
        )
    kind = fields.value("general.type", "model")
    if kind != "model":
        fields.problems.add("unknown general.type", got=kind, choices=("model",))
    parts = fields.value("split.count", 0)
    if parts not in (0, 1):
        fields.problems.add(
            "it is one of several parts: join them with llama.cpp's llama-gguf-split --merge",
            got=parts,
        )
    fields.raise_problems()
