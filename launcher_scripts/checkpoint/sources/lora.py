"""LoRA merged into the weight it was learned for: W + scale * out @ in, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.dtypes import widened
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, concatenated
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.common.errors import CheckpointError, problem
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

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        if self.base is None or self.update is None:
            return super().read(workspace, name)
        memory = workspace or Workspace()
        up, down, base = (
            widened(tensor.read(memory, f"{name} {part}")).astype(np.float32, copy=False)
            for part, tensor in (
                ("up", self.update.up),
                ("down", self.update.down),
                ("base", self.base),
            )
        )
        merged = np.matmul(up, down, out=memory.array(name, self.shape, self.dtype))
        merged *= np.float32(self.update.scale)
        merged += base
        return merged
