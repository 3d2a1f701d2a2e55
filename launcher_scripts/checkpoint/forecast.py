"""What an export is going to do, in one line before it does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher_scripts.checkpoint.fastertransformer.folder import DTYPES
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.tasks import Task
from launcher_scripts.models import value_count
from launcher_scripts.models.family import ModelConfig

# What two processors and an ordinary disk write, layouts and digests included
# (benchmarks/export.py); more of them are faster.
BYTES_PER_SECOND = 4e8


@dataclass(frozen=True)
class Forecast:
    """Sizes in bytes; parameters are counted once, however often they are tied."""

    source: str
    family: str
    parameters: int
    bytes_to_read: int
    bytes_to_write: int
    bytes_free: int

    @classmethod
    def of(
        cls, source: str, family: str, tasks: Iterable[Task], bytes_to_write: int, bytes_free: int
    ) -> Forecast:
        """Measure the source tensors of `tasks`."""
        tensors = {_place(tensor): tensor for task in tasks for tensor in task.tensors}
        parameters = sum(_count(tensor) for tensor in tensors.values())
        pieces = [piece for tensor in tensors.values() for piece in tensor.pieces]
        to_read = sum(piece.values.nbytes for piece in pieces)
        return cls(source, family, parameters, to_read, bytes_to_write, bytes_free)

    @property
    def seconds(self) -> float:
        return max(self.bytes_to_write, self.bytes_to_read) / BYTES_PER_SECOND

    def __str__(self) -> str:
        return (
            f"plan: a {self.family} of {self.parameters / 1e6:,.1f} million parameters from "
            f"{self.source}; reads {self.bytes_to_read / 1e9:,.2f} GB, writes "
            f"{self.bytes_to_write / 1e9:,.2f} GB, {self.bytes_free / 1e9:,.0f} GB free; "
            f"about {max(self.seconds, 1):,.0f} s"
        )


def _place(tensor: SourceTensor) -> object:
    """What two tasks that read one tensor have in common."""
    if not tensor.pieces:
        return id(tensor)
    return tensor.pieces[0].values.__array_interface__["data"][0]


def _count(tensor: SourceTensor) -> int:
    return tensor.nbytes // tensor.dtype.itemsize


def weight_bytes(config: ModelConfig, tp_size: int, weight_data_type: str) -> int:
    """Size of all .bin files together."""
    return DTYPES[weight_data_type].itemsize * value_count(config, tp_size)
