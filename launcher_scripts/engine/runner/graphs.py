"""CUDA graphs of the decode step, one per bucket of batch size and context length.

Expected times of a device's steps, and the events that show which ones it has finished.

Apart from heartbeats: a node's host sends those without torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.heartbeat import RECORDING, RankProgress
from launcher_scripts.engine.messages.plan import Bounds, Choice, Plan, StepShape
from launcher_scripts.engine.model.forward_context import Recorded
from launcher_scripts.kernels.cuda.compiling import tell_of_compilation
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MIN_CONTEXT = 256
MIN_REORDER = 16


def row_buckets(maximum: int) -> list[int]:
    """The batch sizes of steps where there are `maximum` rows at most."""
    return [*(size for size in ROW_BUCKETS if size < maximum), maximum]


def bucket_rows(rows: int, maximum: int) -> int:
    """The batch size a step of `rows` rows is padded to."""
    return next(size for size in row_buckets(maximum) if rows <= size)


def bucket_tokens(tokens: int, minimum: int = MIN_CONTEXT) -> int:
    """The context length a step's kernels are chosen for: a power of four times the smallest."""
    bucket = minimum
    while bucket < tokens:
        bucket *= 4
    return bucket


def token_buckets(longest: int) -> list[int]:
    """The buckets of all contexts up to `longest` tokens; [0] where there are none."""
    buckets = [bucket_tokens(1)] if longest else [0]
    while buckets[-1] < longest:
        buckets.append(bucket_tokens(buckets[-1] + 1))
    return buckets


def step_shapes(longest: Bounds, max_rows: int) -> list[StepShape]:
    """All shapes of the decode steps of a model whose rows are as long as `longest`, short contexts
    first, those of each choice in its order, few rows before many."""
    if not longest.own:
        return []
    return [
        StepShape(rows, bucket, source, choice)
        for bucket in token_buckets(longest.own)
        for source in token_buckets(longest.source)
        for choice in Choice
        for rows in row_buckets(max_rows)
    ]


def bucket_bounds(bounds: Bounds) -> Bounds:
    """Both bounds as buckets; a step without sources stays one."""
    source = bucket_tokens(bounds.source) if bounds.source else 0
    return bounds._replace(own=bucket_tokens(bounds.own), source=source)


def bucket_reorder(tokens: int) -> int:
    """Return the number of last tokens of hypotheses that a step copies, of which `tokens` may
    differ."""
    return bucket_tokens(tokens, MIN_REORDER) if tokens else 0


@dataclass
class _Recorded:
    """graph is None until the shape comes a second time: the first run compiles its kernels."""

    graph: torch.cuda.CUDAGraph | None
    slots: Tensor
    source: Tensor | None
    output: Any


class GraphCache:
    """Replays a function of the rows' slots; its kernels are launched by the host only once.

    The graphs share one memory pool, because only one runs at a time and its outputs are used
    before the next.
    """

    def __init__(self, progress: RankProgress) -> None:
        self._recorded: dict[Hashable, _Recorded] = {}
        self._progress = progress
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], Recorded]) -> Recorded:
        """See StepGraphs."""
        recorded = self._recorded.get(key)
        if recorded is None:
            device_slots = slots.clone() if slots.is_cuda else slots.cuda()
            self._recorded[key] = _Recorded(None, device_slots, None, None)
            return function(device_slots)
        if recorded.source is not slots:
            recorded.slots.copy_(slots, non_blocking=True)
            recorded.source = slots
        graph = recorded.graph
        if graph is None:
            graph = self._capture(recorded, function)
        graph.replay()
        output: Recorded = recorded.output
        return output

    def record(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], object]) -> None:
        """See StepGraphs."""
        if key in self._recorded:
            return
        self.run(key, slots, function)
        self._capture(self._recorded[key], function)

    def _capture(
        self, recorded: _Recorded, function: Callable[[Tensor], object]
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            self._progress.phase(RECORDING),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            recorded.output = function(recorded.slots)
        recorded.graph = graph
        return graph

    def clear(self) -> None:
        """Forget every graph; a communicator cannot end while a graph holds its operations."""
        for recorded in self._recorded.values():
            if recorded.graph is not None:
                recorded.graph.reset()
        self._recorded.clear()
        # A pool that no graph has any more cannot get another one.
        self._pool = torch.cuda.graph_pool_handle()


LOAD_SECONDS = 0.5  # that loading is prolonged by; what is left comes when nothing else is to do
QUIET_SECONDS = 0.2  # without a request: who asks again at once should not wait for a recording
MEMORY_SHARE = 0.02  # of the device's memory, for all graphs


class Recording:
    """The shapes that are to be recorded still, those needed first in front.

    on_plan: has all ranks carry out a plan;  memory: bytes of the device, those free and all
    """

    def __init__(
        self,
        shapes: Iterable[StepShape],
        on_plan: Callable[[Plan], object],
        memory: Callable[[], tuple[int, int]],
    ) -> None:
        self.stopped = False  # nothing may run
        self._left = deque(shapes)
        self._take = on_plan
        self._memory = memory
        self._done = 0
        self._seconds = 0.0
        self._quiet_since = -QUIET_SECONDS
        self._before, total = memory()
        self._max_bytes = total * MEMORY_SHARE

    @property
    def pending(self) -> bool:
        return bool(self._left)

    def disturbed(self) -> None:
        """A request was there: nothing is recorded until none has come for a while."""
        self._quiet_since = time.monotonic()

    def pause(self) -> float | None:
        """Seconds to wait for a request before the next shape is due; None: no shape is left."""
        if not self._left or self.stopped:
            return None
        return max(0.0, self._quiet_since + QUIET_SECONDS - time.monotonic())

    def record_next(self) -> None:
        """Record one shape; shapes that memory is not meant for are left to requests."""
        started = time.monotonic()
        self._take(Plan(record=(self._left.popleft(),)))
        self._done += 1
        self._seconds += time.monotonic() - started
        if self._bytes() > self._max_bytes:
            self._left.clear()

    def record_at_load(self) -> str | None:
        """Record for LOAD_SECONDS; says what was done, if there was anything to do."""
        while self._left and self._seconds < LOAD_SECONDS:
            self.record_next()
        if not self._done:
            return None
        left = f", {len(self._left)} left for idle moments" if self._left else ""
        cost = f"{self._seconds:.1f} s, {self._bytes() / 1e6:.0f} MB"
        return f"decode steps recorded: {self._done} ({cost}){left}"

    def _bytes(self) -> int:
        return self._before - self._memory()[0]


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes free, and in all; of a device without graphs it does not matter."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


SLOW_DEVICE = 5e12  # floating-point operations per second that any such device does
# Bytes per second between devices of one node and of several.
SLOW_LINKS = {False: 1e9, True: 1e8}
SUMS_PER_LAYER = 3  # with cross attention
SUM_BYTES = 4
UNTOLD_SECONDS = 60.0  # where nobody says when a kernel is compiled


def watch_steps(
    progress: RankProgress, config: ModelConfig, parallelism: Parallelism, nodes: int
) -> None:
    """Have the progress follow the current device's steps, and the kernels that are compiled."""
    by_events = tell_of_compilation(progress.compiles, progress.compiled)
    progress.on_device(
        partial(_mark, torch.cuda.current_device()),
        seconds_per_token(config, parallelism, several_nodes=nodes > 1),
        base=0.0 if by_events else UNTOLD_SECONDS,
    )


def seconds_per_token(
    config: ModelConfig, parallelism: Parallelism, *, several_nodes: bool
) -> float:
    """An upper bound: all stages one after the other, on slow devices with slow links."""
    parameters = sum(
        math.prod(spec.shape_on(config.of_layer(layer), parallelism.tp_size))
        for spec in family_of(config).weights(config)
        for layer in spec.layer_numbers(config)
    )
    layers = getattr(config, "num_layers", 0) + getattr(config, "num_decoder_layers", 0)
    exchanged = SUMS_PER_LAYER * layers * int(getattr(config, "hidden_size", 0)) * SUM_BYTES
    if parallelism.world_size == 1:
        exchanged = 0
    return 2 * parameters / SLOW_DEVICE + exchanged / SLOW_LINKS[several_nodes]


def _mark(device: int) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
