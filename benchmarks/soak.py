"""Soak a running server: many clients, mixed requests, every answer compared.

    python3 -m benchmarks.soak READY_FILE [--requests 2000 | --minutes 60 --rate 5] [--clients 16]

READY_FILE is the server's ready.json. Each of the fixed cases (benchmarks/soak_cases.py) is first
asked alone; then the clients ask them in random order, at once, some over HTTP and some over gRPC.
An answer that is not the one given alone is wrong. Memory is the resident set of the server, its
stubs and its ranks. With --minutes, memory, descriptors and threads of each process are sampled
every 10 s, and the report says which of them grew. Prints a report and exits with 1 when an answer
was wrong or something grew.
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
from launcher_scripts.clients.remote import RemoteServer, find_models

CASES_EACH = 6  # of every kind and model
SAMPLE_SECONDS = 0.5
LONG_SAMPLE_SECONDS = 10.0
MIB = 2**20
MIN_SAMPLES = 30  # for a verdict
# What a process may have more of in the last third than in the middle one, by share and number.
MAX_GROWTH = {"memory_mib": (0.01, 2.0), "descriptors": (0.0, 2.0), "threads": (0.0, 2.0)}


@dataclass(frozen=True)
class ProcessSample:
    """One process at one time."""

    name: str
    memory_mib: float
    descriptors: int
    threads: int


@dataclass
class Soak:
    """What happened.

    memory:  (seconds, MiB of all processes together)
    samples: by process id, with --minutes
    """

    requests: int
    clients: int
    seconds: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    processes: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    samples: dict[int, list[ProcessSample]] = field(default_factory=dict)

    @property
    def growth(self) -> list[str]:
        """What grew from the middle third of the samples to the last one, by process."""
        lines = []
        for pid, samples in self.samples.items():
            if len(samples) < MIN_SAMPLES:
                continue
            third = len(samples) // 3
            for quantity, (share, number) in MAX_GROWTH.items():
                values = [getattr(sample, quantity) for sample in samples]
                middle, last = np.median(values[third:-third]), np.median(values[-third:])
                if last - middle > max(share * middle, number):
                    hours = third * LONG_SAMPLE_SECONDS / 3600
                    lines.append(
                        f"{samples[0].name} ({pid}): {quantity} grew from {middle:.0f} to "
                        f"{last:.0f}, {(last - middle) / hours:.0f} in an hour"
                    )
        return lines

    def _verdict(self) -> list[str]:
        if not self.samples:
            return []
        if max(map(len, self.samples.values())) < MIN_SAMPLES:
            return [f"fewer than {MIN_SAMPLES} samples: whether something grows is not known"]
        return self.growth or ["memory, descriptors and threads of all processes are flat"]

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
                *self._verdict(),
            ]
        )


def soak(
    ready: dict[str, Any],
    requests: int,
    clients: int,
    vocab_size: int,
    *,
    minutes: float | None = None,
    rate: float | None = None,
) -> Soak:
    """Ask `requests` requests of `clients` threads. ready: the server's ready file.

    minutes: as many requests as there are in this time, in its place
    rate:    maximum number of requests in a second; None: as many as there can be
    """
    result = Soak(requests, clients)
    with RemoteServer(ready["grpc"], protocol="grpc", request_timeout=120) as server:
        ours = sorted({rank["model"] for rank in ready["ranks"]})
        cases = make_cases([find_models(server, name) for name in ours], vocab_size, CASES_EACH)
        alone = {case.name: replace(case, stops=None).ask(server) for case in cases}
    waiting: queue.Queue[Case | None] = queue.Queue(maxsize=clients)
    lock = threading.Lock()
    workers = [
        threading.Thread(target=_work, args=(ready, number, waiting, alone, result, lock))
        for number in range(clients)
    ]
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ready, result, ended, minutes is not None))
    watcher.start()
    start = time.perf_counter()
    asked: Counter[str] = Counter()
    random = np.random.default_rng(requests)
    try:
        for worker in workers:
            worker.start()
        count = 0
        while count < requests if minutes is None else time.perf_counter() < start + 60 * minutes:
            case = cases[random.integers(0, len(cases))]
            waiting.put(case)
            asked[case.kind] += 1
            count += 1
            if rate is not None:
                time.sleep(max(0.0, start + count / rate - time.perf_counter()))
        for _ in workers:
            waiting.put(None)
        for worker in workers:
            worker.join()
    finally:
        result.seconds = time.perf_counter() - start
        ended.set()
        watcher.join()
    result.asked, result.requests = dict(asked), asked.total()
    return result


def _work(
    ready: dict[str, Any],
    number: int,
    waiting: queue.Queue[Case | None],
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
        while (case := waiting.get()) is not None:
            server = http if number % 2 and not case.models.decoupled else grpc
            try:
                answer = case.ask(server)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            if not case.agrees(answer, alone[case.name]):
                with lock:
                    result.wrong.append(f"{case.name}: {answer}, alone {alone[case.name]}"[:500])


def _watch(ready: dict[str, Any], result: Soak, finished: threading.Event, long: bool) -> None:
    """Note what the server's processes have until the end."""
    start = time.perf_counter()
    while not finished.wait(LONG_SAMPLE_SECONDS if long else SAMPLE_SECONDS):
        samples = process_samples(ready)
        result.processes = len(samples)
        memory = sum(sample.memory_mib for sample in samples.values())
        result.memory.append((time.perf_counter() - start, memory))
        for pid, sample in samples.items() if long else ():
            result.samples.setdefault(pid, []).append(sample)


def process_samples(ready: dict[str, Any]) -> dict[int, ProcessSample]:
    """The server, all that it started, and the ranks, by process id."""
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
    samples = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            memory = int(status.get("VmRSS", "0 kB").split()[0]) / 1024
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            name = status["Name"].strip()
            samples[pid] = ProcessSample(name, memory, descriptors, int(status["Threads"]))
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ready_file", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="ask for so long, in place of --requests")
    parser.add_argument("--rate", type=float, help="at most so many requests in a second")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=50257, help="ids are below it")
    parser.add_argument("--json", type=Path, help="write the whole result here")
    flags = parser.parse_args(argv)
    ready = json.loads(flags.ready_file.read_text(encoding="utf-8"))
    result = soak(
        ready,
        flags.requests,
        flags.clients,
        flags.vocab_size,
        minutes=flags.minutes,
        rate=flags.rate,
    )
    print(result.report())
    if flags.json is not None:
        flags.json.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return 1 if result.wrong or result.growth else 0


if __name__ == "__main__":
    sys.exit(main())
