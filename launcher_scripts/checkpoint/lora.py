"""LoRA merged into the weight it was learned for: W + scale * out @ in, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher_scripts.checkpoint.dtypes import widened
from launcher_scripts.checkpoint.source_tensor import SourceTensor, concatenated
from launcher_scripts.errors import CheckpointError, problem
from launcher_scripts.models.family import Partition


@dataclass(frozen=True)
class Update:
    """A whole update of a weight [out, in]: down [rank, in], up [out, rank]."""

    down: SourceTensor
    up: SourceTensor
    scale: float


@dataclass(frozen=True)
class LoRA:
    """What training left on its tensor-parallel ranks. NeMo shares `up` by its rows always;
    `down` by the rank's axis, or by its columns where the weight's own ranks share the inputs.
    """

    down: tuple[SourceTensor, ...]
    up: tuple[SourceTensor, ...]
    scale: float

    def whole(self, partition: Partition, sections: int) -> Update:
        """partition, sections: how the weight itself is shared."""
        row_parallel = partition is Partition.ROW_PARALLEL
        down = concatenated(self.down, 1 if row_parallel else 0)
        up = concatenated(self.up, 0, 1 if row_parallel else sections)
        return Update(down, up, self.scale)


@dataclass(frozen=True)
class MergedTensor(SourceTensor):
    """A tensor of the base with an update, computed when it is read."""

    base: SourceTensor | None = None
    update: Update | None = None

    @classmethod
    def of(cls, base: SourceTensor, update: Update, name: str) -> MergedTensor:
        """Raises CheckpointError when the shapes do not fit."""
        up, down = update.up.shape, update.down.shape
        if len(up) != 2 or len(down) != 2 or up[1] != down[0] or (up[0], down[1]) != base.shape:
            raise CheckpointError(
                problem(f"LoRA of {name} does not fit", got=[up, down], choices=[base.shape])
            )
        return cls(base.shape, np.dtype("<f4"), base.pieces, base, update)

    def read(self) -> np.ndarray:
        if self.base is None or self.update is None:
            return super().read()
        up, down, base = (
            widened(tensor.read()).astype(np.float32, copy=False)
            for tensor in (self.update.up, self.update.down, self.base)
        )
        merged: np.ndarray = base + np.float32(self.update.scale) * (up @ down)
        return merged
