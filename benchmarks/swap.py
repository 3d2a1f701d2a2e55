"""New weights under load: the longest pause between two tokens, requests that fail, and sleep.

    python3 -m benchmarks.swap --folder EMPTY_FOLDER --out swap.jsonl [--shape 8b-modern] [--tp 2] \
        [--clients 128] [--requests 10000] [--prompt 16] [--output 16] [--swaps 1] \
        [--modes mixed drain] [--refits 3] [--no-sleep] [--device-share 0] [--limit 280]

Clients stream from one engine in this process, each with one request at a time, greedy, from random
bfloat16 weights. Two exports of the same sizes take turns while they do, and then a process that
stands for a training sends tensors by their names over the socket for refits. For each of them: its
pause, and the longest time between two tokens of one stream from the call until a second after it,
and without an exchange. The logits after the last exchange must be those of an engine that was
started with the same weights; that engine sleeps and wakes up at the end.

Every result is a line of JSON, printed and saved as soon as it is there. --limit ends the program
after so many seconds and prints what its threads do.
--device-share 0 keeps new weights in the host's memory, as where the cache has all of the device's.
There is neither a tritonserver nor a gateway. A minute on two cores: --shape tiny --clients 8
--requests 400 --swaps 1.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from launcher_scripts.engine.swap import WeightSwaps, probed, relative_difference

NAMES = "names.json"  # of tensors, with their shapes
QUIET_SECONDS = 2.0  # with clients and without an exchange
PROBE = GenerateRequest(tuple(range(2, 34)), output_len=0, return_context_logits=True)
SLEEPER = GenerateRequest(PROBE.input_ids, 64)
RUNS_BEFORE_SLEEP = 3  # that decode steps are recorded


class Results:
    """Lines of JSON with the seconds since the start, printed and appended to a file."""

    def __init__(self, path: Path | None) -> None:
        self._start = time.perf_counter()
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self.sound = True

    def add(self, result: str, *, sound: bool = True, **values: Any) -> None:
        """Write a result; sound: it is as it must be"""
        at = round(time.perf_counter() - self._start, 1)
        line = json.dumps({"result": result, "at": at, **values})
        self.sound &= sound
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


@dataclass
class Clients:
    """Streams of clients, and the times of their tokens.

    lengths: tokens of a prompt and of what it generates
    """

    engine: Engine
    lengths: tuple[int, int]
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
            ids = tuple(2 + (37 * index + number) % 1000 for index in range(self.lengths[0]))
            future = self.engine.submit(
                GenerateRequest(ids, self.lengths[1]),
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
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--output", type=int, default=16, help="tokens")
    parser.add_argument("--swaps", type=int, default=1, help="of each mode")
    parser.add_argument("--modes", nargs="+", choices=EXCHANGE_MODES, default=list(EXCHANGE_MODES))
    parser.add_argument("--refits", type=int, default=3, help="by tensors over the socket")
    parser.add_argument("--no-sleep", action="store_true")
    parser.add_argument("--device-share", type=float, default=weight_exchange.DEVICE_SHARE)
    parser.add_argument("--limit", type=float, help="seconds of the whole program")
    parser.add_argument("--send", type=Path, help="a socket (used by the program)")
    parser.add_argument("--out", type=Path, help="where to save the lines")
    arguments = parser.parse_args(argv)
    if arguments.send is not None:
        return send(arguments.send, arguments.folder / NAMES, arguments.refits)
    if arguments.limit is not None:
        faulthandler.dump_traceback_later(arguments.limit, exit=True)
    results = Results(arguments.out)
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
        max_tokens=2 * arguments.clients * (arguments.prompt + arguments.output),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    asked = {name: getattr(arguments, name) for name in ("shape", "tp", "clients", "device_share")}
    results.add("exports", device=device, torch=torch.__version__, **asked)
    measure(settings, folders, arguments, results)
    results.add("end", sound=results.sound)
    faulthandler.cancel_dump_traceback_later()
    return int(not results.sound)


def measure(
    settings: EngineSettings,
    folders: list[Path],
    arguments: argparse.Namespace,
    results: Results,
) -> None:
    """Exchange weights while clients stream."""
    engine = Engine.load(settings)
    engine.warm_up()
    swaps = WeightSwaps(engine)
    clients = Clients(engine, (arguments.prompt, arguments.output))
    swaps.warm_up()  # as a server does
    results.add("started")
    threads = [
        threading.Thread(target=clients.run, args=(number,)) for number in range(arguments.clients)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(QUIET_SECONDS)
    start = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    quiet = clients.longest_gap(start, time.perf_counter())
    results.add("no exchange", longest_gap=quiet, answered=clients.answered)
    for number in range(arguments.swaps * len(arguments.modes)):
        mode = arguments.modes[number % len(arguments.modes)]
        called = time.perf_counter()
        try:
            result = swaps.swap(folders[(number + 1) % 2], mode).values()
        except LauncherError as error:
            results.add("swap", sound=False, mode=mode, error=str(error))
            continue
        results.add("swap", mode=mode, **seconds_of(result), **clients.around(called))
    served, logits = swaps.folder, probe(engine)
    if arguments.refits:
        for reply in sent(swaps, arguments):
            ended = reply.pop("ended")
            results.add("refit", **reply, **clients.around(ended - reply["seconds"], ended))
    while clients.answered + clients.failed < arguments.requests:
        time.sleep(0.1)
    clients.stopping.set()
    for thread in threads:
        thread.join()
    counts = {"answered": clients.answered, "failed": clients.failed, "mixed": clients.mixed}
    rate = clients.answered * arguments.output / (time.perf_counter() - began)
    results.add("requests", sound=not clients.failed, **counts, tokens_per_second=round(rate))
    engine.close()
    fresh = Engine.load(replace(settings, checkpoint_dir=served))
    expected = probe(fresh)
    equal, difference = torch.equal(logits, expected), relative_difference(logits, expected)
    results.add("fresh start", sound=equal, equal_logits=equal, difference=difference)
    if not arguments.no_sleep:
        sleep_and_wake(fresh, results)
    fresh.close()


def probe(engine: Engine) -> torch.Tensor:
    """The logits of a prompt that runs alone, as no other rows change its kernels' tiles then."""
    return engine.between_steps(
        lambda scheduler: probed(engine.run_alone(scheduler, PROBE)),
        lambda scheduler: scheduler.make_room(engine.row(PROBE)),
    )


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


def sleep_and_wake(engine: Engine, results: Results) -> None:
    """Note the seconds of both, and whether the logits and generated tokens stay."""
    swaps, before = WeightSwaps(engine), probe(engine)
    for _ in range(RUNS_BEFORE_SLEEP):
        ids = engine.submit(SLEEPER).result().output_ids
    for name, function in (("sleep", swaps.sleep), ("wake", swaps.wake)):
        began = time.perf_counter()
        try:
            function()
        except LauncherError as error:
            results.add(name, sound=False, error=str(error))
            return
        results.add(name, seconds=time.perf_counter() - began)
    began = time.perf_counter()
    after = probe(engine)
    seconds = time.perf_counter() - began
    equal = engine.submit(SLEEPER).result().output_ids == ids and torch.equal(before, after)
    results.add("awake", sound=equal, equal=equal, first_answer_seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
