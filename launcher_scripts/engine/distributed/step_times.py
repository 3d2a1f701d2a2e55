"""Expected times of a device's steps, and the events that show which ones it has finished.

Apart from heartbeats: a node's host sends those without torch.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.heartbeat import RankProgress
from launcher_scripts.kernels.cuda.compiling import tell_of_compilation
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig

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
