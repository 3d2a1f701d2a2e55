"""GGUF files of the llama architecture as a source: dequantised tensor by tensor when written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from launcher_scripts.checkpoint.archive import Archive
from launcher_scripts.checkpoint.hints import Hints
from launcher_scripts.checkpoint.source_checkpoint import WholeTensors
from launcher_scripts.checkpoint.source_tensor import SourceTensor
from launcher_scripts.checkpoint.workspace import Workspace
from launcher_scripts.errors import CheckpointError, problem
from launcher_scripts.models.gpt import GPTConfig

SUFFIX = ".gguf"


@dataclass(frozen=True)
class QuantisedTensor(SourceTensor):
    """A tensor of a GGUF file; reading it makes a float32 copy."""

    name: str = ""
    file: Any = None

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> np.ndarray:
        values: np.ndarray = self.file.read(self.name)
        return values


@dataclass(frozen=True)
class GGUFCheckpoint(WholeTensors):
    """An opened file.

    tensors:  name -> tensor
    metadata: the tokenizer's fields
    """

    format: ClassVar[str] = "gguf"

    archive: Archive
    config: GPTConfig
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, Any]
    dialects: tuple[str, ...] = ("gguf_llama",)
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Whether the checkpoint is a GGUF file."""
        return archive.container == "gguf"

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> GGUFCheckpoint:
        """Raises CheckpointError for another architecture and for what is damaged."""
        from launcher_scripts.checkpoint.gguf_llama import GGUFLlama
        from launcher_scripts.checkpoint.gguf_tokenizer import tokenizer_metadata

        if archive.container != "gguf":
            raise CheckpointError(problem(f"{archive.path} is no GGUF file"))
        file = GGUFLlama(archive.path)
        tensors = {
            name: QuantisedTensor(
                tuple(int(size) for size in reversed(tensor.shape)),
                np.dtype("<f4"),
                (),
                name,
                file,
            )
            for name, tensor in file.tensors.items()
        }
        metadata = tokenizer_metadata(file.reader)
        return cls(archive, _config(file, metadata), tensors, metadata)

    @property
    def knows_token_ids(self) -> bool:
        """The file names them."""
        return True

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and special_tokens_map.json, made of the file's vocabulary and merges."""
        from launcher_scripts.checkpoint.gguf_tokenizer import build_tokenizer, special_tokens

        return {
            "tokenizer.json": build_tokenizer(self.metadata).to_str().encode(),
            "special_tokens_map.json": json.dumps(special_tokens(self.metadata)).encode(),
        }


def _config(file: Any, metadata: Mapping[str, Any]) -> GPTConfig:
    shape = file.shape
    ids = {
        field: int(metadata[key])
        for field, key in (
            ("start_id", "bos_token_id"),
            ("end_id", "eos_token_id"),
            ("pad_id", "padding_token_id"),
        )
        if key in metadata
    }
    return GPTConfig(
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        ffn_size=shape.ffn_size,
        max_positions=shape.max_positions,
        position_embedding="rope",
        rotary_base=shape.rotary_base,
        normalization="rmsnorm",
        norm_eps=shape.norm_eps,
        activation="silu",
        gated=True,
        attention_bias=False,
        mlp_bias=False,
        tied_embeddings=file.tied_embeddings,
        **ids,
    )
