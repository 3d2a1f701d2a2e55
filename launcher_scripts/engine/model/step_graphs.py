"""What a step asks of the graphs that it is recorded in."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class StepGraphs(Protocol):
    """What a runner asks of the graphs of its steps."""

    def run(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], Made]) -> Made:
        """function(slots); `key` names everything else its kernels depend on.

        slots: on the device, or on the host if they change with every run
        """
        ...

    def record(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], object]) -> None:
        """Have function's graph for `run` before it is needed; function runs with these slots."""
        ...

    def clear(self) -> None:
        """Forget every graph."""
        ...
