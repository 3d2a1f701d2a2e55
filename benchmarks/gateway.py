"""Streams through the gateway, beside the token model's whole answers over gRPC.

    python3 -m benchmarks.gateway --folder EMPTY_FOLDER --out gateway.json [--shapes 1.3b] \
        [--clients 1 32 128 512]
    python3 -m benchmarks.gateway keys --folder EMPTY_FOLDER --shape 1.3b [--clients 8] [--pairs 20]

Mixed requests (32 to 512 tokens in, 16 to 256 out, greedy, random bfloat16 weights) are asked by
clients in processes of their own, each with one request at a time. For each number of clients: time
to the first event, between events, tokens per event, tokens per second, the share of a core that
the gateway took, and the tokens per second of the same requests asked as whole answers of a model
that does not stream. A client's own time is part of it.

`keys` measures what keys, and a server that is closed by them, cost: two servers of the same model
and their gateways, one of them with keys, asked in turns. It prints medians of the pairs' ratios
with 95 % intervals: of the tokens per second, and of the processor's time per token of the gateway,
and of the server.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.load_clients import load_target, measured
from benchmarks.peers import config_of
from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS, Server
from benchmarks.shapes import CONFIGS, TINY
from benchmarks.streaming import Rows, beside_whole_answers
from launcher_scripts.config.gateway import DeployedGateway

KEY = "sk-of-the-benchmark"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["keys"]:
        return compare_keys(arguments[1:])
    return beside_whole_answers(argv, __doc__, [1, 32, 128, 512], gateway_rows)


def compare_keys(argv: list[str]) -> int:
    """Print what keys cost."""
    parser = argparse.ArgumentParser(description="What keys and a closed server cost.")
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="1.3b")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="of the clients")
    arguments = parser.parse_args(argv)
    config = replace(config_of(arguments.shape), max_positions=INPUTS[1] + OUTPUTS[1])
    model = RandomModel(arguments.shape, config, arguments.clients, decoupled=True)
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with ExitStack() as stack:
        doors = {}
        for keyed in rows:
            folder = arguments.folder / ("keys" if keyed else "open")
            model.write(folder / "repository")
            write_tokenizer(folder / f"repository/{model.name}/1/1-gpu", config.vocab_size)
            server = Server(folder, gateway=_gateway_with(folder / "keys" if keyed else None))
            ready = stack.enter_context(server)
            target = load_target("gateway", ready["openai"], model, stream=True)
            target = replace(target, api_key=KEY if keyed else None)
            doors[keyed] = target, _processes(ready["pid"])
            measured(target, config.vocab_size, arguments.clients, arguments.processes)
        for _ in range(arguments.pairs):
            # Always in turns: one that is asked twice in a row is faster the second time.
            for keyed in rows:
                target, processes = doors[keyed]
                before = {name: _seconds(group) for name, group in processes.items()}
                row = measured(target, config.vocab_size, arguments.clients, arguments.processes)
                rows[keyed].append(
                    {"tokens_per_s": row["tokens_per_s"]}
                    | {n: (_seconds(g) - before[n]) / row["tokens"] for n, g in processes.items()}
                )
            pairs = [rows[keyed][-1] for keyed in rows]
            print(json.dumps(pairs), flush=True)
    for name in rows[True][0]:
        ratios = [b[name] / a[name] for a, b in zip(rows[False], rows[True], strict=True)]
        lower, upper = median_interval(ratios)
        middle = statistics.median(row[name] for row in rows[False])
        print(f"{name}: {statistics.median(ratios):.4f} [{lower:.4f}, {upper:.4f}] of {middle:.3g}")
    return 0


def _gateway_with(keys: Path | None) -> DeployedGateway:
    if keys is None:
        return DeployedGateway(port=0)
    keys.touch(mode=0o600)
    keys.write_text(f"benchmark={KEY}\n")
    return DeployedGateway(port=0, api_keys=str(keys))


def _processes(server: int) -> dict[str, list[psutil.Process]]:
    """A deployment's gateway, and its server with its workers. server: tritonserver's id"""
    tritonserver = psutil.Process(server)
    launcher = tritonserver.parent()
    assert launcher is not None
    gateways = [each for each in launcher.children() if "start_gateway" in " ".join(each.cmdline())]
    return {
        "gateway_s_per_token": gateways,
        "server_s_per_token": [tritonserver, *tritonserver.children(recursive=True)],
    }


def _seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by its order statistics."""
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < count // 2 and (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


def gateway_rows(arguments: argparse.Namespace, shape: str) -> Rows:
    """The figures of one gateway before one server, by clients."""
    config = replace(config_of(shape), max_positions=INPUTS[1] + OUTPUTS[1])
    model = RandomModel(shape, config, max(arguments.clients), decoupled=True)
    folder = arguments.folder / f"{shape}-gateway"
    model.write(folder / "repository")
    write_tokenizer(folder / "tokenizer", config.vocab_size)
    with Server(folder), gateway(folder, max(arguments.clients)) as (url, process):
        target = load_target("gateway", url, model, stream=True)
        for clients in arguments.clients:
            used = process.cpu_times()
            started = time.time()
            row = measured(target, config.vocab_size, clients)
            spent = process.cpu_times()
            seconds = spent.user + spent.system - used.user - used.system
            row["gateway_cores"] = round(seconds / (time.time() - started), 2)
            yield clients, row


@contextmanager
def gateway(folder: Path, rows: int) -> Iterator[tuple[str, psutil.Process]]:
    """A gateway before the server of a folder; its URL and its process."""
    command = [sys.executable, "-m", "launcher_scripts.steps.start_gateway"]
    command += ["--ready", str(folder / "results"), "--tokenizer-dir", str(folder / "tokenizer")]
    command += ["--max-running", str(rows), "--max-model-len", str(INPUTS[1] + OUTPUTS[1])]
    with (
        (folder / "gateway.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready: "):
                    yield json.loads(line[7:])["openai"], psutil.Process(process.pid)
                    return
            raise RuntimeError((folder / "gateway.log").read_text())
        finally:
            process.terminate()


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer whose every id is a word of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"Ġw{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
