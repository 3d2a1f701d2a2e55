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
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.generate import machine
from benchmarks.load_clients import load_target, measured, settle_seconds
from benchmarks.peers import config_of, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS, Server, counted
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.clients.remote import RemoteServer
from launcher_scripts.contract.metric_names import PREEMPTED
from launcher_scripts.evaluation.load.driver import LoadRequest

CANCELLING = 8  # clients that leave, one after the other


Rows = Iterator[tuple[int, dict]]


def main(argv: list[str] | None = None) -> int:
    return beside_whole_answers(argv, __doc__, [1, 32, 128, 256], partial(rows, streams=True))


def beside_whole_answers(
    argv: list[str] | None,
    document: str,
    clients: list[int],
    streamed: Callable[[argparse.Namespace, str], Rows],
) -> int:
    """A benchmark of streams, and its exit code.

    document: the module's, whose first line is its help;  clients: how many by default
    streamed: a shape's figures by clients
    """
    parser = argparse.ArgumentParser(description=document.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shapes", nargs="+", choices=(*CONFIGS, *TINY), default=["1.3b"])
    parser.add_argument("--clients", type=int, nargs="+", default=clients)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    facts: dict = {"rows": [], "errors": []}
    if torch.cuda.is_available():
        facts["machine"] = machine()
    for shape in arguments.shapes:
        try:
            whole = dict(rows(arguments, shape, streams=False))
            for count, row in streamed(arguments, shape):
                row["whole_answers_tokens_per_s"] = whole[count]["tokens_per_s"]
                row["ratio"] = round(row["tokens_per_s"] / whole[count]["tokens_per_s"], 3)
                facts["rows"].append({"model": shape, **row})
                print(json.dumps(facts["rows"][-1]), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        except Exception as error:  # the other models go on
            facts["errors"].append({"model": shape, "error": reason(error)})
            print(json.dumps(facts["errors"][-1]), flush=True)
    return 1 if facts["errors"] else 0


def rows(arguments: argparse.Namespace, shape: str, *, streams: bool) -> Rows:
    """The figures of one server, by clients."""
    config = replace(config_of(shape), max_positions=INPUTS[1] + OUTPUTS[1])
    most = max(arguments.clients) + 1  # one for those who leave
    model = RandomModel(shape, config, most, decoupled=streams)
    folder = arguments.folder / f"{shape}-{'streams' if streams else 'whole'}"
    model.write(folder / "repository")
    with Server(folder) as ready:
        target = load_target("grpc", ready["grpc"], model, stream=streams)
        for clients in arguments.clients:
            begin = time.time() + settle_seconds(clients)
            before = server_memory()
            with ThreadPoolExecutor(1) as pool:
                leaving = pool.submit(cancelled_ms, ready, model, begin) if streams else None
                row = measured(target, config.vocab_size, clients)
            row["memory_mib"] = [before, server_memory()]
            if leaving is not None:
                row["cancelled_ms"] = leaving.result()
            yield clients, row


def cancelled_ms(ready: dict, model: RandomModel, begin: float) -> list[float]:
    """Of clients that leave after their first token: until the server has given the request up."""
    times = []
    time.sleep(max(0.0, begin - time.time()))
    for number in range(CANCELLING):
        request = LoadRequest((1 + number,) * INPUTS[0], OUTPUTS[1])
        tensors = load_target("grpc", "", model, stream=True).tokens.tensors(request)
        with RemoteServer(ready["grpc"], protocol="grpc") as server:
            answer = server.stream(model.name, tensors)
            next(answer)
            before, left = counted(ready, PREEMPTED), time.perf_counter()
            answer.close()
        while counted(ready, PREEMPTED) == before and time.perf_counter() < left + 10:
            time.sleep(0.005)
        times.append(round((time.perf_counter() - left) * 1e3, 1))
    return times


def server_memory() -> int:
    """MiB of the server's processes, which are this one's children, and of its shared memory."""
    children = psutil.Process().children(recursive=True)
    private = sum(child.memory_full_info().uss for child in children)
    shared = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").iterdir())
    return (private + shared) >> 20


if __name__ == "__main__":
    sys.exit(main())
