"""Latency and tokens per second of models behind tritonserver, beside transformers and CTranslate2.

    python3 -m benchmarks.serve --folder EMPTY_FOLDER --out serve.json \
        [--shapes 126m 1.3b 5b 20b t5-base t5-3b] [--tp 1 2 4] [--peers ctranslate2 transformers]

Repositories of random bfloat16 weights are written, each is served by a tritonserver of its own,
and one after the other is asked over gRPC: one row in the use cases' lengths, then batches. The
peers take the same requests in processes of their own, without a server between. Greedy; no row
ends early. Floors are bytes and operations over the rates that were measured in the same run. A
model or peer that fails has its reason in the results, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.decode import matrix_tflops
from benchmarks.floors import Rates, floor_ms
from benchmarks.generate import bandwidths, machine, release
from benchmarks.peers import LEFT_OUT, PEERS, cases_of, config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server, case_ms
from benchmarks.shapes import CONFIGS, TINY, Case
from launcher_scripts.models.gpt import GPTConfig

SERVED = ("126m", "1.3b", "5b", "20b", "t5-base", "t5-3b")
POSITIONS = 1024  # so that all servers' caches fit one GPU
SECONDS = 0.4  # for a figure, at least
PEER_SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """A model that is served from a folder of its own, cut for `tp_size` GPUs."""

    model: str
    tp_size: int
    folder: Path

    def write(self) -> None:
        config = config_of(self.model)
        if isinstance(config, GPTConfig):
            config = replace(config, max_positions=POSITIONS)
        rows = max(case.rows for case in cases_of(self.model))
        RandomModel(self.model, config, rows, self.tp_size).write(self.folder / "repository")

    def server(self, number: int) -> Server:
        """Servers of one GPU each are spread over the GPUs."""
        gpus = torch.cuda.device_count()
        if gpus == 0:
            return Server(self.folder)
        chosen = [number % gpus] if self.tp_size == 1 else range(self.tp_size)
        return Server(self.folder, CUDA_VISIBLE_DEVICES=",".join(map(str, chosen)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shapes", nargs="+", choices=(*CONFIGS, *TINY), default=list(SERVED))
    parser.add_argument("--tp", nargs="+", type=int, default=[1], help="numbers of GPUs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--use-cases", action="store_true", help="one row only, no batches")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out)
    report.measure_machine()
    written = [start_writing(peer, arguments) for peer in arguments.peers]
    for tp_size in arguments.tp:
        for row in served_rows(arguments, tp_size):
            report.add(row)
    for process in written:
        process.wait()
    for peer in arguments.peers:
        for line in peer_rows(peer, arguments):
            report.add_peer(peer, line)
    report.print_table()
    return 0


def served_rows(arguments: argparse.Namespace, tp_size: int) -> Iterator[dict]:
    """Every model's rows: all servers are started together and asked one after the other."""
    models = [
        Served(name, tp_size, arguments.folder / f"{name}-tp{tp_size}") for name in arguments.shapes
    ]
    servers = [served.server(number) for number, served in enumerate(models)]
    with ThreadPoolExecutor(len(models)) as pool:
        try:
            started = pool.map(start, models, servers)
            for served, address in zip(models, list(started), strict=True):
                facts = {"model": served.model, "tp_size": tp_size}
                if isinstance(address, Exception):
                    yield {**facts, "error": reason(address)}
                    continue
                try:
                    for case, ms in timed_cases(served.model, address, arguments.use_cases):
                        yield {**facts, **vars(case), "ms": round(ms, 2), "peers": {}}
                except Exception as error:  # the other models go on
                    yield {**facts, "error": reason(error)}
        finally:
            list(pool.map(Server.close, servers))


def start(served: Served, server: Server) -> str | Exception:
    """The address of the server, or why there is none."""
    try:
        served.write()
        return server.start()["grpc"]
    except Exception as error:  # the other models go on
        return error


def timed_cases(model: str, address: str, use_cases: bool) -> Iterator[tuple[Case, float]]:
    """Every request of the model with its milliseconds."""
    for case in cases_of(model):
        if case.rows == 1 or not use_cases:
            yield case, case_ms(address, model, case, config_of(model).vocab_size, SECONDS)


def start_writing(peer: str, arguments: argparse.Namespace) -> subprocess.Popen:
    """Make the peer's files while the servers start."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers", *peer_arguments(peer, arguments), "--write"]
    )


def peer_rows(peer: str, arguments: argparse.Namespace) -> Iterator[dict]:
    return peer_lines(
        "benchmarks.peers", peer_arguments(peer, arguments), arguments.folder, PEER_SECONDS
    )


def peer_arguments(peer: str, arguments: argparse.Namespace) -> list[str]:
    shapes = [name for name in arguments.shapes if name not in LEFT_OUT[peer]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [peer, "--folder", str(arguments.folder), "--device", device, "--shapes", *shapes]


class Report:
    """The figures so far, written to a file with every one that is added."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self.facts: dict = {"machine": {}, "rows": [], "errors": []}
        self._rates: Rates | None = None

    def measure_machine(self) -> None:
        """What the GPU is and does; nothing without one."""
        if not torch.cuda.is_available():
            return
        speeds = {**bandwidths(), "matrix_tflops": round(matrix_tflops(), 1)}
        release()
        self._rates = Rates(speeds["read_tb_per_s"] * 1e12, speeds["matrix_tflops"] * 1e12)
        self.facts["machine"] = machine()
        self.facts["machine"]["gpus"] = torch.cuda.device_count()
        self.facts["rates"] = speeds
        print(json.dumps(speeds), flush=True)

    def add(self, row: dict) -> None:
        """A served row, with its floor."""
        if "error" in row:
            self.facts["errors"].append(row)
        else:
            case = Case.of(row)
            row["tokens_per_s"] = round(case.rows * case.output / row["ms"] * 1e3, 1)
            if self._rates is not None:
                floor = floor_ms(config_of(row["model"]), case, self._rates) / row["tp_size"]
                row["floor_ms"] = round(floor, 2)
            self.facts["rows"].append(row)
        self._keep(row)

    def add_peer(self, peer: str, line: dict) -> None:
        """A line that the peer's process printed."""
        if "version" in line:
            self.facts["machine"][peer] = line["version"]
        elif "error" in line:
            self.facts["errors"].append({"peer": peer, **line})
        else:
            same = ("model", "rows", "input", "output")
            for row in self.facts["rows"]:
                if all(row[name] == line[name] for name in same):
                    row["peers"][peer] = line["ms"]
                    row.setdefault("ratios", {})[peer] = round(line["ms"] / row["ms"], 2)
        self._keep({"peer": peer, **line})

    def _keep(self, line: dict) -> None:
        print(json.dumps(line), flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.facts, indent=2), encoding="utf-8")

    def print_table(self) -> None:
        for row in self.facts["rows"]:
            peers = " ".join(f"{name} {ms:.1f}" for name, ms in row["peers"].items())
            print(
                f"{row['model']:8} tp {row['tp_size']} b{row['rows']:<3} {row['input']:>3}/"
                f"{row['output']:<4} {row['ms']:9.2f} ms  floor {row.get('floor_ms', 0):9.2f}  "
                f"{row['tokens_per_s']:9.1f} tok/s  {peers}  {row.get('ratios', {})}"
            )


if __name__ == "__main__":
    sys.exit(main())
