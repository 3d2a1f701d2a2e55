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
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.generate import machine
from benchmarks.load_clients import load_target, measured
from benchmarks.peers import config_of, reason
from benchmarks.repositories import RandomModel
from benchmarks.serving import INPUTS, OUTPUTS, Server
from benchmarks.shapes import CONFIGS, TINY
from benchmarks.streaming import rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shapes", nargs="+", choices=(*CONFIGS, *TINY), default=["1.3b"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    facts: dict = {"rows": [], "errors": []}
    if torch.cuda.is_available():
        facts["machine"] = machine()
    for shape in arguments.shapes:
        try:
            whole = dict(rows(arguments, shape, streams=False))
            for clients, row in gateway_rows(arguments, shape):
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


def gateway_rows(arguments: argparse.Namespace, shape: str) -> Iterator[tuple[int, dict]]:
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
