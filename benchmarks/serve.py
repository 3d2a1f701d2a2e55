"""Latency and tokens per second of models behind tritonserver, beside transformers and CTranslate2.

    python3 -m benchmarks.serve --folder EMPTY_FOLDER --out serve.json \
        [--shapes 126m 1.3b 5b 20b t5-base t5-3b] [--tp 1 2 4] [--peers ctranslate2 transformers] \
        [--in-flight 1.3b --in-flight-out in-flight.json]

Repositories of random bfloat16 weights are written, each is served by a tritonserver of its own,
and one after the other is asked over gRPC: one row in the use cases' lengths, then batches. The
peers take the same requests in processes of their own, without a server between. Greedy; no row
ends early. Floors are bytes and operations over the rates that were measured in the same run. A
model or peer that fails has its reason in the results, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import in_flight
from benchmarks.decode import matrix_tflops
from benchmarks.floors import Rates, floor_ms
from benchmarks.generate import bandwidths, machine, release
from benchmarks.in_flight import InFlightReport
from benchmarks.peers import LEFT_OUT, PEERS, cases_of, config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server, case_ms
from benchmarks.shapes import CONFIGS, TINY, Case
from launcher_scripts.models.gpt import GPTConfig

SERVED = ("126m", "1.3b", "5b", "20b", "t5-base", "t5-3b")
POSITIONS = 1024
SECONDS = 0.25  # for a figure, at least
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
PEER_SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """A model that is served from a folder of its own, and the shape that it has."""

    shape: str
    model: RandomModel
    folder: Path

    def server(self) -> Server:
        """It sees as many GPUs as it has ranks: the first of those that are visible."""
        if not torch.cuda.is_available():
            return Server(self.folder)
        visible = os.environ.get(VISIBLE_GPUS) or ",".join(map(str, range(self.model.tp_size)))
        gpus = visible.split(",")[: self.model.tp_size]
        return Server(self.folder, **{VISIBLE_GPUS: ",".join(gpus)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shapes", nargs="+", choices=(*CONFIGS, *TINY), default=list(SERVED))
    parser.add_argument("--tp", nargs="+", type=int, default=[1], help="numbers of GPUs")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--use-cases", action="store_true", help="one row only, no batches")
    parser.add_argument("--in-flight", choices=(*CONFIGS, *TINY), help="this shape's, too")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--in-flight-out", type=Path)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = Report(arguments)
    report.measure_machine()
    written = [start_writing(peer, arguments) for peer in arguments.peers]
    for tp_size in arguments.tp:
        measure_served(arguments, tp_size, report)
    for process in written:
        process.wait()
    for peer in arguments.peers:
        for line in peer_rows(peer, arguments):
            report.add_peer(peer, line)
    report.print_table()
    return 0


def measure_served(arguments: argparse.Namespace, tp_size: int, report: Report) -> None:
    """Every model's figures, one server at a time: an idle one still records graphs on its GPU."""
    models = list(served_models(arguments, tp_size))
    with ThreadPoolExecutor(len(models)) as pool:
        written = [pool.submit(each.model.write, each.folder / "repository") for each in models]
    for served, writing in zip(models, written, strict=True):
        server = served.server()
        address = start(server, writing)
        try:
            if served.model.name == in_flight.MODEL:
                report.measure_in_flight(served.shape, address, arguments.clients)
            else:
                for row in case_rows(served, address, arguments.use_cases):
                    report.add(row)
        finally:
            server.close()


def served_models(arguments: argparse.Namespace, tp_size: int) -> Iterator[Served]:
    for shape in arguments.shapes:
        config = config_of(shape)
        if isinstance(config, GPTConfig):
            config = replace(config, max_positions=POSITIONS)
        rows = max(case.rows for case in cases_of(shape))
        folder = arguments.folder / f"{shape}-tp{tp_size}"
        yield Served(shape, RandomModel(shape, config, rows, tp_size), folder)
    if arguments.in_flight and tp_size == 1:
        model = in_flight.served_model(arguments.in_flight, arguments.clients)
        yield Served(arguments.in_flight, model, arguments.folder / in_flight.MODEL)


def start(server: Server, writing: Future[None]) -> str | Exception:
    """The address of the server, or why there is none."""
    try:
        writing.result()
        return server.start()["grpc"]
    except Exception as error:  # the other models go on
        return error


def case_rows(served: Served, address: str | Exception, use_cases: bool) -> Iterator[dict]:
    """Every request of the model with its milliseconds; or why there is none."""
    facts = {"model": served.shape, "tp_size": served.model.tp_size}
    if isinstance(address, Exception):
        yield {**facts, "error": reason(address)}
        return
    vocab_size = config_of(served.shape).vocab_size
    try:
        for case in cases_of(served.shape):
            if case.rows == 1 or not use_cases:
                ms = case_ms(address, served.shape, case, vocab_size, SECONDS)
                yield {**facts, **vars(case), "ms": round(ms, 2), "peers": {}}
    except Exception as error:  # the other models go on
        yield {**facts, "error": reason(error)}


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
    listed = [peer, "--folder", str(arguments.folder), "--device", device, "--shapes", *shapes]
    if arguments.in_flight and peer == "ctranslate2":
        listed += ["--in-flight", arguments.in_flight, "--clients", *map(str, arguments.clients)]
    return listed


class Report:
    """The figures so far, written to a file with every one that is added."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out = arguments.out
        self.facts: dict = {"machine": {}, "rows": [], "errors": []}
        self._rates: Rates | None = None
        self._in_flight: InFlightReport | None = None
        if arguments.in_flight:
            self._in_flight = InFlightReport(arguments.in_flight, arguments.in_flight_out)

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
        if self._in_flight is not None:
            self._in_flight.facts |= {"machine": self.facts["machine"], "rates": speeds}
        print(json.dumps(speeds), flush=True)

    def measure_in_flight(
        self, shape: str, address: str | Exception, clients: Sequence[int]
    ) -> None:
        """Ask the server mixed requests, and keep its tokens per second."""
        if self._in_flight is None:
            return
        try:
            if isinstance(address, Exception):
                raise address
            for row in in_flight.served_rows(address, shape, clients):
                self._in_flight.add(row)
        except Exception as error:  # the peer goes on
            self._in_flight.add({"error": reason(error)})

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
        if "strategy" in line:
            if self._in_flight is not None:
                self._in_flight.add_peer(line)
            return
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
