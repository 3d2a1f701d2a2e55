"""Kernels that are compiled before a server's first steps, while its weights are read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator, lane_words
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.model.families import engine_family, kernels_for
from launcher_scripts.engine.model.forward_context import Recorded
from launcher_scripts.engine.model.weight_loader import DTYPES
from launcher_scripts.engine.runner.loading import (
    EngineSettings,
    Launches,
    Timeline,
    assemble_runner,
)
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels.cuda.compiling import compiled_mark, compiling_in
from launcher_scripts.kernels.operands import PeerBuffers
from launcher_scripts.models.family import ModelConfig, WeightSpec

META = torch.device("meta")  # torch's tensors without values, which take no memory
MAX_THREADS = 8


class KernelPrecompiler:
    """Compiles the kernels of the steps that rank 0 will record, in threads of its process.

    The steps are traced: the model's first layers go through them on the meta device, where a
    launch only compiles. Kernels stay in the process, and in Triton's cache on the disk for other
    ranks and later starts. A file there marks that all of them are: then nothing is traced, for
    that takes longer than the launches that read them, and delays the threads that read weights.
    """

    def __init__(
        self,
        settings: EngineSettings,
        config: ModelConfig,
        draft: ModelConfig | None,
        device: torch.device,
    ) -> None:
        """Begin at once, where there is anything to compile.

        draft: the draft model, where there is one;  device: of rank 0
        """
        self._settings, self._config = settings, _shortened(config)
        self._draft = draft and _shortened(draft)
        self._thread: threading.Thread | None = None
        one_stage = settings.parallelism.pp_size == 1
        if device.type == "cuda" and one_stage and find_spec("triton") is not None:
            self._thread = threading.Thread(
                target=self._run, args=(device,), name="precompiler", daemon=True
            )
            self._thread.start()

    def wait(self, timeline: Timeline) -> None:
        """Return when all kernels are compiled, and note it."""
        if self._thread is not None:
            self._thread.join()
            timeline.note("the first kernels are compiled")

    def _run(self, device: torch.device) -> None:
        cores = len(os.sched_getaffinity(0)) // (2 * self._settings.ranks_per_node)
        try:
            settings = replace(self._settings, checkpoint_dir=Path(), draft_checkpoint_dir=None)
            mark = compiled_mark((settings, self._config, self._draft), device)
            if mark.exists():
                return
            with torch.inference_mode(), compiling_in(max(1, min(MAX_THREADS, cores))):
                runner = traced_runner(self._settings, self._config, self._draft)
                runner.execute(Plan(record=tuple(runner.shapes_to_record())))
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except Exception as error:  # a start without them is slower and nothing else
            why = f"{type(error).__name__}: {error}"
            print(f"kernels are compiled when they are needed: {why}", flush=True)


class FakeCommunicator(Communicator):
    """Rank 0 of a tensor-parallel group without the others: their tensors' shapes alone."""

    peer_buffers: PeerBuffers | None = None

    def use_peer_memory(self) -> None:
        """As if all ranks could."""
        if self.tp_size > 1:
            words = lane_words(self.tp_size)
            self.peer_buffers = PeerBuffers(
                torch.empty(2, self.tp_size, words, dtype=torch.int64, device=META),
                torch.empty(self.tp_size, dtype=torch.int64, device=META),
                torch.empty(words, dtype=torch.int32, device=META),
                self.tp_rank,
            )

    def tp_concat(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(1, self.tp_size)

    def tp_stack(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.tp_size, *tensor.shape)


class EagerGraphs:
    """Stands for the CUDA graphs: a step that is to be recorded is launched."""

    def run(self, _: Hashable, slots: Tensor, function: Callable[[Tensor], Recorded]) -> Recorded:
        return function(slots)

    def record(self, _: Hashable, slots: Tensor, function: Callable[[Tensor], object]) -> None:
        function(slots)

    def clear(self) -> None:
        """There are none."""


def traced_runner(
    settings: EngineSettings, config: ModelConfig, draft: ModelConfig | None = None
) -> Runner:
    """Rank 0 of an engine, on the meta device, with the kernels for GPUs."""
    parallelism = settings.parallelism

    def weights_of(config: ModelConfig) -> Any:
        def read(spec: WeightSpec, _: int | None) -> Tensor:
            return torch.empty(spec.shape_on(config, parallelism.tp_size), device=META)

        dtype, loader = DTYPES[settings.data_type], engine_family(config).loader
        return loader(
            config, parallelism, 0, dtype, META, read, quantization=settings.quantization
        ).load()

    weights, drafting = weights_of(config), draft and weights_of(draft)
    launches, ranks = Launches(kernels_for("cuda"), EagerGraphs()), FakeCommunicator(parallelism)
    return assemble_runner(weights, settings, ranks, META, launches, drafting)


def _shortened(config: ModelConfig) -> ModelConfig:
    """The model with few layers: the first one, for what it reads no layer has left, and one more
    of each kind where layers attend or rotate otherwise, or have other branches.
    """
    names = ("num_layers", "num_decoder_layers")
    counts = {name: getattr(config, name) for name in names if hasattr(config, name)}
    every = range(max(counts.values()))
    kinds = [config.layer_kind(layer) for layer in every]
    layers = [0, *(kinds.index(kind) for kind in sorted({*kinds}, reverse=True))]
    if len(layers) >= len(kinds):
        return config
    changes: dict[str, Any] = {name: min(count, len(layers)) for name, count in counts.items()}
    return replace(config, **changes, **config.selected(layers))
