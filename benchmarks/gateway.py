"""Streams through the gateway, beside the token model's whole answers over gRPC.

    python3 -m benchmarks.gateway --folder EMPTY_FOLDER --out gateway.json [--shapes 1.3b] \
        [--clients 1 32 128 512]

Mixed requests (32 to 512 tokens in, 16 to 256 out, greedy, random bfloat16 weights) are asked by
clients in processes of their own, each with one request at a time. For each number of clients: time
to the first event, between events, tokens per event, tokens per second, the share of a core that
the gateway took, and the tokens per second of the same requests asked as whole answers of a model
that does not stream. A client's own time is part of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.load_clients import load_target, measured
from benchmarks.peers import config_of
from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS, Server
from benchmarks.streaming import Rows, beside_whole_answers


def main(argv: list[str] | None = None) -> int:
    return beside_whole_answers(argv, __doc__, [1, 32, 128, 512], gateway_rows)


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
    folder.mkdir(parents=True)
    words = {f"Ġw{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
