"""GGUF files as a source: dequantised tensor by tensor when written, named as in Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.dtypes import BFLOAT16, Workspace
from launcher_scripts.checkpoint.formats.gguf_file import Fields, open_gguf, read_tensor
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import FullTensors, Hints, renamed
from launcher_scripts.checkpoint.sources.gguf_architectures import (
    ARCHITECTURES,
    GGUFArchitecture,
    Model,
)
from launcher_scripts.checkpoint.sources.gguf_parameters import FACTORS, Heads, Restored
from launcher_scripts.checkpoint.sources.gguf_tokenizer import tokenizer_files, tokenizer_metadata
from launcher_scripts.checkpoint.sources.huggingface_architectures import (
    ARCHITECTURES as HUGGINGFACE,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models.family import ModelConfig


@dataclass(frozen=True)
class GGUFModel:
    """A model as it was read from a GGUF file.

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
    fields.reject_others()
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


_LAYER = re.compile(r"^blk\.(\d+)\.")
_STORED_DTYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.BF16: BFLOAT16,
}


@dataclass(frozen=True)
class QuantisedTensor(SourceTensor):
    """A tensor of a GGUF file, which is dequantised to float32 when it is read.

    stored:   gguf's tensor
    heads:    for `restored`
    expert:   its place along the first axis, where the tensors of all experts are stored as one
    restored: what undoes llama.cpp's change of it, if there is one
    """

    stored: ReaderTensor
    heads: Heads
    expert: int | None = None
    restored: Restored | None = None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The stored element type; of quantized values the type of their scales, float16."""
        return _STORED_DTYPES.get(self.stored.tensor_type, np.dtype("<f2"))

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> NDArray[Any]:
        values = read_tensor(self.stored, self.expert)
        return values if self.restored is None else self.restored.apply(values, self.heads)


@dataclass(frozen=True)
class GGUFCheckpoint(FullTensors):
    """An opened file.

    architecture: general.architecture
    tensors:      Hugging Face's name -> tensor
    stored_names: Hugging Face's name -> what the file calls such a tensor, of all it may have
    metadata:     the tokenizer's fields
    raw:          config.json of the same model in transformers
    """

    format: ClassVar[str] = "gguf"

    archive: Archive
    config: ModelConfig
    architecture: str
    dialects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    stored_names: Mapping[str, str]
    metadata: Mapping[str, Any] = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Return whether the checkpoint is a GGUF file."""
        return archive.container == "gguf"

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> GGUFCheckpoint:
        """Raises CheckpointError for what is damaged or not supported."""
        if archive.container != "gguf":
            raise CheckpointError(problem(f"{archive.path} is not a GGUF file"))
        model = read_model(archive.path)
        metadata = tokenizer_metadata(model.fields.reader)
        row = model.row
        tensors = renamed(
            (
                (name, target, tensor)
                for name, stored in model.tensors.items()
                for target, tensor in _tensors(_renamed(name, model.names), name, stored, model)
            ),
            str(archive.path),
        )
        values = model.raw | _token_ids(metadata)
        raw = RawConfig(values, tensors.keys(), model.fields.problems)
        target = HUGGINGFACE[row.model_type]
        try:
            config = target.read(raw)
        except CheckpointError:
            model.fields.raise_problems()
            raise
        model.fields.raise_problems()
        names = {source_name: name for name, source_name in model.names.items()}
        return cls(
            archive,
            config,
            model.fields.architecture,
            target.dialects(raw),
            tensors,
            names,
            metadata,
            values,
        )

    @property
    def knows_token_ids(self) -> bool:
        """Return whether the file names them."""
        return "eos_token_id" in self.metadata

    def stored_name(self, name: str) -> str:
        """Return llama.cpp's name of a tensor of transformers."""
        layer = re.search(r"\.(\d+)\.", name)
        stem, _, part = re.sub(r"\.\d+\.", ".*.", name, count=1).rpartition(".")
        stem = re.sub(r"\.experts\.\d+\.", ".experts.#.", stem)
        if stem not in self.stored_names:
            return name
        return self.stored_names[stem].replace("*", layer[1] if layer else "") + f".{part}"

    def config_json(self) -> Mapping[str, Any]:
        """Return config.json of the same model in transformers."""
        return self.raw

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        return {"architecture": self.architecture, "config": dict(self.raw)}

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and the files beside it, made of the file's vocabulary."""
        return tokenizer_files(self.metadata)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name; the file's own where there is none, which no model claims."""
    layer, generic = _LAYER.match(name), _LAYER.sub("blk.*.", name)
    stem, _, part = generic.rpartition(".")
    new_name = names.get(generic) or (f"{names[stem]}.{part}" if stem in names else name)
    return new_name.replace("*", layer.group(1) if layer else "")


def _tensors(
    renamed: str, name: str, stored: ReaderTensor, model: GGUFModel
) -> Iterator[tuple[str, QuantisedTensor]]:
    """Hugging Face's names and tensors of one of the file's; of experts there are several."""
    key = _LAYER.sub("blk.*.", name)
    restored = model.row.restored.get(key) or model.row.restored.get(key.rpartition(".")[0])
    shape = tuple(int(size) for size in reversed(stored.shape))
    dtype = np.dtype("<f4")
    if "#" in renamed and 0 not in shape:
        for expert in range(shape[0]):
            part = QuantisedTensor(shape[1:], dtype, (), stored, model.heads, expert)
            yield renamed.replace("#", str(expert)), part
        return
    if restored is not None:
        shape = restored.shape(shape)
    yield renamed, QuantisedTensor(shape, dtype, (), stored, model.heads, restored=restored)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids as config.json has them; what has no start starts with its end."""
    end = metadata.get("eos_token_id")
    return {
        "bos_token_id": metadata.get("bos_token_id", end),
        "eos_token_id": end,
        "pad_token_id": metadata.get("padding_token_id"),
    }
