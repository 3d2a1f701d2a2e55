"""Tokens as they come to many clients, beside the same clients that wait for whole answers.

    python3 -m benchmarks.streaming --folder EMPTY_FOLDER --out streaming.json [--shapes 1.3b] \
        [--clients 1 32 128 256]

Mixed requests (32 to 512 tokens in, 16 to 256 out, greedy, random bfloat16 weights) are asked over
gRPC by clients in processes of their own, each with one request at a time: of a decoupled model,
and of the same one that is not. For each number of clients: time to the first token, between
responses and per token in between, tokens per response, tokens per second, the memory of the
server's processes, its shared memory included, and how long it takes until the server has given up
the request of a client that cancels meanwhile. A client's own time is part of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
import tritonclient.grpc as grpc

from benchmarks.generate import machine
from benchmarks.peers import config_of, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS, Server
from benchmarks.shapes import CONFIGS, TINY
from benchmarks.stream_clients import Streaming, request_inputs
from launcher_scripts.models.t5 import T5Config

PROCESSES = 8
SETTLE_SECONDS = 5.0  # in which the clients stop going together
SECONDS = 8.0  # that count
CANCELLING = 8  # clients that leave, one after the other
GIVEN_UP = "launcher_requests_given_up{"
Record = tuple[float, list[tuple[float, int]]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shapes", nargs="+", choices=(*CONFIGS, *TINY), default=["1.3b"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--ids", action="store_true", help="ask for output_ids, too")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    facts: dict = {"rows": [], "errors": []}
    if torch.cuda.is_available():
        facts["machine"] = machine()
    for shape in arguments.shapes:
        try:
            whole = dict(rows(arguments, shape, streams=False))
            for clients, row in rows(arguments, shape, streams=True):
                row["whole_answers_tokens_per_s"] = whole[clients]["tokens_per_s"]
                row["ratio"] = round(row["tokens_per_s"] / whole[clients]["tokens_per_s"], 3)
                facts["rows"].append({"model": shape, **row})
                print(json.dumps(facts["rows"][-1]), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        except Exception as error:  # the other models go on
            facts["errors"].append({"model": shape, "error": reason(error)})
            print(json.dumps(facts["errors"][-1]), flush=True)
    return 1 if facts["errors"] else 0


def rows(arguments: argparse.Namespace, shape: str, *, streams: bool) -> Iterator[tuple[int, dict]]:
    """The figures of one server, by clients."""
    config = replace(config_of(shape), max_positions=INPUTS[1] + OUTPUTS[1])
    most = max(arguments.clients) + 1  # one for those who leave
    model = RandomModel(shape, config, most, decoupled=streams)
    folder = arguments.folder / f"{shape}-{'streams' if streams else 'whole'}"
    model.write(folder / "repository")
    with Server(folder) as ready:
        for clients in arguments.clients:
            begin = time.time() + SETTLE_SECONDS
            before = server_memory()
            with ThreadPoolExecutor(1) as pool:
                leaving = pool.submit(cancelled_ms, ready, model, begin) if streams else None
                records = ask(ready["grpc"], model, clients, streams=streams, ids=arguments.ids)
            row = {"clients": clients, **figures(records, begin, begin + SECONDS)}
            row["memory_mib"] = [before, server_memory()]
            if leaving is not None:
                row["cancelled_ms"] = leaving.result()
            yield clients, row


def ask(
    address: str, model: RandomModel, clients: int, *, streams: bool, ids: bool
) -> list[Record]:
    """Every request of the clients, which are divided over processes."""
    processes = min(PROCESSES, clients)
    command = [sys.executable, "-m", "benchmarks.stream_clients", address, model.name]
    command += ["--family", "t5" if isinstance(model.config, T5Config) else "gpt"]
    command += ["--vocab", str(model.config.vocab_size), "--clients", str(clients // processes)]
    command += ["--seconds", str(SETTLE_SECONDS + SECONDS)]
    command += ["--input", *map(str, INPUTS), "--output", *map(str, OUTPUTS)]
    command += ["--streams"] * streams + ["--ids"] * ids
    return records_of(command, processes)


def records_of(command: Sequence[str], processes: int) -> list[Record]:
    """What processes of clients print, each with a seed of its own.

    Raises RuntimeError when one of them fails.
    """
    running = [
        subprocess.Popen([*command, "--seed", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    texts = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("a client's process failed; see its words above")
    return [json.loads(line) for text in texts for line in text.splitlines()]


def cancelled_ms(ready: dict, model: RandomModel, begin: float) -> list[float]:
    """Of clients that leave after their first token: until the server has given the request up."""
    times = []
    time.sleep(max(0.0, begin - time.time()))
    for number in range(CANCELLING):
        asker = Streaming(grpc.InferenceServerClient(ready["grpc"]))
        family = "t5" if isinstance(model.config, T5Config) else "gpt"
        inputs = request_inputs(family, np.full((1, INPUTS[0]), 1 + number), OUTPUTS[1])
        asker.begin(model.name, inputs, [grpc.InferRequestedOutput("sequence_length")])
        asker.next()
        before, left = given_up(ready["metrics"]), time.perf_counter()
        asker.leave()
        while given_up(ready["metrics"]) == before and time.perf_counter() < left + 10:
            time.sleep(0.005)
        times.append(round((time.perf_counter() - left) * 1e3, 1))
    return times


def given_up(address: str) -> float:
    """The server's count of requests that it gave up."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(GIVEN_UP))


def figures(records: Sequence[Record], begin: float, end: float) -> dict:
    """Of requests asked between two times; tokens per second of all that came between them."""
    tokens = 0.0
    first, gaps, per_token, counts = [], [], [], []
    for asked, responses in records:
        start, seen = asked, 0
        for at, count in responses:
            inside = max(0.0, min(at, end) - max(start, begin))
            tokens += (count - seen) * inside / max(at - start, 1e-9)
            start, seen = at, count
        if begin <= asked < end:
            times = [at for at, _ in responses]
            first.append(times[0] - asked)
            gaps += list(np.diff(times))
            per_token.append((times[-1] - times[0]) / max(1, responses[-1][1] - 1))
            counts.append((responses[-1][1], len(responses)))
    return {
        "requests": len(first),
        "tokens_per_s": round(tokens / (end - begin)),
        "first_token_ms": percentiles(first),
        "between_responses_ms": percentiles(gaps),
        "per_token_ms": percentiles(per_token),
        "tokens_per_response": round(sum(t for t, _ in counts) / sum(n for _, n in counts), 2),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in ms."""
    values = np.array(seconds if len(seconds) else [0.0]) * 1e3
    return {f"p{k}": round(float(np.percentile(values, k)), 2) for k in (50, 99)}


def server_memory() -> int:
    """MiB of the server's processes, which are this one's children, and of its shared memory."""
    children = psutil.Process().children(recursive=True)
    private = sum(child.memory_full_info().uss for child in children)
    shared = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").iterdir())
    return (private + shared) >> 20


if __name__ == "__main__":
    sys.exit(main())
