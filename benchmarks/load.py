"""From the start of a server to its first token, with the model's files in the page cache.

    python3 -m benchmarks.load --folder EMPTY_FOLDER --out load.json [--shape 5b] [--repeat 2]

A repository of random bfloat16 weights is written, every file with content of its own, and served;
a client asks for one token as soon as the server is ready. The server's own timeline says where the
seconds go. The first start finds no compiled kernels, and its timeline says how long it waits for
those that its threads compile; the others find those of the first. Beside it: how long the same
bytes take from pinned memory to the GPU (the floor), and how long CTranslate2 takes from the start
of a process to its first token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.floors import BYTES, numbers
from benchmarks.generate import machine
from benchmarks.peers import config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.served.client import Client

MODEL = "served"
PEER = "benchmarks.load_peer"
PEER_SECONDS = 90.0
ROWS = 32


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="5b")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="leave CTranslate2 out")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = config_of(arguments.shape)
    report: dict = {"shape": arguments.shape, "starts": [], "errors": []}
    report["weight_bytes"] = BYTES * numbers(config, lambda _: True)
    writing = None if arguments.alone else start_writing(arguments)
    RandomModel(MODEL, config, ROWS, linked=False).write(arguments.folder / "repository")
    if writing is not None:
        writing.wait()
    if torch.cuda.is_available():
        report["machine"] = machine()
        report["floor_s"] = round(report["weight_bytes"] / copied_bytes_per_s(), 2)
    for _ in range(arguments.repeat):
        try:
            report["starts"].append(first_token(arguments.folder))
        except Exception as error:  # the peer goes on
            report["errors"].append(reason(error))
        keep(report, arguments.out)
    if not arguments.alone:
        report["ctranslate2"] = []
        for _ in range(arguments.repeat):
            lines = peer_lines(PEER, peer_arguments(arguments), arguments.folder, PEER_SECONDS)
            report["ctranslate2"].extend(lines)
    keep(report, arguments.out)
    print(json.dumps(report), flush=True)
    return 0


def first_token(folder: Path) -> dict:
    """Seconds from the command to the first token, and the timeline up to it."""
    (folder / "results" / "ready.json").unlink(missing_ok=True)
    started = time.time()
    with Server(folder, TRITON_CACHE_DIR=str(folder / "kernels")) as ready:
        with Client(ready["grpc"], MODEL, protocol="grpc") as client:
            client.generate([GenerateRequest((2, 3, 4), 1)])
        answered = time.time()
    timeline = [*ready["timeline"], ["the first token is with the client", answered]]
    steps = [[what.removeprefix(f"{MODEL}: "), round(at - started, 2)] for what, at in timeline]
    print(json.dumps(steps), flush=True)
    compiled = len(list((folder / "kernels").glob("*/*.cubin")))
    return {
        "first_token_s": round(answered - started, 2),
        "kernels_in_cache": compiled,
        "timeline_s": steps,
    }


def copied_bytes_per_s() -> float:
    """From pinned memory to the GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return source.numel() / min(times)


def start_writing(arguments: argparse.Namespace) -> subprocess.Popen:
    """Make CTranslate2's files beside the repository."""
    return subprocess.Popen([sys.executable, "-m", PEER, *peer_arguments(arguments), "--write"])


def peer_arguments(arguments: argparse.Namespace) -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ["--folder", str(arguments.folder), "--shape", arguments.shape, "--device", device]


def keep(report: dict, out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(report, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
