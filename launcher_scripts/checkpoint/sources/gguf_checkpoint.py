"""GGUF files as a source: dequantised tensor by tensor when written, named as in Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.checkpoint.sources.hints import Hints
from launcher_scripts.checkpoint.sources.huggingface import ARCHITECTURES as HUGGINGFACE
from launcher_scripts.checkpoint.sources.huggingface_raw import RawConfig
from launcher_scripts.checkpoint.sources.nemo_tokenizer import ADVICE
from launcher_scripts.checkpoint.sources.source_checkpoint import WholeTensors
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models.family import ModelConfig

_LAYER = re.compile(r"^blk\.(\d+)\.")


@dataclass(frozen=True)
class QuantisedTensor(SourceTensor):
    """A tensor of a GGUF file, which is dequantised to float32 when it is read.

    stored:   gguf's tensor
    expert:   its place along the first axis, where the tensors of all experts are stored as one
    restored: what undoes llama.cpp's change of it, if there is one
    heads:    for `restored`
    """

    stored: Any = None
    expert: int | None = None
    restored: Any = None
    heads: Any = None

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> NDArray[Any]:
        from launcher_scripts.checkpoint.formats.gguf_file import read_tensor

        values = read_tensor(self.stored, self.expert)
        return values if self.restored is None else self.restored.apply(values, self.heads)


@dataclass(frozen=True)
class GGUFCheckpoint(WholeTensors):
    """An opened file.

    architecture: general.architecture
    tensors:      Hugging Face's name -> tensor
    stored_names: Hugging Face's name -> what the file calls such a tensor, of all it may have
    metadata:     the tokenizer's fields
    """

    format: ClassVar[str] = "gguf"

    archive: Archive
    config: ModelConfig
    architecture: str
    dialects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    stored_names: Mapping[str, str]
    metadata: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Whether the checkpoint is a GGUF file."""
        return archive.container == "gguf"

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> GGUFCheckpoint:
        """Raises CheckpointError for what is damaged or not supported."""
        from launcher_scripts.checkpoint.sources.gguf_model import read_model
        from launcher_scripts.checkpoint.sources.gguf_tokenizer import tokenizer_metadata

        if archive.container != "gguf":
            raise CheckpointError(problem(f"{archive.path} is no GGUF file"))
        model = read_model(archive.path)
        metadata = tokenizer_metadata(model.fields.reader)
        row = model.row
        tensors = dict(
            pair
            for name, stored in model.tensors.items()
            for pair in _tensors(_renamed(name, model.names), name, stored, model)
        )
        raw = RawConfig(model.raw | _token_ids(metadata), tensors.keys(), archive.path)
        raw.problems = model.fields.problems
        target = HUGGINGFACE[row.model_type]
        try:
            config = target.read(raw)
        except CheckpointError:
            model.fields.raise_problems()
            raise
        model.fields.raise_problems()
        variants = (target.dialect + name for name in target.variants(raw))
        dialects = (*variants, target.dialect, *target.inherits)
        names = {theirs: ours for ours, theirs in model.names.items()}
        return cls(archive, config, model.fields.architecture, dialects, tensors, names, metadata)

    @property
    def knows_token_ids(self) -> bool:
        """Whether the file names them."""
        return "eos_token_id" in self.metadata

    def stored_name(self, name: str) -> str:
        """What llama.cpp calls a tensor of transformers."""
        layer = re.search(r"\.(\d+)\.", name)
        stem, _, part = re.sub(r"\.\d+\.", ".*.", name, count=1).rpartition(".")
        stem = re.sub(r"\.experts\.\d+\.", ".experts.#.", stem)
        if stem not in self.stored_names:
            return name
        return self.stored_names[stem].replace("*", layer[1] if layer else "") + f".{part}"

    def details(self) -> dict[str, Any]:
        """What the manifest records besides path, format and dialects."""
        return {"architecture": self.architecture}

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and the files beside it, made of the file's vocabulary."""
        from launcher_scripts.checkpoint.sources.gguf_tokenizer import tokenizer_files

        files = tokenizer_files(self.metadata)
        tokens, rows = len(self.metadata["tokens"]), self.config.vocab_size
        if tokens > rows:
            raise CheckpointError(
                problem(
                    "the GGUF tokenizer has more tokens than token_embd.weight has rows",
                    got=tokens,
                    choices=(f"at most {rows}",),
                    change=ADVICE,
                )
            )
        return files


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name; the file's own where there is none, which no model claims."""
    layer = _LAYER.match(name)
    stem, _, part = _LAYER.sub("blk.*.", name).rpartition(".")
    if stem not in names:
        return name
    return f"{names[stem].replace('*', layer.group(1) if layer else '')}.{part}"


def _tensors(
    renamed: str, name: str, stored: Any, model: Any
) -> Iterator[tuple[str, QuantisedTensor]]:
    """Hugging Face's names and tensors of one of the file's; of experts there are several."""
    key = _LAYER.sub("blk.*.", name)
    restored = model.row.restored.get(key) or model.row.restored.get(key.rpartition(".")[0])
    shape = tuple(int(size) for size in reversed(stored.shape))
    dtype = np.dtype("<f4")
    if "#" in renamed and 0 not in shape:
        for expert in range(shape[0]):
            part = QuantisedTensor(shape[1:], dtype, (), stored, expert)
            yield renamed.replace("#", str(expert)), part
        return
    if restored is not None:
        shape = restored.shape(shape)
    yield renamed, QuantisedTensor(shape, dtype, (), stored, None, restored, model.heads)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids as config.json has them; what has no start starts with its end."""
    end = metadata.get("eos_token_id")
    return {
        "bos_token_id": metadata.get("bos_token_id", end),
        "eos_token_id": end,
        "pad_token_id": metadata.get("padding_token_id"),
    }
