"""Tokens per second by requests in flight, beside static batches and CTranslate2.

    python3 -m benchmarks.in_flight --folder EMPTY_FOLDER --out in-flight.json [--shape 1.3b] \
        [--clients 1 8 32 128] [--tp 4 --alone]

Mixed requests (32 to 512 tokens in, 16 to 256 out, greedy, random bfloat16 weights) are asked over
gRPC by that many clients, each with one request at a time, which the server batches in flight; and
as static batches: the same requests taken in groups of that many, each group one request of as many
rows, which begins when the one before has ended with its longest row. Static batches are measured
in two ways: every row goes on until the longest has ended, as in engines that have no other way;
and rows leave as they end, while none joins. CTranslate2 gets as many requests at once in a process
of its own, without a server, in each of the ways that it has; the best one counts.
Everything counts only tokens that were asked for. `benchmarks.serve --in-flight` measures the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.generate import bandwidths, machine, release
from benchmarks.peers import config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import (
    INPUTS,
    OUTPUTS,
    Server,
    in_flight_throughput,
    mixed_requests,
    static_throughput,
)
from benchmarks.shapes import CONFIGS, TINY

MODEL = "in-flight"
SETTLE_SECONDS = 5.0  # in which the server meets most shapes of steps for the first time
SECONDS = 2.0  # for a figure, beside that
PEER_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="1.3b")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tp", type=int, default=1, help="number of GPUs")
    parser.add_argument("--alone", action="store_true", help="leave CTranslate2 out")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = InFlightReport(arguments.shape, arguments.out)
    report.facts["tp_size"] = arguments.tp
    if torch.cuda.is_available():
        report.facts |= {"machine": machine(), "rates": bandwidths()}
        release()
    command = [sys.executable, "-m", "benchmarks.peers", *peer_arguments(arguments), "--write"]
    writing = None if arguments.alone else subprocess.Popen(command)
    try:
        model = served_model(arguments.shape, arguments.clients, arguments.tp)
        model.write(arguments.folder / "repository")
        start = time.perf_counter()
        with Server(arguments.folder) as ready:
            report.facts["start_seconds"] = round(time.perf_counter() - start, 1)
            for row in served_rows(ready["grpc"], arguments.shape, arguments.clients):
                report.add(row)
    except Exception as error:  # the peer goes on
        report.add({"error": reason(error)})
    if writing is not None:
        writing.wait()
        for line in peer_lines(
            "benchmarks.peers", peer_arguments(arguments), arguments.folder, PEER_SECONDS
        ):
            report.add_peer(line)
    for row in report.facts["rows"]:
        print(json.dumps(row), flush=True)
    return 0


def peer_arguments(arguments: argparse.Namespace) -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clients = map(str, arguments.clients)
    folder = ["ctranslate2", "--folder", str(arguments.folder), "--device", device]
    return [*folder, "--in-flight", arguments.shape, "--clients", *clients]


def served_model(shape: str, clients: Sequence[int], tp_size: int = 1) -> RandomModel:
    """With positions for the longest of the mixed requests."""
    config = replace(config_of(shape), max_positions=INPUTS[1] + OUTPUTS[1])
    return RandomModel(MODEL, config, max(clients), tp_size)


def served_rows(address: str, shape: str, clients: Sequence[int]) -> Iterator[dict]:
    """In flight, and in static batches of the same requests, by clients."""
    requests = mixed_requests(4 * max(clients), config_of(shape).vocab_size)
    for count in clients:
        in_flight = in_flight_throughput(address, MODEL, requests, count, SETTLE_SECONDS, SECONDS)
        static, leaving = (
            static_throughput(address, MODEL, requests, count, SECONDS / 2, to_longest=to_longest)
            for to_longest in (True, False)
        )
        yield {
            "clients": count,
            "in_flight_tokens_per_s": round(in_flight, 1),
            "static_tokens_per_s": round(static, 1),
            "ratio": round(in_flight / static, 2),
            "leaving_tokens_per_s": round(leaving, 1),
            "ratio_to_leaving": round(in_flight / leaving, 2),
            "peer_tokens_per_s": {},
        }


class InFlightReport:
    """The figures so far, written to a file with every one that is added."""

    def __init__(self, shape: str, out: Path | None) -> None:
        self._out = out
        self.facts: dict = {"shape": shape, "rows": [], "errors": []}

    def add(self, row: dict) -> None:
        """A served row, or why there is none."""
        self.facts["errors" if "error" in row else "rows"].append(row)
        self._keep(row)

    def add_peer(self, line: dict) -> None:
        """A line that the peer's process printed; its best strategy makes the ratio."""
        if "version" in line:
            self.facts.setdefault("machine", {})["ctranslate2"] = line["version"]
        if "error" in line:
            self.facts["errors"].append(line)
        for row in self.facts["rows"]:
            if row["clients"] == line.get("clients"):
                speeds = row["peer_tokens_per_s"]
                speeds[line["strategy"]] = line["tokens_per_s"]
                best = row["in_flight_tokens_per_s"] / max(speeds.values())
                row["ratio_to_ctranslate2"] = round(best, 2)
        self._keep(line)

    def _keep(self, line: dict) -> None:
        print(json.dumps(line), flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.facts, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
