"""FasterTransformer's own files as a source: a `<N>-gpu` folder, of this project or the original.

Its tensors have the weight table's names and stored form; shards of ranks are pieces of a tensor.

Random weights in the sizes that a config.ini says: a model to measure, without a checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.config_ini import random_config
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import Piece, SourceTensor, Workspace
from launcher_scripts.checkpoint.layout.source_checkpoint import FullTensors, Hints
from launcher_scripts.checkpoint.layout.tasks import STORED
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.tokenizer import tokenizer_files
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec
from launcher_scripts.models.repository import FILE_NAME

CONFIG = "config"


@dataclass(frozen=True)
class FasterTransformerSource(FullTensors):
    """An opened folder.

    origin: what its manifest says of the checkpoint that it was exported from
    """

    format: ClassVar[str] = "fastertransformer"

    archive: Archive
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    origin: Mapping[str, Any]
    dialects: tuple[str, ...] = (STORED,)
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """True for a folder with config.ini and .bin files."""
        names = archive.names()
        return FILE_NAME in names and any(name.endswith(".bin") for name in names)

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> FasterTransformerSource:
        """Raises CheckpointError for what is damaged or incomplete."""
        checkpoint = FTCheckpoint.open(archive.path, verify=False)
        tensors = {}
        for spec in family_of(checkpoint.config).weights(checkpoint.config):
            for layer in spec.layer_numbers(checkpoint.config):
                if spec.required or (archive.path / spec.file_name(layer, 0)).exists():
                    tensors[spec.tensor_name(layer)] = _tensor(checkpoint, archive, spec, layer)
        manifest = checkpoint.manifest
        origin = manifest.source if manifest is not None else {}
        return cls(archive, checkpoint.config, tensors, origin)

    @property
    def knows_token_ids(self) -> bool:
        """config.ini has them."""
        return True

    def tokenizer_files(self) -> dict[str, bytes]:
        """Name -> content of the tokenizer beside the weights; {} for an export without one."""
        return {path.name: path.read_bytes() for path in tokenizer_files(self.archive.path)}

    def config_json(self) -> Mapping[str, Any] | None:
        """Returns the config.json of an export of a Hugging Face model."""
        config = self.origin.get(CONFIG)
        return config if isinstance(config, Mapping) else None

    @property
    def config_dialects(self) -> tuple[str, ...]:
        """Dialects of the checkpoint that was exported."""
        return tuple(map(str, self.origin.get("dialects", ())))

    def details(self) -> dict[str, Any]:
        """Return what the manifest records besides path, format and dialects."""
        return {"original": dict(self.origin)} if self.origin else {}


def _tensor(
    checkpoint: FTCheckpoint, archive: Archive, spec: WeightSpec, layer: int | None
) -> SourceTensor:
    """The whole tensor of the ranks' files; of a head with copies the first one."""
    config, tp_size = checkpoint.config.of_layer(layer), checkpoint.tp_size
    shape = spec.shape_on(config, 1)

    def read(rank: int) -> NDArray[Any]:
        region = archive.region(spec.file_name(layer, rank))
        local = spec.shape_on(config, tp_size)
        return region.array(checkpoint.dtype, int(np.prod(local))).reshape(local)

    ranks = [read(rank) for rank in spec.tp_ranks(tp_size)]
    if len(ranks) == 1:
        return SourceTensor.full(ranks[0])
    if spec.partition is Partition.ROW_PARALLEL:
        rows = len(ranks[0])
        starts = [(rank * rows, *(0,) * (len(shape) - 1)) for rank in range(tp_size)]
        pieces = [Piece(start, values) for start, values in zip(starts, ranks, strict=True)]
        return SourceTensor(shape, checkpoint.dtype, tuple(pieces))
    return SourceTensor(shape, checkpoint.dtype, tuple(_columns(config, spec, tp_size, ranks)))


def _columns(config: Any, spec: WeightSpec, tp_size: int, ranks: list[NDArray[Any]]) -> list[Piece]:
    """Pieces of a tensor whose columns the ranks share, block by block (see reshard.py)."""
    pieces, block, local_block = [], 0, 0
    for axis in spec.blocks or spec.shape[-1:]:
        size, local = int(getattr(config, axis)), config.local_size(axis, tp_size)
        copies = local * tp_size // size
        unit = local if copies == 1 else int(getattr(config, "head_size", 1))
        for slot in range(0, local * tp_size // unit, copies):
            rank, at = divmod(slot * unit, local)
            columns = ranks[rank][..., local_block + at : local_block + at + unit]
            start = block + slot // copies * unit
            pieces.append(Piece((*(0,) * (columns.ndim - 1), start), columns))
        block, local_block = block + size, local_block + local
    return pieces


BLOCK = 1 << 22  # values; larger tensors repeat them
DEVIATION = 0.02  # keeps activations in fp16's range


@dataclass(frozen=True)
class RandomTensor(SourceTensor):
    """A tensor whose values follow from its name; reading it makes a float32 array."""

    name: str

    def read(self, _workspace: Workspace | None = None, _name: str = "") -> NDArray[Any]:
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        count = min(int(np.prod(self.shape)), BLOCK)
        values = random.standard_normal(count, dtype=np.float32) * np.float32(DEVIATION)
        return np.resize(values + np.float32(is_gain(self.name)), self.shape)


@dataclass(frozen=True)
class RandomCheckpoint(FullTensors):
    """The stored tensors of a model, by their canonical names."""

    format: ClassVar[str] = "random"

    archive: Archive
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    dialects: tuple[str, ...] = (STORED,)
    notes: tuple[str, ...] = ("the weights are random: this model is for measuring speed alone",)

    @classmethod
    def matches(cls, _archive: Archive) -> bool:
        """Never: a model has random weights only where that was asked for."""
        return False

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> RandomCheckpoint:
        """Raises CheckpointError for what is not a config.ini."""
        config = random_config(archive.path)
        return cls(archive, config, _tensors(config))

    @property
    def knows_token_ids(self) -> bool:
        """config.ini says them."""
        return True

    def tokenizer_files(self) -> dict[str, bytes]:
        """Raises CheckpointError: there are none."""
        raise CheckpointError(
            problem("a config.ini has no tokenizer", change="export.model.tokenizer=none")
        )


def _tensors(config: ModelConfig) -> dict[str, Any]:
    """Every required tensor."""
    tensors = {}
    for spec in family_of(config).weights(config):
        for layer in spec.layer_numbers(config) if spec.required else ():
            shape = spec.shape_on(config.of_layer(layer), 1)
            name = spec.tensor_name(layer)
            tensors[name] = RandomTensor(shape, np.dtype("<f4"), (), name)
    return tensors


def is_gain(name: str) -> bool:
    """Return whether a weight multiplies normalized values, and so is about one."""
    return "norm" in name and name.endswith("weight")
