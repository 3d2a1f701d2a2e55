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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from launcher_scripts.engine.loading import EngineSettings
from launcher_scripts.engine.messages import encode
from launcher_scripts.engine.rank_processes import own_environment, own_python
from launcher_scripts.engine.timeline import Timeline
from launcher_scripts.models.family import ModelConfig

PROGRAM = "launcher_scripts.engine.compile_ahead"
MOST_PROCESSES = 8
FEWEST_CORES = 4  # with fewer, what reads the weights would wait for them
WAIT_SECONDS = 20.0  # for what a request needs; what is not there then, the rank compiles
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
    """The program, if it runs, from the side of the rank that started it.

    A thread starts and hears it; the program asks the kernel to be killed when that ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._news = threading.Condition()
        self._ended = True
        self._closed = False
        self._progress = CompiledSoFar(0, 0, 0)

    def start(self, settings: EngineSettings, config: ModelConfig, device: torch.device) -> None:
        """Start compiling for a rank on `device`, unless that is done or there is no use in it."""
        if device.type != "cuda" or find_spec("triton") is None:
            return
        from launcher_scripts.kernels.device_traits import traits_of

        try:
            traits = traits_of(device)
            self.begin(compile_order(settings, config, traits.capability, traits.shared_bytes))
        except (OSError, ImportError, AttributeError, RuntimeError) as error:
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
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(order,), daemon=True)
        self._thread.start()

    @property
    def shapes(self) -> float:
        """How many of the shapes to record have their kernels: -1 until those of the warm-up are
        there; all when the program has ended.
        """
        return math.inf if self._ended else self._progress.passes - 1

    def wait(self, timeline: Timeline, seconds: float = WAIT_SECONDS) -> None:
        """Wait for the kernels of the first request, if any are compiled."""
        if self._thread is None:
            return
        with self._news:
            self._news.wait_for(lambda: self.shapes >= 0, seconds)
            done, of = self._progress.compiled, self._progress.kernels
        print(f"kernels compiled ahead: {done} of {of}", flush=True)
        timeline.note("the first kernels are compiled")

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """End the program where the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the program."""
        with self._news:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self, order: CompileOrder) -> None:
        try:
            code = self._hear(order)
            if code and not self._closed:
                _say(f"what compiles them ahead ended with exit code {code}")
        except (OSError, ValueError, TypeError) as error:
            _say(f"{type(error).__name__}: {error}")
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _hear(self, order: CompileOrder) -> int:
        """Run the program; returns its exit code."""
        with self._news:
            if self._closed:
                return 0
            process = self._process = _start_program()
        with process:
            with suppress(BrokenPipeError), process.stdin as told:
                told.write(encode(order))
            for line in process.stdout:
                with self._news:
                    self._progress = CompiledSoFar(*json.loads(line))
                    self._news.notify_all()
        return process.returncode


def _start_program() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [own_python(), "-m", PROGRAM, "--parent", str(os.getpid())],
        env=own_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


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
