"""Random weights in the sizes that a config.ini says: a model to measure, without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.config_ini import random_config
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.dtypes import Workspace
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import FullTensors, Hints
from launcher_scripts.checkpoint.layout.tasks import STORED
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig

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
