"""A rank that launches what a server's first rank will launch, without weights, on no device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.engine.communicator import Communicator
from launcher_scripts.engine.families import engine_family
from launcher_scripts.engine.loading import (
    PREFILL_TOKENS,
    EngineSettings,
    Launches,
    assemble_runner,
)
from launcher_scripts.engine.plan import Plan
from launcher_scripts.engine.requests import parts, warm_up_request
from launcher_scripts.engine.row import Row
from launcher_scripts.engine.runner import Runner
from launcher_scripts.engine.scheduler import Scheduler
from launcher_scripts.engine.symmetric_memory import LANE_WORDS
from launcher_scripts.engine.weights import DTYPES
from launcher_scripts.kernels import kernels_for
from launcher_scripts.kernels.operands import Inboxes
from launcher_scripts.models.family import ModelConfig, WeightSpec
from launcher_scripts.parallel import Parallelism

LAYERS = 2  # what the second reads, a layer has left; all others are like it
CACHE_TOKENS = 4096
CPU = torch.device("cpu")


class AbsentRanks(Communicator):
    """Rank 0 of a tensor-parallel group, with the shapes of all and nobody else there."""

    def __init__(self, parallelism: Parallelism) -> None:
        super().__init__(parallelism)
        self._inboxes: Inboxes | None = None

    @property
    def inboxes(self) -> Inboxes | None:
        return self._inboxes

    def use_peer_memory(self) -> None:
        """As if all ranks could."""
        if self.tp_size > 1:
            self._inboxes = Inboxes(
                torch.zeros(2, self.tp_size, LANE_WORDS, dtype=torch.int64),
                torch.zeros(self.tp_size, dtype=torch.int64),
                torch.zeros(LANE_WORDS, dtype=torch.int32),
                self.tp_rank,
            )

    def tp_concat(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(1, self.tp_size)

    def tp_stack(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.tp_size, *[1] * tensor.dim()).view(self.tp_size, *tensor.shape)


class NoGraphs:
    """Stands for the CUDA graphs: every step is launched."""

    def run(self, _: Hashable, slots: Tensor, function: Callable[[Tensor], Any]) -> Any:
        return function(slots)

    def record(self, _: Hashable, slots: Tensor, function: Callable[[Tensor], Any]) -> None:
        function(slots)


def shortened(config: ModelConfig) -> ModelConfig:
    """The model with its first layers only."""
    names = ("num_layers", "num_decoder_layers")
    counts = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return replace(config, **{name: min(count, LAYERS) for name, count in counts.items()})


def idle_runner(settings: EngineSettings, config: ModelConfig) -> Runner:
    """Rank 0 of an engine of `config`; call it, and what it returns, in IdleArithmetic.

    Its kernels are those for GPUs, which take launches on the CPU where an IdleDevice is worked on.
    """
    tp_size = settings.parallelism.tp_size

    def read(spec: WeightSpec, _: int | None) -> Tensor:
        return torch.empty(spec.shape_on(config, tp_size))

    loader = engine_family(config).loader(
        config,
        settings.parallelism,
        0,
        DTYPES[settings.data_type],
        CPU,
        read,
        int8=settings.int8_mode == 1,
    )
    return assemble_runner(
        loader.load(),
        replace(settings, device="cpu", max_tokens=settings.max_tokens or CACHE_TOKENS),
        AbsentRanks(settings.parallelism),
        CPU,
        Launches(kernels_for("cuda"), NoGraphs()),
    )


def first_passes(runner: Runner, config: ModelConfig) -> Iterator[tuple[Plan, ...]]:
    """What an engine does from its start on: it generates first tokens, which are two steps, and
    then has the steps that are recorded, in their order.
    """
    cache_tokens = runner.decoder.cache.capacity
    request = warm_up_request(config, cache_tokens)
    source, prompt = parts(request, config)
    scheduler = Scheduler(1, cache_tokens, PREFILL_TOKENS["cuda"])
    scheduler.add(Row(request, Future(), prompt, config.vocab_size, source))
    steps = [scheduler.plan() for _ in range(min(2, request.output_len) or 1)]
    yield tuple(step for step in steps if step is not None)
    for shape in runner.shapes_to_record():
        yield (Plan(record=(shape,)),)
