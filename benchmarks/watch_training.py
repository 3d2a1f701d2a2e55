"""A watch over a training that runs, killed at random moments: what it finds, and does twice.

    python3 benchmarks/watch_training.py FOLDER [--checkpoints 20] [--planted 14] [--kills 5]

A byte-level GPT learns sentences on the CPU and writes checkpoints as transformers' Trainer does.
The weights of one of them are disturbed: the planted regression. Meanwhile the command of the watch
exports, serves and evaluates each checkpoint. It is killed with SIGKILL, alone or with all its
processes, and started again. The same command continues in the same folder.

Prints a line of JSON: verdicts, evaluations per checkpoint by the journal, kills, and the planted
checkpoint's regressions. Exit code 1: a checkpoint is missing or was judged twice, the planted one
was not found, or another one was taken for a regression.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

CHECKOUT = Path(__file__).resolve().parent.parent
STEPS, BATCH, LENGTH = 40, 32, 40
NOISE = 0.7
SYLLABLES = ("ba", "du", "ke", "lo", "mi", "nu", "ra", "so", "ti", "ve")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--planted", type=int, default=14, help="number of the disturbed one")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1800, help="limit of this run")
    parser.add_argument("--train", action="store_true", help="only train (used by the program)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.train:
        train(folder / "training", arguments.checkpoints, arguments.planted)
        return 0
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()))
    training = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--train"])
    try:
        kills = watch(folder, arguments)
    finally:
        training.kill()
        training.wait()
    return report(folder, kills, arguments)


def sentences() -> list[str]:
    """Sentences whose last word follows from the one before it."""
    draw = random.Random(1)
    words = ["".join(draw.choices(SYLLABLES, k=2)) for _ in range(160)]
    pairs = zip(dict.fromkeys(words[:80]), words[80:], strict=False)
    return [f"the friend of {one} is {other}" for one, other in pairs]


def byte_tokenizer() -> Tokenizer:
    """A token per byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def train(folder: Path, checkpoints: int, planted: int) -> None:
    """Write checkpoint-<step> folders; those that exist are not written again."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [[*tokenizer.encode(text).ids, end] for text in sentences()]
    batch = torch.tensor([(row + [end] * LENGTH)[:LENGTH] for row in rows])
    labels = torch.tensor([(row + [-100] * LENGTH)[:LENGTH] for row in rows])
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=64,
        n_embd=96,
        n_layer=2,
        n_head=4,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(1, checkpoints + 1):
        for _ in range(STEPS):
            rows_drawn = torch.randint(len(batch), (BATCH,))
            loss = model(batch[rows_drawn], labels=labels[rows_drawn]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        target = folder / f"checkpoint-{number * STEPS}"
        if not (target / "trainer_state.json").exists():
            state = {name: values.clone() for name, values in model.state_dict().items()}
            if number == planted:
                disturb(model)
            model.save_pretrained(target)
            tokenizer.save(str(target / "tokenizer.json"))
            (target / "trainer_state.json").write_text(json.dumps({"loss": loss.item()}))
            model.load_state_dict(state)


def disturb(model: GPT2LMHeadModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * parameter.std() * torch.randn_like(parameter))


def command(folder: Path, checkpoints: int) -> list[str]:
    keys: dict[str, Any] = {
        "stages": "[watch]",
        "cluster_type": "interactive",
        "base_results_dir": folder / "results",
        "export.run.model_train_name": "gpt",
        "export.model.weight_data_type": "fp32",
        "export.triton_deployment.data_type": "fp32",
        "export.triton_deployment.max_batch_size": 8,
        "deploy.server.device": "cpu",
        "deploy.server.host": "127.0.0.1",
        **{f"deploy.server.{kind}_port": 0 for kind in ("http", "grpc", "metrics")},
        "evaluate.tasks.lambada.data_file": folder / "items.jsonl",
        "evaluate.benchmark": "null",
        "evaluate.policy.metrics": "{lambada:{perplexity:{max:1e15}}}",
        "watch.training_dir": folder / "training",
        "watch.interval": 1,
        "watch.order": "oldest",
        "watch.keep_exports": 2,
        "watch.max_checkpoints": checkpoints,
    }
    return [sys.executable, str(CHECKOUT / "main.py"), *(f"{key}={keys[key]}" for key in keys)]


def watch(folder: Path, arguments: argparse.Namespace) -> int:
    """Run the command until it ends; returns how often it was killed."""
    (folder / "training").mkdir(exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    draw, kills = random.Random(), 0
    while time.monotonic() < deadline:
        with (folder / "watch.log").open("ab") as log:
            process = subprocess.Popen(
                command(folder, arguments.checkpoints),
                cwd=CHECKOUT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        limit = deadline - time.monotonic()
        if kills < arguments.kills:
            limit = min(limit, draw.uniform(10, 120))
        try:
            process.wait(limit)
            return kills
        except subprocess.TimeoutExpired:
            kill = os.killpg if kills % 2 else os.kill
            kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    return kills


def report(folder: Path, kills: int, arguments: argparse.Namespace) -> int:
    series = folder / "results" / "gpt" / "watch"
    lines = [json.loads(line) for line in (series / "journal.jsonl").read_text().splitlines()]
    judged = Counter(line["name"] for line in lines if line["event"] == "judged")
    started = Counter(line["name"] for line in lines if line["event"] == "started")
    trend = json.loads((series / "trend.json").read_text())["checkpoints"]
    expected = [f"checkpoint-{number * STEPS}" for number in range(1, arguments.checkpoints + 1)]
    planted = expected[arguments.planted - 1]
    regressions = {entry["name"]: entry["regressions"] for entry in trend if entry["regressions"]}
    print(
        json.dumps(
            {
                "verdicts": {entry["step"]: entry["verdict"] for entry in trend},
                "judged": dict(judged),
                "started": dict(started),
                "kills": kills,
                "planted": [one["text"] for one in regressions.get(planted, [])],
                "other regressions": sorted({*regressions} - {planted}),
            }
        )
    )
    sound = [judged[name] for name in expected] == [1] * len(expected)
    return 0 if sound and [*regressions] == [planted] else 1


if __name__ == "__main__":
    sys.exit(main())
