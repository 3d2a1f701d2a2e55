"""Tensor-parallel ranks as threads of one process, so that tests can look into each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import Communicator

Found = TypeVar("Found")
TIMEOUT = 60.0


class ThreadCommunicator(Communicator):
    """One rank; `given` holds what every rank brings to an exchange."""

    def __init__(self, rank: int, given: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(Parallelism(len(given)), rank)
        self._inputs = given
        self._barrier = barrier

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        self._inputs[self.rank] = tensor.clone()
        self._barrier.wait(TIMEOUT)
        found = list(self._inputs)
        self._barrier.wait(TIMEOUT)
        return found

    def tp_sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._of_all(tensor)).sum(0)

    def tp_concat(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._of_all(tensor), 1)

    def tp_stack(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._of_all(tensor))


def on_ranks(tp_size: int, function: Callable[[Communicator], Found]) -> list[Found]:
    """What function(communicator) gives on every rank."""
    given, barrier = [torch.empty(0)] * tp_size, threading.Barrier(tp_size)

    def on_rank(rank: int) -> Found:
        try:
            with torch.inference_mode():
                return function(ThreadCommunicator(rank, given, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(on_rank, range(tp_size)))
