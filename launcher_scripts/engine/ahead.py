"""Kernels that are compiled by other processes while a rank reads its weights.

What a start has compiled stays in Triton's cache, with a marker that says so: the next start of the
same model on the same hardware and software finds it there and compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from launcher_scripts.engine.codec import encode
from launcher_scripts.engine.loading import EngineSettings
from launcher_scripts.engine.rank_processes import own_environment, own_python
from launcher_scripts.engine.runner import FIRST_PROMPTS, FIRST_STEPS
from launcher_scripts.engine.timeline import Timeline
from launcher_scripts.models.family import ModelConfig

PROGRAM = "launcher_scripts.engine.compile_ahead"
MOST_PROCESSES = 8
FEWEST_CORES = 4  # with fewer, what reads the weights would wait for them
WAIT_SECONDS = 20.0  # for what the first steps need; what is not there then, the rank compiles
FIRST_SHAPES = FIRST_PROMPTS + FIRST_STEPS  # that requests need first
ENGINE, KERNELS = Path(__file__).parent, Path(__file__).parent.parent / "kernels"


@dataclass(frozen=True)
class CompileOrder:
    """What the program is told.

    capability, shared_bytes: of the device; see DeviceTraits
    marker: the file that says that everything is compiled
    """

    settings: EngineSettings
    capability: tuple[int, int]
    shared_bytes: int
    processes: int
    marker: Path


class CompiledSoFar(NamedTuple):
    """How far the program is: what there is to compile, what of it is, and how many of the first
    passes have all they need: that of the warm-up, then those that are recorded.
    """

    kernels: int
    compiled: int
    passes: int


class KernelsAhead:
    """The program, if it runs, from the side of the rank that started it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._news = threading.Condition()
        self._ended = True
        self._closed = False
        self._progress = CompiledSoFar(0, 0, 0)

    def start(self, settings: EngineSettings, config: ModelConfig, device: torch.device) -> None:
        """Start compiling for a rank on `device`, unless that is done or there is no use in it.

        The thread that calls this must outlive the program, which ends with it.
        """
        if device.type != "cuda" or find_spec("triton") is None:
            return
        from launcher_scripts.kernels.device_traits import traits_of

        try:
            traits = traits_of(device)
            self.begin(compile_order(settings, config, traits.capability, traits.shared_bytes))
        except (OSError, ImportError, AttributeError) as error:
            _say(f"{type(error).__name__}: {error}")

    def begin(self, order: CompileOrder) -> None:
        """Have the program carry out an order, unless another did."""
        if order.marker.exists():
            return
        obstacle = _obstacle(order)
        if obstacle is not None:
            _say(obstacle)
            return
        order.marker.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [own_python(), "-m", PROGRAM, "--parent", str(os.getpid())],
            env=own_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._process, self._ended = process, False
        with suppress(BrokenPipeError), process.stdin as told:
            told.write(encode(CompileOrder, order))
        listens = threading.Thread(target=self._listen, args=(process,), daemon=True)
        listens.start()

    @property
    def shapes(self) -> float:
        """How many of the shapes to record have their kernels; when the program has ended, all."""
        return math.inf if self._ended else self._progress.passes - 1

    def wait(self, timeline: Timeline, seconds: float = WAIT_SECONDS) -> None:
        """Wait for the kernels of the first requests, if any are compiled."""
        if self._process is None:
            return
        with self._news:
            self._news.wait_for(lambda: self.shapes >= FIRST_SHAPES, seconds)
            done, of = self._progress.compiled, self._progress.kernels
        print(f"kernels compiled ahead: {done} of {of}", flush=True)
        timeline.note("the first kernels are compiled")

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            self._closed = True
            self._process.kill()
            self._process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        try:
            with process.stdout as lines:
                for line in lines:
                    with self._news:
                        self._progress = CompiledSoFar(*json.loads(line))
                        self._news.notify_all()
            code = process.wait()
            if code and not self._closed:
                _say(f"what compiles them ahead ended with exit code {code}")
        except (ValueError, TypeError) as error:
            _say(f"what compiles them ahead said something else: {error}")
        with self._news:
            self._ended = True
            self._news.notify_all()


def compile_order(
    settings: EngineSettings,
    config: ModelConfig,
    capability: tuple[int, int],
    shared_bytes: int,
) -> CompileOrder:
    """The order for rank 0 of an engine on a device of these traits."""
    from launcher_scripts.kernels.compiling import cache_folder, compiler_details

    details = (
        config,
        settings.data_type,
        settings.int8_mode,
        settings.parallelism,
        settings.enable_custom_all_reduce,
        settings.max_batch_size,
        capability,
        shared_bytes,
        compiler_details(),
    )
    digest = hashlib.sha256(repr(details).encode())
    for file in sorted([*ENGINE.glob("*.py"), *KERNELS.glob("*.py"), *KERNELS.glob("*.json")]):
        digest.update(file.read_bytes())
    marker = cache_folder() / f"compiled-ahead-{digest.hexdigest()[:32]}.json"
    processes = how_many(len(os.sched_getaffinity(0)), settings.ranks_per_node)
    return CompileOrder(settings, capability, shared_bytes, processes, marker)


def how_many(cores: int, ranks: int) -> int:
    """Processes that compile on a machine where so many ranks read their weights."""
    return 0 if cores < FEWEST_CORES else max(1, min(MOST_PROCESSES, cores // (2 * ranks)))


def _obstacle(order: CompileOrder) -> str | None:
    if order.settings.parallelism.pp_size > 1:
        return "the layers are split into pipeline stages"
    return None if order.processes else f"there are fewer than {FEWEST_CORES} cores"


def _say(why: str) -> None:
    print(f"kernels are compiled when they are needed: {why}", flush=True)
