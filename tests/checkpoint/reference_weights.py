"""Whole tensors rebuilt from an exported folder, for the plain forward passes of the tests.

Reads `.bin` files by the weight table alone: ranks are joined by the partition and the blocks of
each row, nothing else is known about the source.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec

DTYPES = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


class StoredWeights:
    """`weights[name]` is the whole tensor called `name`, as float32, linear weights [in, out]."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        specs: list[WeightSpec],
        tp_size: int,
        weight_data_type: str = "fp32",
    ) -> None:
        self.folder = folder
        self.config = config
        self.tp_size = tp_size
        self.dtype = DTYPES[weight_data_type]
        self.rows = {
            spec.tensor_name(layer): (spec, layer)
            for spec in specs
            for layer in spec.layer_numbers(config)
        }

    def __contains__(self, name: str) -> bool:
        return name in self.rows and (self.folder / self._file(name, 0)).exists()

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, _ = self.rows[name]
        ranks = spec.tp_ranks(self.tp_size)
        parts = [self._read(name, rank) for rank in ranks]
        if spec.partition is Partition.ROW_PARALLEL:
            return torch.cat(parts, dim=0)
        if not spec.partition.per_rank or len(parts) == 1:
            return parts[0]
        if not spec.blocks:
            return torch.cat(parts, dim=-1)
        sizes = [self.config.local_size(block, self.tp_size) for block in spec.blocks]
        blocks = zip(*(part.split(sizes, dim=-1) for part in parts), strict=True)
        return torch.cat([torch.cat(block, dim=-1) for block in blocks], dim=-1)

    def _file(self, name: str, rank: int) -> str:
        spec, layer = self.rows[name]
        return spec.file_name(layer, rank)

    def _read(self, name: str, rank: int) -> torch.Tensor:
        array = np.fromfile(self.folder / self._file(name, rank), self.dtype)
        if self.dtype == DTYPES["bf16"]:
            array = (array.astype("<u4") << 16).view("<f4")
        shape = self.rows[name][0].shape_on(self.config, self.tp_size)
        return torch.from_numpy(array.astype(np.float32)).reshape(shape)


class Cached:
    """Tensors of `weights`, read once."""

    def __init__(self, weights: StoredWeights) -> None:
        self._weights = weights
        self._tensors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._weights

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._weights[name]
        return self._tensors[name]
