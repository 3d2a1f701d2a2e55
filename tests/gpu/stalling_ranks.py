"""Two ranks on two GPUs, one of which stalls in the middle of decoding: who is named, and when.

    python3 -m tests.gpu.stalling_ranks WAY RANKS FOLDER [cuda | cpu]

prints a JSON object. A program of its own: a process whose device waits indefinitely can only be
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launcher_scripts.common.errors import ServerError
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.distributed.heartbeat import LOCAL_WORK, RECORDING
from launcher_scripts.engine.ranks import peers
from launcher_scripts.engine.ranks.worker import main as worker_main
from launcher_scripts.engine.runner import graphs
from launcher_scripts.engine.runner.runner import Runner
from tests.engine.small_models import load_engine, random_tensors
from tests.gpu.test_engine import wider

STEP = 100  # the general steps and the recorded ones are long over
TOKENS = 800
FOR_EVER = 3600.0
ANNOUNCED_SECONDS = 8.0
WAY_VARIABLE, FOLDER_VARIABLE = "TEST_STALLING_WAY", "TEST_STALLING_FOLDER"
PEER_VARIABLE = "TEST_STALLING_PEER"
# Tensor- and pipeline-parallel sizes, and whether sums go through the GPUs' shared memory.
RANKS = {"tp2": (2, 1, False), "tp2_shared": (2, 1, True), "pp2": (1, 2, False)}
_execute = Runner.execute


def _host(_: Runner) -> None:
    time.sleep(FOR_EVER)


def _device(_: Runner) -> None:
    torch.cuda._sleep(10**13)


def _announced(runner: Runner) -> None:
    progress = runner.communicator.progress
    assert LOCAL_WORK[RECORDING] > ANNOUNCED_SECONDS
    with progress.phase(RECORDING):
        time.sleep(ANNOUNCED_SECONDS)


def _stop_peer(_: Runner) -> None:
    os.kill(int(os.environ[PEER_VARIABLE]), signal.SIGSTOP)


# Which rank does what before it launches its step.
WAYS: dict[str, tuple[int, Callable[[Runner], None]]] = {
    "stopped": (0, _stop_peer),
    "host": (1, _host),
    "host of rank 0": (0, _host),
    "device": (1, _device),
    "announced": (1, _announced),
}


def _make_stall(rank: int) -> None:
    """Have this process's runner stall where the way says so."""
    who, stall = WAYS[os.environ[WAY_VARIABLE]]
    steps = 0

    def execute(runner: Runner, plan: Any) -> Any:
        nonlocal steps
        steps += runner.device.type != "meta"  # those are traced for the kernels that they need
        if steps == STEP and rank == who:
            Path(os.environ[FOLDER_VARIABLE], "stalled").write_text(repr(time.time()))
            stall(runner)
        return _execute(runner, plan)

    Runner.execute = execute  # type: ignore[method-assign]


def run(way: str, ranks: str, folder: Path, device: str = "cuda") -> dict[str, Any]:
    """The reason that requests get, and the seconds from the stall until they do."""
    os.environ.update({WAY_VARIABLE: way, FOLDER_VARIABLE: str(folder)})
    peers.WORKER = "tests.gpu.stalling_ranks"
    graphs.LOAD_SECONDS = 0.0  # so that the step that stalls is one of a request
    _make_stall(0)
    config = wider(vocab_size=516, end_id=516)
    started = time.time()
    tp, pp, shared = RANKS[ranks]
    more = {"device": device, "enable_custom_all_reduce": shared}
    engine = load_engine(folder, config, random_tensors(config), tp, pp, **more)
    named: list[float] = []
    engine.on_failure(lambda _: named.append(time.time()))
    loaded = time.time() - started
    os.environ[PEER_VARIABLE] = str(engine.ranks[1].pid)
    try:
        output = engine.submit(GenerateRequest((3, 1, 4, 1, 5), TOKENS)).result(120)
        found: dict[str, Any] = {"tokens": len(output.output_ids)}
    except ServerError as error:
        stalled = float((folder / "stalled").read_text())
        found = {"reason": str(error), "seconds": named[0] - stalled}
    return {"way": way, "pids": [rank.pid for rank in engine.ranks], "loaded": loaded, **found}


if __name__ == "__main__":
    if "--parent" in sys.argv:
        _make_stall(1)
        sys.exit(worker_main())
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])), flush=True)
    os._exit(0)
