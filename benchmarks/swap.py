"""Exchanges of weights under load: the longest pause between two tokens, and requests that fail.

    python3 -m benchmarks.swap --folder EMPTY_FOLDER --out swap.json [--shape 1.3b] [--tp 2] \
        [--clients 128] [--requests 10000] [--modes mixed drain]

Clients stream from one engine, each with one request at a time, greedy, from random bfloat16
weights. Two exports of the same sizes take turns while they do. For each exchange: its pause, from
the last token of any stream before to the first one after; the longest time between two tokens of
one stream around it, and without an exchange. At the end the logits must be those of an engine
that was started with the weights that were exchanged last.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.repositories import RandomModel
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import EXCHANGE_MODES, GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.swap import WeightSwaps

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
QUIET_SECONDS = 2.0  # with clients and without an exchange
PROBE = GenerateRequest(tuple(range(2, 34)), output_len=0, return_context_logits=True)


@dataclass
class Clients:
    """Streams of clients, and the times of their tokens."""

    engine: Engine
    max_requests: int
    answered: int = 0
    failed: int = 0
    mixed: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (end, seconds)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """One client until the end."""
        while not self.stopping.is_set() and self.answered + self.failed < self.max_requests:
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
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--swaps", type=int, default=4, help="at most, of each mode")
    parser.add_argument("--modes", nargs="+", choices=EXCHANGE_MODES, default=list(EXCHANGE_MODES))
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
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
    )
    report = measure(settings, folders, arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"device": device, "torch": torch.__version__, "shape": arguments.shape, **report}
    print(json.dumps(report, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if not report["failed"] and report["equal_to_a_fresh_start"] else 1


def measure(
    settings: EngineSettings, folders: list[Path], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Exchange weights while clients stream."""
    engine = Engine.load(settings)
    engine.warm_up()
    swaps, clients = WeightSwaps(engine), Clients(engine, arguments.requests)
    threads = [
        threading.Thread(target=clients.run, args=(number,)) for number in range(arguments.clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(QUIET_SECONDS)
    start = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    rows, quiet = [], clients.longest_gap(start, time.perf_counter())
    for number in range(arguments.swaps * len(arguments.modes)):
        if clients.answered + clients.failed >= arguments.requests:
            break
        mode = arguments.modes[number % len(arguments.modes)]
        result = swaps.swap(folders[(number + 1) % 2], mode)
        end = time.perf_counter()
        time.sleep(QUIET_SECONDS)  # streams of this time have ended
        row = {
            name: getattr(result, f"{name}_seconds") for name in ("prepare", "exchange", "pause")
        }
        around = clients.longest_gap(end - result.pause_seconds - 1.0, end + 1.0)
        rows.append({"mode": mode, **row, "mixed_rows": result.mixed_rows, "longest_gap": around})
    if not rows:
        raise SystemExit("all requests were answered before the first exchange: more --requests")
    clients.stopping.set()
    for thread in threads:
        thread.join()
    logits = engine.submit(PROBE).result().context_logits
    engine.close()
    fresh = Engine.load(replace(settings, checkpoint_dir=swaps.folder))
    expected = fresh.submit(PROBE).result().context_logits
    fresh.close()
    return {
        "clients": arguments.clients,
        "answered": clients.answered,
        "failed": clients.failed,
        "mixed": clients.mixed,
        "longest_gap_without_an_exchange": quiet,
        "exchanges": rows,
        "equal_to_a_fresh_start": bool(torch.equal(logits, expected)),
    }


if __name__ == "__main__":
    sys.exit(main())
