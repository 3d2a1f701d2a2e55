"""Soak a running server: many clients, mixed requests, every answer compared.

    python3 -m benchmarks.soak READY_FILE [--requests 2000] [--clients 16] [--vocab-size N]

READY_FILE is the server's ready.json. Each of the fixed cases (benchmarks/soak_cases.py) is first
asked alone; then the clients ask them in random order, at once, some over HTTP and some over gRPC.
An answer that is not the one given alone is wrong. Memory is the resident set of the server, its
stubs and its ranks. Prints a report and exits with 1 when an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak_cases import Case, make_cases
from launcher_scripts.clients.models import find_models
from launcher_scripts.clients.remote import RemoteServer

CASES_EACH = 6  # of every kind and model
SAMPLE_SECONDS = 0.5
MIB = 2**20


@dataclass
class Soak:
    """What happened. memory: (seconds, MiB of all processes together)."""

    requests: int
    clients: int
    seconds: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    processes: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)

    @property
    def memory_after_start(self) -> float:
        """The median of the second fifth, MiB: buffers of every size have been made by then."""
        return self._median(0.2, 0.4)

    @property
    def memory_at_end(self) -> float:
        """The median of the last fifth, MiB."""
        return self._median(0.8, 1.0)

    def _median(self, start: float, end: float) -> float:
        count = len(self.memory)
        part = self.memory[int(count * start) : max(int(count * end), int(count * start) + 1)]
        return float(np.median([size for _, size in part])) if part else 0.0

    def report(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.asked.items()))
        start, end = self.memory_after_start, self.memory_at_end
        return "\n".join(
            [
                f"{self.requests} requests of {self.clients} clients in {self.seconds:.1f} s: "
                + kinds,
                f"wrong answers: {len(self.wrong)}",
                *self.wrong[:10],
                f"memory of {self.processes} processes: {start:.0f} MiB after the start, "
                f"{end:.0f} MiB at the end",
            ]
        )


def soak(ready: dict[str, Any], requests: int, clients: int, vocab_size: int) -> Soak:
    """Ask `requests` requests of `clients` threads. ready: the server's ready file."""
    result = Soak(requests, clients)
    with RemoteServer(ready["grpc"], protocol="grpc", request_timeout=120) as server:
        ours = sorted({rank["model"] for rank in ready["ranks"]})
        cases = make_cases([find_models(server, name) for name in ours], vocab_size, CASES_EACH)
        alone = {case.name: replace(case, stops=None).ask(server) for case in cases}
    order = np.random.default_rng(requests).integers(0, len(cases), requests)
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for index in order:
        waiting.put(cases[index])
    lock = threading.Lock()
    workers = [
        threading.Thread(target=_work, args=(ready, number, waiting, alone, result, lock))
        for number in range(clients)
    ]
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ready, result, ended))
    watcher.start()
    start = time.perf_counter()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        result.seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
    result.asked = dict(Counter(cases[index].kind for index in order))
    return result


def _work(
    ready: dict[str, Any],
    number: int,
    waiting: queue.SimpleQueue[Case],
    alone: dict[str, Any],
    result: Soak,
    lock: threading.Lock,
) -> None:
    """One client: every second one asks over HTTP what needs no stream."""
    with contextlib.ExitStack() as stack:
        grpc, http = (
            stack.enter_context(RemoteServer(ready[p], protocol=p, request_timeout=120))
            for p in ("grpc", "http")
        )
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            server = http if number % 2 and not case.models.decoupled else grpc
            try:
                answer = case.ask(server)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            if not case.agrees(answer, alone[case.name]):
                with lock:
                    result.wrong.append(f"{case.name}: {answer}, alone {alone[case.name]}"[:500])


def _watch(ready: dict[str, Any], result: Soak, ended: threading.Event) -> None:
    """Note the server's memory until the end."""
    start = time.perf_counter()
    while not ended.wait(SAMPLE_SECONDS):
        sizes = resident_sizes(ready)
        result.processes = len(sizes)
        result.memory.append((time.perf_counter() - start, sum(sizes.values()) / MIB))


def resident_sizes(ready: dict[str, Any]) -> dict[int, int]:
    """Bytes in memory of the server, of all that it started, and of the ranks, by process id."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = {ready["pid"], *(rank["pid"] for rank in ready["ranks"])}
    waiting = list(pids)
    while waiting:
        new = set(children.get(waiting.pop(), ())) - pids
        pids |= new
        waiting += new
    sizes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib = next((line.split()[1] for line in lines if line.startswith("VmRSS:")), "0")
            sizes[pid] = int(kib) * 1024
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ready_file", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=50257, help="ids are below it")
    parser.add_argument("--json", type=Path, help="write the whole result here")
    flags = parser.parse_args(argv)
    ready = json.loads(flags.ready_file.read_text(encoding="utf-8"))
    result = soak(ready, flags.requests, flags.clients, flags.vocab_size)
    print(result.report())
    if flags.json is not None:
        flags.json.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
