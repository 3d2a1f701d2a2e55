"""New weights under load: the longest pause between two tokens, requests that fail, and sleep.

    python3 -m benchmarks.swap --folder EMPTY_FOLDER --out swap.json [--shape 8b-modern] [--tp 2] \
        [--clients 128] [--requests 10000] [--swaps 1] [--modes mixed drain] [--refits 3] \
        [--device-share 0]

Clients stream from one engine in this process, each with one request at a time, greedy, from random
bfloat16 weights. Two exports of the same sizes take turns while they do, and then a process that
stands for a training sends tensors by their names over the socket for refits. For each of them: its
pause, and the longest time between two tokens of one stream from the call until a second after it,
and without an exchange. Before the refits the logits must be those of an engine that was started
with the weights that were exchanged last. At the end the engine sleeps and wakes up.

--device-share 0 keeps new weights in the host's memory, as where the cache has all of the device's.
There is neither a tritonserver nor a gateway. A few minutes on two cores: --shape tiny --clients 8
--requests 400 --swaps 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from benchmarks.repositories import RandomModel
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.checkpoint.huggingface.export import exported_model
from launcher_scripts.clients.refit import RefitClient
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import EXCHANGE_MODES, GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner import weight_exchange
from launcher_scripts.engine.swap import WeightSwaps

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
NAMES = "names.json"  # of tensors, with their shapes
QUIET_SECONDS = 2.0  # with clients and without an exchange
PROBE = GenerateRequest(tuple(range(2, 34)), output_len=0, return_context_logits=True)


@dataclass
class Clients:
    """Streams of clients, and the times of their tokens."""

    engine: Engine
    answered: int = 0
    failed: int = 0
    mixed: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (end, seconds)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """One client until the end."""
        while not self.stopping.is_set():
            times: list[float] = []
            ids = tuple(2 + (37 * index + number) % 1000 for index in range(PROMPT_TOKENS))
            future = self.engine.submit(
                GenerateRequest(ids, OUTPUT_TOKENS),
                lambda _, t=times: t.append(time.perf_counter()),
            )
            try:
                versions = future.result().weights_versions
            except Exception as error:
                print(f"client {number}: {error}", file=sys.stderr)
                with self.lock:
                    self.failed += 1
                continue
            with self.lock:
                self.answered += 1
                self.mixed += versions[0] != versions[1]
                self.gaps += [(end, end - start) for start, end in pairwise(times)]

    def around(self, began: float, ended: float | None = None) -> dict[str, float]:
        """The longest time between two tokens from a call to a second after its end."""
        end = ended or time.perf_counter()
        while time.perf_counter() < end + QUIET_SECONDS:  # streams of this time have ended
            time.sleep(0.1)
        return {"longest_gap": self.longest_gap(began, end + 1.0)}

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time between two tokens of a stream that ended in this time."""
        with self.lock:
            return max((gap for at, gap in self.gaps if start <= at <= end), default=0.0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="1.3b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--requests", type=int, default=10_000, help="at least")
    parser.add_argument("--swaps", type=int, default=4, help="at most, of each mode")
    parser.add_argument("--modes", nargs="+", choices=EXCHANGE_MODES, default=list(EXCHANGE_MODES))
    parser.add_argument("--refits", type=int, default=3, help="by tensors over the socket")
    parser.add_argument("--device-share", type=float, default=weight_exchange.DEVICE_SHARE)
    parser.add_argument("--send", type=Path, help="a socket (used by the program)")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.send is not None:
        return send(arguments.send, arguments.folder / NAMES, arguments.refits)
    weight_exchange.DEVICE_SHARE = arguments.device_share
    config = CONFIGS[arguments.shape] if arguments.shape in CONFIGS else TINY[arguments.shape]
    model = RandomModel("swap", config, arguments.clients, arguments.tp)
    folders = []
    for seed in (1, 2):
        root = arguments.folder / f"export{seed}"
        if not root.exists():
            replace(model, seed=seed).write(root)
        folders.append(root / "swap" / "1" / f"{arguments.tp}-gpu")
    settings = EngineSettings(
        folders[0],
        data_type="bf16",
        parallelism=Parallelism(arguments.tp),
        max_batch_size=arguments.clients,
        max_tokens=2 * arguments.clients * (PROMPT_TOKENS + OUTPUT_TOKENS),
    )
    report = measure(settings, folders, arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"device": device, "torch": torch.__version__, "shape": arguments.shape, **report}
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sound = report["equal_to_a_fresh_start"] and report.get("equal_after_wake")
    return 0 if sound and not report["failed"] and not report["errors"] else 1


def measure(
    settings: EngineSettings, folders: list[Path], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Exchange weights while clients stream."""
    engine = Engine.load(settings)
    engine.warm_up()
    swaps, clients = WeightSwaps(engine), Clients(engine)
    swaps.warm_up()  # as a server does
    threads = [
        threading.Thread(target=clients.run, args=(number,)) for number in range(arguments.clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(QUIET_SECONDS)
    start = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    rows, quiet, errors = [], clients.longest_gap(start, time.perf_counter()), []
    for number in range(arguments.swaps * len(arguments.modes)):
        mode = arguments.modes[number % len(arguments.modes)]
        began = time.perf_counter()
        try:
            result = swaps.swap(folders[(number + 1) % 2], mode).values()
        except LauncherError as error:
            errors.append(f"{mode}: {error}")
            continue
        rows.append({"mode": mode, **seconds_of(result), **clients.around(began)})
        print(json.dumps(rows[-1]), flush=True)
    logits = engine.submit(PROBE).result().context_logits
    served = swaps.folder
    refits = []
    if arguments.refits:
        for reply in sent(swaps, arguments):
            ended = reply.pop("ended")
            refits.append({**reply, **clients.around(ended - reply["seconds"], ended)})
            print(json.dumps(refits[-1]), flush=True)
    while clients.answered + clients.failed < arguments.requests:
        time.sleep(0.1)
    clients.stopping.set()
    for thread in threads:
        thread.join()
    times: dict[str, Any] = {}
    try:
        sleep_and_wake(swaps, engine, times)
    except LauncherError as error:
        errors.append(f"sleep and wake: {error}")
    engine.close()
    fresh = Engine.load(replace(settings, checkpoint_dir=served))
    expected = fresh.submit(PROBE).result().context_logits
    fresh.close()
    return {
        "clients": arguments.clients,
        "answered": clients.answered,
        "failed": clients.failed,
        "mixed": clients.mixed,
        "longest_gap_without_an_exchange": quiet,
        "device_share": arguments.device_share,
        "exchanges": rows,
        "refits": refits,
        **times,
        "errors": errors,
        "equal_to_a_fresh_start": bool(rows) and bool(torch.equal(logits, expected)),
    }


def seconds_of(result: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an exchange, and the rows that went on."""
    names = ("prepare_seconds", "exchange_seconds", "pause_seconds", "mixed_rows", "difference")
    return {name: result[name] for name in names}


def sent(swaps: WeightSwaps, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Have a process send tensors of the model; yield its replies."""
    # Of a server's process; here nobody else gives answers to requests.
    sys.modules.setdefault("triton_python_backend_utils", MagicMock())
    from launcher_scripts.backends.fastertransformer.operations import RefitSocket

    tensors = exported_model(swaps.folder).tensors
    shapes = {tensor.name: list(tensor.shape) for tensor in tensors}
    (arguments.folder / NAMES).write_text(json.dumps(shapes))
    path = RefitSocket(swaps).path
    command = [sys.executable, "-m", "benchmarks.swap", "--folder", str(arguments.folder)]
    command += ["--send", str(path), "--refits", str(arguments.refits)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            reply = json.loads(line)
            yield {**reply, "ended": time.perf_counter()}


def send(path: Path, names: Path, count: int) -> int:
    """In a process of its own: send random weights from the GPU, where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {}
    for name, shape in json.loads(names.read_text()).items():
        values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)
        tensors[name] = values + 1 if "norm" in name and name.endswith("weight") else values
    with RefitClient(path) as client:
        for number in range(count):
            began = time.perf_counter()
            reply = client.send(tensors, version=f"step-{number}")
            seconds = time.perf_counter() - began
            of_server = {"server_seconds": reply["seconds"], **seconds_of(reply)}
            print(json.dumps({"seconds": seconds, **of_server}), flush=True)
            time.sleep(QUIET_SECONDS)
    return 0


def sleep_and_wake(swaps: WeightSwaps, engine: Engine, times: dict[str, Any]) -> None:
    """Note the seconds of both, and whether the logits and generated tokens stay."""
    before = engine.submit(PROBE).result().context_logits
    request = GenerateRequest(PROBE.input_ids, OUTPUT_TOKENS)
    ids = engine.submit(request).result().output_ids
    for name, function in (("sleep", swaps.sleep), ("wake", swaps.wake)):
        began = time.perf_counter()
        function()
        times[f"{name}_seconds"] = time.perf_counter() - began
    began = time.perf_counter()
    after = engine.submit(PROBE).result().context_logits
    times["first_answer_after_wake_seconds"] = time.perf_counter() - began
    alike = engine.submit(request).result().output_ids == ids
    times["equal_after_wake"] = alike and bool(torch.equal(before, after))


if __name__ == "__main__":
    sys.exit(main())
