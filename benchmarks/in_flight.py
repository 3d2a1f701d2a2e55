"""Tokens per second by requests in flight, beside static batches and CTranslate2.

    python3 -m benchmarks.in_flight --folder EMPTY_FOLDER --out in-flight.json [--shape 1.3b] \
        [--clients 1 8 32 128] [--requests 256]

Mixed requests (32 to 512 tokens in, 16 to 256 out, greedy, random bfloat16 weights) are asked over
gRPC by that many clients, each with one request at a time, which the server batches in flight; and
as static batches, requests of that many rows one after the other, each answered when its longest
row is. CTranslate2 gets as many requests at once in a process of its own, without a server, in each
of the ways that it has (in_flight_peer.STRATEGIES); the best one counts. Everything counts only
tokens that were asked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.generate import bandwidths, machine, release
from benchmarks.peers import config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server, mixed_requests, throughput
from benchmarks.shapes import CONFIGS, TINY

MODEL = "served"
PEER = "benchmarks.in_flight_peer"
PEER_SECONDS = 150.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="1.3b")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4, help="nothing is asked after them")
    parser.add_argument("--alone", action="store_true", help="leave CTranslate2 out")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report: dict = {"shape": arguments.shape, "rows": [], "errors": []}
    if torch.cuda.is_available():
        report |= {"machine": machine(), "rates": bandwidths()}
        release()
    writing = None if arguments.alone else start_writing(arguments)
    try:
        for row in served_rows(arguments):
            report["rows"].append(row)
            keep(report, row, arguments.out)
    except Exception as error:  # the peer goes on
        report["errors"].append(reason(error))
        print(report["errors"][-1], flush=True)
    if writing is not None:
        writing.wait()
        lines = peer_lines(PEER, peer_arguments(arguments), arguments.folder, PEER_SECONDS)
        for line in lines:
            add_peer(report, line)
            keep(report, line, arguments.out)
    for row in report["rows"]:
        print(json.dumps(row), flush=True)
    return 0


def served_rows(arguments: argparse.Namespace) -> Iterator[dict]:
    """In flight and in static batches of the same requests, by clients."""
    config = config_of(arguments.shape)
    RandomModel(MODEL, config, max(arguments.clients)).write(arguments.folder / "repository")
    requests = mixed_requests(arguments.requests, config.vocab_size)
    alone = [[request] for request in requests]
    with Server(arguments.folder) as ready:
        for clients in arguments.clients:
            batches = [
                requests[first : first + clients] for first in range(0, len(requests), clients)
            ]
            throughput(
                ready["grpc"], MODEL, alone[:clients], clients, arguments.seconds
            )  # warms up
            in_flight = throughput(ready["grpc"], MODEL, alone, clients, arguments.seconds)
            static = throughput(ready["grpc"], MODEL, batches, 1, arguments.seconds)
            yield {
                "clients": clients,
                "in_flight_tokens_per_s": round(in_flight, 1),
                "static_tokens_per_s": round(static, 1),
                "ratio": round(in_flight / static, 2),
                "peer_tokens_per_s": {},
            }


def start_writing(arguments: argparse.Namespace) -> subprocess.Popen:
    """Make CTranslate2's files while the server starts."""
    return subprocess.Popen([sys.executable, "-m", PEER, *peer_arguments(arguments), "--write"])


def peer_arguments(arguments: argparse.Namespace) -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = {
        "folder": arguments.folder,
        "shape": arguments.shape,
        "requests": arguments.requests,
        "seconds": arguments.seconds,
        "device": device,
    }
    named = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*named, "--clients", *map(str, arguments.clients)]


def add_peer(report: dict, line: dict) -> None:
    """A line that the peer's process printed; the best strategy makes the ratio."""
    if "version" in line:
        report.setdefault("machine", {})["ctranslate2"] = line["version"]
    if "error" in line:
        report["errors"].append(line)
    for row in report["rows"]:
        if row["clients"] == line.get("clients"):
            speeds = row["peer_tokens_per_s"]
            speeds[line["strategy"]] = line["tokens_per_s"]
            best = row["in_flight_tokens_per_s"] / max(speeds.values())
            row["ratio_to_ctranslate2"] = round(best, 2)


def keep(report: dict, line: dict, out: Path | None) -> None:
    print(json.dumps(line), flush=True)
    if out:
        out.write_text(json.dumps(report, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
