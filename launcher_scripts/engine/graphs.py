"""CUDA graphs of the decode step, one per bucket of batch size and context length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.plan import Bounds
from launcher_scripts.engine.progress import RECORDING, Progress

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SMALLEST_CONTEXT = 256


def bucket_rows(rows: int, most: int) -> int:
    """The batch size a step of `rows` rows is padded to."""
    return next((size for size in ROW_BUCKETS if rows <= size <= most), rows)


def bucket_tokens(tokens: int) -> int:
    """The context length a step's kernels are chosen for: a power of four times 256."""
    bucket = SMALLEST_CONTEXT
    while bucket < tokens:
        bucket *= 4
    return bucket


def bucket_bounds(bounds: Bounds) -> Bounds:
    """Both bounds as buckets; a step without sources stays one."""
    source = bucket_tokens(bounds.source) if bounds.source else 0
    return bounds._replace(own=bucket_tokens(bounds.own), source=source)


@dataclass
class _Recorded:
    """graph is None until the shape comes a second time: the first run compiles its kernels."""

    graph: torch.cuda.CUDAGraph | None
    slots: Tensor
    source: Tensor | None
    output: Tensor | None


class GraphCache:
    """Replays a function of the rows' slots; its kernels are launched by the host only once.

    The graphs share one memory pool, because only one runs at a time and its outputs are used
    before the next.
    """

    def __init__(self, progress: Progress) -> None:
        self._recorded: dict[Hashable, _Recorded] = {}
        self._progress = progress
        self._pool = torch.cuda.graph_pool_handle()

    def run(
        self, key: Hashable, slots: Tensor, function: Callable[[Tensor], Tensor | None]
    ) -> Tensor | None:
        """function(slots); `key` names everything else its kernels depend on."""
        recorded = self._recorded.get(key)
        if recorded is None:
            self._recorded[key] = _Recorded(None, slots.clone(), None, None)
            return function(slots)
        if recorded.source is not slots:
            recorded.slots.copy_(slots)
            recorded.source = slots
        if recorded.graph is None:
            graph = torch.cuda.CUDAGraph()
            with (
                self._progress.phase(RECORDING),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                recorded.output = function(recorded.slots)
            recorded.graph = graph
        recorded.graph.replay()
        return recorded.output

    def clear(self) -> None:
        """Forget every graph; a communicator cannot end while a graph holds its operations."""
        for recorded in self._recorded.values():
            if recorded.graph is not None:
                recorded.graph.reset()
        self._recorded.clear()
