"""Memory that one thread uses again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Workspace:
    """Arrays by name, whose memory is kept.

    Fresh pages from the system cost several times what it takes to fill them, so an export asks
    for them once. Not for several threads.
    """

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any content; the last one of that name is no longer valid."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            self._memory.pop(name, None)
            memory = self._memory[name] = np.empty(size, np.uint8)
        result: NDArray[Any] = memory[:size].view(dtype).reshape(shape)
        return result
