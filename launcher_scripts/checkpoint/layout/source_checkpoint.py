"""What the readers of checkpoints have in common, and what a user tells them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.shards import Shards, find_whole
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenRule
from launcher_scripts.models.family import Partition

PREDICTORS_NOTE = "the layers for multi-token prediction are left out"


@dataclass(frozen=True)
class Hints:
    """Answers to what a source may ask.

    num_heads:    attention heads, for a checkpoint without hyperparameters
    encoder_only: of an encoder-decoder, export the encoder
    allow_custom_code_config: take a model for the one of its model type, although its configuration
                              names code or a class of its own
    training_checkpoint: of a training's checkpoints, the `last`, the `best`, or one by its name
    """

    num_heads: int | None = None
    encoder_only: bool = False
    training_checkpoint: str = "last"
    allow_custom_code_config: bool = False


class SourceCheckpoint(ABC):
    """What a reader of some format offers to the export.

    By default it leaves the special ids to its tokenizer, and has weights alone.
    format:   its row of SOURCES
    dialects: dialects of the weight table, the first that has a row wins
    notes:    what a user should know about the model
    """

    format: ClassVar[str]
    archive: Archive
    config: Any
    dialects: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def token_rule(self) -> TokenRule | None:
        """The ids the model was trained with, given its tokenizer; None: the tokenizer's own."""
        return None

    @property
    def knows_token_ids(self) -> bool:
        """Whether start, end and pad id of `config` are the model's own, not defaults."""
        return False

    def stored_name(self, name: str) -> str:
        """What the checkpoint's files call a tensor, for errors."""
        return name

    @property
    def adapters(self) -> Sequence[Any]:
        """Adapters (merging.Adapter) that were saved together with their base."""
        return ()

    @abstractmethod
    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer; an error if it has none."""

    def extra_files(self) -> dict[str, bytes]:
        """Name -> content of other files to put beside the weights."""
        return {}

    def details(self) -> dict[str, Any]:
        """What the manifest records besides path, format and dialects."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What the manifest records about the source."""
        return {
            "path": str(self.archive.path),
            "format": self.format,
            **self.details(),
            "dialects": list(self.dialects),
        }

    @abstractmethod
    def names(self) -> set[str]:
        """Every tensor that must find its place in the target."""

    @abstractmethod
    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        """One whole tensor, merged from its shards as `partition` says; None if it is not there.

        sections: see Layout. The source's weights are [out, in], the transpose of the stored form.
        """


class WholeTensors(SourceCheckpoint):
    """Every tensor in one place, by its name."""

    tensors: Mapping[str, SourceTensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def find(self, name: str, _partition: Partition, _sections: int = 1) -> SourceTensor | None:
        return self.tensors.get(name)


class TensorShards(SourceCheckpoint):
    """Every tensor in parts of tensor-parallel ranks, by its name."""

    shards: Shards

    def names(self) -> set[str]:
        return set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        return find_whole(self.shards, name, partition, sections)
