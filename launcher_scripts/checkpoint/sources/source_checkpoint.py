"""What the readers of checkpoints have in common (plan.SourceCheckpoint): how tensors are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.sources.merging import Adapter
from launcher_scripts.checkpoint.sources.shards import Shards, find_whole
from launcher_scripts.models.family import Partition


@dataclass(frozen=True)
class Hints:
    """Answers to what a source may ask.

    num_heads:    attention heads, for a checkpoint without hyperparameters
    encoder_only: of an encoder-decoder, export the encoder
    training_checkpoint: of a training's checkpoints, the `last`, the `best`, or one by its name
    """

    num_heads: int | None = None
    encoder_only: bool = False
    training_checkpoint: str = "last"


class ReadCheckpoint:
    """A checkpoint that leaves the special ids to its tokenizer and has weights alone.

    format: its row of SOURCES
    """

    format: ClassVar[str]
    archive: Archive
    dialects: Sequence[str]

    @property
    def token_rule(self) -> Any:
        """Special ids are the tokenizer's or the configuration's."""
        return None

    @property
    def knows_token_ids(self) -> bool:
        """The ids are the tokenizer's."""
        return False

    def stored_name(self, name: str) -> str:
        """What the checkpoint's files call a tensor, for errors."""
        return name

    @property
    def adapters(self) -> Sequence[Adapter]:
        """Adapters that were saved together with their base."""
        return ()

    def extra_files(self) -> dict[str, bytes]:
        """Other files to put beside the weights."""
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


class WholeTensors(ReadCheckpoint):
    """Every tensor in one place, by its name."""

    tensors: Mapping[str, SourceTensor]

    def names(self) -> set[str]:
        """Every tensor that must find its place in the target."""
        return set(self.tensors)

    def find(self, name: str, _partition: Partition, _sections: int = 1) -> SourceTensor | None:
        """One tensor, which is never cut here; None if it is not there."""
        return self.tensors.get(name)


class TensorShards(ReadCheckpoint):
    """Every tensor in parts of tensor-parallel ranks, by its name."""

    shards: Shards

    def names(self) -> set[str]:
        """Every tensor that must find its place in the target."""
        return set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        """One whole tensor, merged from its shards as `partition` says; None if it is not there.

        sections: see Layout. The source's weights are [out, in], the transpose of the stored form.
        """
        return find_whole(self.shards, name, partition, sections)
