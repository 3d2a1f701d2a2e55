"""From the start of a server to its first token, with the model's files in the page cache.

    python3 -m benchmarks.load --folder EMPTY_FOLDER --out load.json [--shape 5b] [--repeat 2] \
        [--engine]

A repository of random bfloat16 weights is written, every file with content of its own, and served;
a client asks for one token as soon as the server is ready. The server's own timeline says where the
seconds go. The first start finds no compiled kernels, and its timeline says how long it waits for
those that its threads compile; the others find those of the first. Beside it: how long the same
bytes take from pinned memory to the GPU (the floor), and how long CTranslate2 takes from the start
of a process to its first token.

--engine starts the engine in a process of its own, without tritonserver and a peer, and once more
with files that are out of the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.floors import BYTES, numbers
from benchmarks.generate import machine
from benchmarks.peers import config_of, peer_lines, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.clients.model_client import Client
from launcher_scripts.contract.requests import GenerateRequest

MODEL = "served"
PEER = "benchmarks.load_peer"
PEER_SECONDS = 90.0
ROWS = 32


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="5b")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--engine", action="store_true", help="without tritonserver")
    parser.add_argument("--alone", action="store_true", help="leave CTranslate2 out")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    arguments.alone |= arguments.engine
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
    starts = [engine_start if arguments.engine else first_token] * arguments.repeat
    if arguments.engine:
        starts.append(cold_start)
    for start in starts:
        try:
            report["starts"].append(start(arguments.folder))
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
    return as_start(folder, started, timeline)


def engine_start(folder: Path) -> dict:
    """The same of an engine in a process of its own."""
    command = [sys.executable, "-c", "from benchmarks.load import run_engine; run_engine()", folder]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "kernels")}
    started = time.time()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return as_start(folder, started, json.loads(done.stdout.splitlines()[-1]))


def cold_start(folder: Path) -> dict:
    """The same of files that have to be read from the disk."""
    os.sync()
    sizes = [drop_from_page_cache(path) for path in checkpoint_of(folder).iterdir()]
    return {**engine_start(folder), "read_from_disk_bytes": sum(sizes)}


def drop_from_page_cache(path: Path) -> int:
    """Return the file's bytes."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(file.fileno()).st_size


def checkpoint_of(folder: Path) -> Path:
    return folder / "repository" / MODEL / "1" / "1-gpu"


def run_engine() -> None:
    """In the process of an engine: print its timeline up to the first token."""
    from launcher_scripts.engine.engine import Engine
    from launcher_scripts.engine.runner.loading import EngineSettings

    first = ["torch is imported", time.time()]
    settings = EngineSettings(
        checkpoint_of(Path(sys.argv[1])), data_type="bf16", max_batch_size=ROWS
    )
    engine = Engine.load(settings)
    engine.submit(GenerateRequest((2, 3, 4), 1)).result()
    last = ["the first token is there", time.time()]
    print(json.dumps([first, *engine.timeline.events, last]), flush=True)
    engine.close()


def as_start(folder: Path, started: float, timeline: Sequence[Sequence[Any]]) -> dict:
    """The last of `timeline` is the first token's."""
    steps = [[what.removeprefix(f"{MODEL}: "), round(at - started, 2)] for what, at in timeline]
    print(json.dumps(steps), flush=True)
    compiled = len(list((folder / "kernels").glob("*/*.cubin")))
    return {
        "first_token_s": steps[-1][1],
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
