"""How fast requests are served: tokens per second through tritonserver, by requests in flight.

    python3 -m benchmarks.serve --folder EMPTY_FOLDER --out serve.json [--shape 1.3b] \
        [--clients 1 8 32 128] [--requests 256]

A server of the shape's random bfloat16 weights is started, and the same mixed requests (32 to 512
tokens in, 16 to 256 out, greedy) are asked over gRPC in two ways: by that many clients, each with
one request at a time, which the server batches in flight; and as static batches, requests of that
many rows one after the other, each answered when its longest row is. Both count only the tokens
that were asked for. Also measured: one request of 60 tokens in and 20 out, and the time from the
server's start to its first answer, with the files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.generate import SHAPES, VOCABULARY, Shape, machine
from launcher_scripts.checkpoint.fastertransformer import FTWriter, weight_files
from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.evaluation.client import Client
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.protocol import GenerateRequest
from launcher_scripts.settings import (
    DeploySettings,
    ExportSettings,
    TokenizerSettings,
    write_settings,
)

MODEL = "served"
INPUTS, OUTPUTS = (32, 512), (16, 256)
LONE = (60, 20)
START_SECONDS = 300
TINY = Shape(64, 2, 4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model; made if absent")
    parser.add_argument("--shape", choices=(*SHAPES, "tiny"), default="1.3b")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20, help="at most, for one figure")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    config = {**SHAPES, "tiny": TINY}[arguments.shape].config()
    write_repository(arguments.folder / "repository", config, max(arguments.clients))
    report: dict = {"shape": arguments.shape, "rows": []}
    with ExitStack() as stack:
        started = time.perf_counter()
        address = stack.enter_context(Server(arguments.folder))
        report["ready_s"] = time.perf_counter() - started
        ask(address, random_requests(1))
        report["first_answer_s"] = time.perf_counter() - started
        report["lone_60_20_ms"] = lone_latency(address)
        for clients in arguments.clients:
            row = measure(address, clients, arguments)
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
    if arguments.shape != "tiny":
        report["machine"] = machine()
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def measure(address: str, clients: int, arguments: argparse.Namespace) -> dict:
    """Tokens per second in flight and in static batches of the same requests."""
    requests = random_requests(arguments.requests)
    ask(address, requests[:clients], clients)  # warms up this many rows
    in_flight = throughput(address, [[request] for request in requests], clients, arguments.seconds)
    batches = [requests[first : first + clients] for first in range(0, len(requests), clients)]
    static = throughput(address, batches, 1, arguments.seconds)
    return {
        "clients": clients,
        "in_flight_tokens_per_s": round(in_flight, 1),
        "static_tokens_per_s": round(static, 1),
        "ratio": round(in_flight / static, 2),
    }


def throughput(
    address: str, batches: Sequence[Sequence[GenerateRequest]], clients: int, seconds: float
) -> float:
    """Tokens asked for and answered over the time they took; nothing is asked after `seconds`."""
    waiting: queue.SimpleQueue[Sequence[GenerateRequest]] = queue.SimpleQueue()
    for batch in batches:
        waiting.put(batch)
    connected = threading.Barrier(clients + 1)
    starts = [float("inf")]

    def work() -> int:
        tokens = 0
        with Client(address, MODEL, protocol="grpc") as client:
            client.is_ready()  # connects
            connected.wait()
            while time.perf_counter() < starts[0] + seconds:
                try:
                    batch = waiting.get_nowait()
                except queue.Empty:
                    break
                tokens += sum(len(output.output_ids) for output in client.generate(batch))
        return tokens

    with ThreadPoolExecutor(clients) as pool:
        workers = [pool.submit(work) for _ in range(clients)]
        connected.wait()
        starts[0] = time.perf_counter()
        tokens = sum(worker.result() for worker in workers)
        return tokens / (time.perf_counter() - starts[0])


def ask(address: str, requests: Sequence[GenerateRequest], clients: int = 1) -> None:
    """Ask every one, for the effect alone."""
    throughput(address, [[request] for request in requests], clients, float("inf"))


def lone_latency(address: str) -> float:
    """Median milliseconds of a lone request, after three that warm up."""
    length, output_len = LONE
    request = GenerateRequest(tuple(range(1, length + 1)), output_len)
    times = []
    with Client(address, MODEL, protocol="grpc") as client:
        for _ in range(13):
            start = time.perf_counter()
            client.generate([request])
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def random_requests(count: int) -> list[GenerateRequest]:
    """The same ones in every run; lengths are uniform."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(count):
        length = int(random.integers(*INPUTS, endpoint=True))
        output_len = int(random.integers(*OUTPUTS, endpoint=True))
        ids = random.integers(1, VOCABULARY, length).tolist()
        requests.append(GenerateRequest(tuple(ids), output_len))
    return requests


def write_repository(root: Path, config: GPTConfig, rows: int) -> None:
    """A model repository of random bfloat16 weights; values repeat one block."""
    # No end token, so that every row generates all that it was asked for.
    config = replace(config, end_id=config.vocab_size)
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    small = (block.view(np.uint32) >> 16).astype(np.uint16)
    gains = ((block + 1).view(np.uint32) >> 16).astype(np.uint16)
    with FTWriter(root / MODEL / "1" / "1-gpu", config, 1, "bf16") as writer:
        for file in weight_files(config, 1):
            name = file.spec.name
            values = gains if "norm" in name and name.endswith("weight") else small
            writer.write(file, [np.resize(values, file.spec.shape_on(config, 1))])
    ModelRepository(root).write(
        ExportSettings(
            model_name=MODEL,
            model_type="gpt3",
            checkpoint_path="random",
            triton_model_dir=str(root / MODEL),
            tokenizer=TokenizerSettings(source="none"),
            max_batch_size=rows,
            weight_data_type="bf16",
            data_type="bf16",
        )
    )


class Server:
    """start_server over folder/repository; entering waits for it and gives its gRPC address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = DeploySettings(
            str(folder / "repository"),
            str(folder / "results"),
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            host="127.0.0.1",
            public_host="127.0.0.1",
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        settings, log = self._folder / "deploy.yaml", self._folder / "server.log"
        write_settings(self._settings, settings)
        command = [sys.executable, "-m", "launcher_scripts.steps.start_server"]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--settings", str(settings)], stdout=out, stderr=out
            )
        ready = Path(self._settings.ready_file)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                text = log.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"the server did not become ready:\n{text[-4000:]}")
            time.sleep(0.02)
        return json.loads(ready.read_text(encoding="utf-8"))["grpc"]

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
