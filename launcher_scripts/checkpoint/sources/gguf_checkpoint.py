"""GGUF files as a source: dequantised tensor by tensor when written, named as in Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.gguf_file import Fields, open_gguf, read_tensor
from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, SourceTensor, Workspace
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    PREDICTORS_NOTE,
    FullTensors,
    Hints,
    renamed,
)
from launcher_scripts.checkpoint.sources.gguf_architectures import ARCHITECTURES
from launcher_scripts.checkpoint.sources.gguf_parameters import (
    FACTORS,
    GGUFArchitecture,
    Heads,
    Joined,
    Model,
    Restored,
    predictors,
)
from launcher_scripts.checkpoint.sources.gguf_tokenizer import (
    gguf_tokenizer_files,
    tokenizer_metadata,
)
from launcher_scripts.checkpoint.sources.huggingface_architectures import (
    ARCHITECTURES as HUGGINGFACE,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import (
    GEMMAS_WITH_INPUTS,
    tensors_of_layers,
)
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

    def heads(self, layer: int) -> Heads:
        """Heads of a layer, as far as they order its rows."""
        queries = self.raw.get("num_attention_heads") or 1
        keys = self.raw.get("num_key_value_heads") or queries
        names = [
            f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "value_head_dim")
        ]
        delta_keys, values, size = (int(self.raw.get(name, 1)) for name in names)
        local = self.fields.of_layer("attention.head_count_kv", layer, keys) or keys
        return Heads(queries, local, (delta_keys, values, values * size))


def read_model(path: Path) -> GGUFModel:
    """Raises CheckpointError for what is damaged or not supported; problems that only the model's
    family can see are left to it."""
    reader = open_gguf(path)
    fields = Fields(reader, path)
    _check_kind(fields)
    last, count = fields.of_layer("block_count", 0, 0), predictors(fields)
    left_out = range(last - count, last)
    tensors = {
        tensor.name: tensor for tensor in reader.tensors if _generic(tensor.name)[1] not in left_out
    }
    shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    factors = {name: read_tensor(tensors.pop(name)) for name in FACTORS if name in tensors}
    model = Model(fields, shapes, factors)
    row = ARCHITECTURES[fields.architecture]
    row = row.variant(model) or row
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
    """Raise for files that hold no model of a known architecture."""
    if fields.architecture not in ARCHITECTURES:
        fields.problems.add(
            "unknown architecture", got=fields.architecture, choices=sorted(ARCHITECTURES)
        )
    kind = fields.value("general.type", "model")
    if kind != "model":
        fields.problems.add("unknown general.type", got=kind, choices=("model",))
    fields.raise_problems()


_LAYER = re.compile(r"^((?:enc\.|dec\.)?blk)\.(\d+)\.")
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
    part:     its columns
    """

    stored: ReaderTensor
    heads: Heads
    expert: int | None = None
    restored: Restored | None = None
    part: slice | None = None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The stored element type; of quantized values the type of their scales, float16."""
        return _STORED_DTYPES.get(self.stored.tensor_type, np.dtype("<f2"))

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> NDArray[Any]:
        values = read_tensor(self.stored, self.expert, self.part)
        return values if self.restored is None else self.restored.apply(values, self.heads)

    def columns(self, part: slice) -> SourceTensor:
        return replace(self, shape=(self.shape[0], part.stop - part.start), part=part)


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
        tensors: Mapping[str, SourceTensor] = renamed(
            (
                (name, target, tensor)
                for name, stored in model.tensors.items()
                for target, tensor in _tensors(name, stored, model)
            ),
            str(archive.path),
        )
        values = model.raw | _token_ids(metadata)
        if row.model_type in GEMMAS_WITH_INPUTS:
            tensors = tensors_of_layers(tensors, values)
        raw = RawConfig(values, tensors.keys(), model.fields.problems)
        target = HUGGINGFACE[row.model_type]
        try:
            config = target.read(raw)
        except CheckpointError:
            model.fields.raise_problems()
            raise
        model.fields.raise_problems()
        names = {source_name: name for name, source_name in model.names.items()}
        for target_name, joined in row.joined.items():
            names[target_name.rpartition(".")[0]] = joined.names[0].rpartition(".")[0]
        return cls(
            archive,
            config,
            model.fields.architecture,
            target.dialects(raw),
            tensors,
            names,
            metadata,
            values,
            (PREDICTORS_NOTE,) if predictors(model.fields) else (),
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
        return gguf_tokenizer_files(self.metadata)


@dataclass(frozen=True)
class JoinedTensor(SourceTensor):
    """A tensor that the file has in several.

    parts:  those, as they are stored
    joined: how it is made of them
    raw:    config.json
    """

    parts: tuple[QuantisedTensor, ...]
    joined: Joined
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return self.parts[0].stored_dtype

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> NDArray[Any]:
        return self.joined.apply([part.read() for part in self.parts], self.raw)


def _generic(name: str) -> tuple[str, int | None]:
    """A name with `*` for its layer, and the layer."""
    match = _LAYER.match(name)
    if match is None:
        return name, None
    return _LAYER.sub(r"\1.*.", name), int(match[2])


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name; the file's own where there is none, which no model claims."""
    generic, layer = _generic(name)
    stem, _, part = generic.rpartition(".")
    if name in names:
        return names[name]
    new_name = names.get(generic) or (f"{names[stem]}.{part}" if stem in names else name)
    return new_name.replace("*", "" if layer is None else str(layer))


def _tensors(
    name: str, stored: ReaderTensor, model: GGUFModel
) -> Iterator[tuple[str, QuantisedTensor | JoinedTensor]]:
    """Hugging Face's names and tensors of one of the file's; of experts there are several, and of
    tensors that belong together the first gives all."""
    key, layer = _generic(name)
    for target, joined in model.row.joined.items():
        parts = [part.replace("*", str(layer)) for part in joined.names]
        if key in joined.names and all(part in model.tensors for part in parts):
            if key == joined.names[0]:
                new_name = target.replace("*", str(layer)).rstrip("#")
                yield new_name, _joined([model.tensors[part] for part in parts], joined, model)
            return
    renamed = _renamed(name, model.names)
    restored = model.row.restored.get(key) or model.row.restored.get(key.rpartition(".")[0])
    shape, dtype = _shape(stored), np.dtype("<f4")
    heads = model.heads(layer or 0)
    if "#" in renamed and 0 not in shape:
        for expert in range(shape[0]):
            part = QuantisedTensor(shape[1:], dtype, (), stored, heads, expert)
            yield renamed.replace("#", str(expert)), part
        return
    if restored is not None:
        shape = restored.shape(shape)
    yield renamed, QuantisedTensor(shape, dtype, (), stored, heads, restored=restored)


def _joined(stored: list[ReaderTensor], joined: Joined, model: GGUFModel) -> JoinedTensor:
    dtype, heads = np.dtype("<f4"), model.heads(0)
    parts = tuple(QuantisedTensor(_shape(tensor), dtype, (), tensor, heads) for tensor in stored)
    shapes = [part.shape for part in parts]
    shape = joined.rows(shapes), shapes[-1][-1]
    return JoinedTensor(shape, dtype, (), parts, joined, model.raw)


def _shape(stored: ReaderTensor) -> tuple[int, ...]:
    """The shape, rows first."""
    return tuple(int(size) for size in reversed(stored.shape))


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids as config.json has them; what has no start starts with its end."""
    end = metadata.get("eos_token_id")
    return {
        "bos_token_id": metadata.get("bos_token_id", end),
        "eos_token_id": end,
        "pad_token_id": metadata.get("padding_token_id"),
    }
