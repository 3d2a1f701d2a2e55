"""A watch over a training that runs, killed at random moments: what it finds, and does twice.

    python3 -m benchmarks.watch_training FOLDER [--checkpoints 20] [--planted 14] [--kills 5]
    python3 -m benchmarks.watch_training FOLDER --slurm [--time-limit 0:10:00]
    python3 -m benchmarks.watch_training FOLDER --series 20

A byte-level GPT learns sentences on the CPU and writes checkpoints as transformers' Trainer does.
The weights of one of them are disturbed: the planted regression. Meanwhile the command of the watch
exports, serves and evaluates each checkpoint. It is killed with SIGKILL, alone or with all its
processes, and started again. The same command continues in the same folder.

With --slurm it runs as jobs of the cluster that SLURM_CONF names (`python3 -m tests.slurm.cluster
start` makes one of virtual nodes). All processes of a random job are killed, be it a look, an
export, a server or an evaluation; where no look is left, the command is given again.

With --series, so many models are trained, each from another seed, and torch evaluates their
checkpoints in this process; the statistics of the watch judge them, once without a planted
regression and once with one. 500 further series without a drop are simulated: the results of each
item at the checkpoints of a second half, in random order. Results of items stay in
FOLDER/items-<seed>.jsonl, so the same command continues. Prints the share with a false alarm.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from launcher_scripts.evaluation.checks import TaskSection
from launcher_scripts.watch.regression import MAX_BEFORE, Tasks, comparisons, regressions

CHECKOUT = Path(__file__).resolve().parent.parent
STEPS, BATCH, LENGTH = 40, 32, 40
NOISE = 0.7
LEVEL, MAX_DROP = 0.05, 0.02  # those of conf/watch
SIMULATED = 500
LARGE = 0.3  # a drop of the accuracy that some 60 items must show at the 14th checkpoint
METRICS = {
    "accuracy": {"value": 0.5, "low": None, "high": None, "percent": True},
    "perplexity": {"value": 1.0, "low": None, "high": None, "percent": False},
    "last_token_accuracy": {"value": 0.5, "low": None, "high": None, "percent": True},
}
SYLLABLES = ("ba", "du", "ke", "lo", "mi", "nu", "ra", "so", "ti", "ve")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--planted", type=int, default=14, help="number of the disturbed one")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1800, help="limit of this run")
    parser.add_argument("--slurm", action="store_true", help="as jobs of the current cluster")
    parser.add_argument("--series", type=int, default=0, help="judge so many, without servers")
    parser.add_argument("--train", action="store_true", help="only train (used by the program)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.train:
        train(folder / "training", arguments.checkpoints, arguments.planted)
        return 0
    if arguments.series:
        return judge_series(folder, arguments)
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()))
    training = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.watch_training", str(folder), *sys.argv[2:], "--train"],
        cwd=CHECKOUT,
    )
    try:
        kills = (watch_jobs if arguments.slurm else watch)(folder, arguments)
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


def trained(
    tokenizer: Tokenizer, checkpoints: int, seed: int = 0
) -> Iterator[tuple[int, GPT2LMHeadModel, float]]:
    """Train a model; number, model and loss of every checkpoint."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
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
        yield number, model, loss.item()


def train(folder: Path, checkpoints: int, planted: int) -> None:
    """Write checkpoint-<step> folders; those that exist are not written again."""
    tokenizer = byte_tokenizer()
    for number, model, loss in trained(tokenizer, checkpoints):
        target = folder / f"checkpoint-{number * STEPS}"
        if (target / "trainer_state.json").exists():
            continue
        with disturbed(model) if number == planted else nullcontext():
            model.save_pretrained(target)
        tokenizer.save(str(target / "tokenizer.json"))
        (target / "trainer_state.json").write_text(json.dumps({"loss": loss}))


@contextmanager
def disturbed(model: GPT2LMHeadModel) -> Iterator[None]:
    """Inside, the weights have noise."""
    state = {name: values.clone() for name, values in model.state_dict().items()}
    disturb(model)
    yield
    model.load_state_dict(state)


@torch.no_grad()
def evaluated(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The items of LAMBADA's task, as a report has them."""
    model.eval()
    items = []
    for index, text in enumerate(sentences()):
        ids = tokenizer.encode(text).ids
        first = len(tokenizer.encode(text.rpartition(" ")[0]).ids)
        rows = model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)
        target = torch.tensor(ids[first:])
        right = (rows.argmax(-1) == target).tolist()
        items.append(
            {
                "index": index,
                "correct": all(right),
                "log_likelihood": float(rows.gather(1, target[:, None]).sum()),
                "last_token_correct": right[-1],
            }
        )
    model.train()
    return items


def record(path: Path, tokenizer: Tokenizer, arguments: argparse.Namespace, seed: int) -> None:
    """Train a series and write the items of its checkpoints, those of the planted one twice."""
    lines = []
    for number, model, _ in trained(tokenizer, arguments.checkpoints, seed):
        line: dict[str, Any] = {"clean": evaluated(model, tokenizer)}
        if number == arguments.planted:
            state = torch.get_rng_state()
            with disturbed(model):
                line["planted"] = evaluated(model, tokenizer)
            torch.set_rng_state(state)
        lines.append(json.dumps(line) + "\n")
    path.with_suffix(".partial").write_text("".join(lines))
    path.with_suffix(".partial").rename(path)


def judge_series(folder: Path, arguments: argparse.Namespace) -> int:
    """Judge real series, and SIMULATED ones from their items; exit code 1: more of these have a
    false alarm than the level says, or a large planted drop was not found.
    """
    tokenizer, planted = byte_tokenizer(), arguments.planted
    recorded, rows = [], []
    for seed in range(1, arguments.series + 1):
        path = folder / f"items-{seed}.jsonl"
        if not path.exists():
            record(path, tokenizer, arguments, seed)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        clean = [line["clean"] for line in lines]
        both = [line.get("planted", line["clean"]) for line in lines]
        recorded.append(clean)
        rows.append(
            {
                "seed": seed,
                "alarms": [text for texts in judged(clean).values() for text in texts],
                "drop": round(accuracy(clean[planted - 2]) - accuracy(both[planted - 1]), 3),
                "found": bool(judged(both).get(planted)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    draw = random.Random(0)
    alarms = sum(bool(judged(exchanged(draw.choice(recorded), draw))) for _ in range(SIMULATED))
    result = {
        "level": LEVEL,
        "real": len(rows),
        "real with an alarm": sum(bool(row["alarms"]) for row in rows),
        "simulated": SIMULATED,
        "simulated with an alarm": alarms,
        "planted found": sum(row["found"] for row in rows),
    }
    print(json.dumps(result))
    missed = [row for row in rows if row["drop"] >= LARGE and not row["found"]]
    return int(alarms > LEVEL * SIMULATED or bool(missed))


def accuracy(items: list[dict[str, Any]]) -> float:
    """The share of the items that are right."""
    return sum(item["correct"] for item in items) / len(items)


def exchanged(
    series: list[list[dict[str, Any]]], draw: random.Random
) -> list[list[dict[str, Any]]]:
    """A series without any drop: every item's results of the second half, in a random order and
    as many again."""
    half = series[len(series) // 2 :]
    columns = [[*items, *items] for items in map(list, zip(*half, strict=True))]
    for column in columns:
        draw.shuffle(column)
    return [list(items) for items in zip(*columns, strict=True)]


def judged(series: list[list[dict[str, Any]]]) -> dict[int, list[str]]:
    """Regressions by checkpoint, as the watch judges evaluations in their order."""
    before: list[Tasks] = []
    result: dict[int, list[str]] = {}
    for number, items in enumerate(series, start=1):
        section = {"metrics": METRICS, "items": items}
        tasks = {"lambada": TaskSection(METRICS, items, section)}
        latest = {"the last GO": before[-1]} if before else {}
        checked = comparisons(tasks, before[-MAX_BEFORE:], latest)
        if named := regressions(checked, number, LEVEL, MAX_DROP):
            result[number] = [one.text() for one in named]
        else:
            before.append(tasks)
    return result


def disturb(model: GPT2LMHeadModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * parameter.std() * torch.randn_like(parameter))


def command(
    folder: Path, checkpoints: int, more: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """The command of the watch. more: other keys"""
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
        **more,
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


def watch_jobs(folder: Path, arguments: argparse.Namespace) -> int:
    """Let jobs watch until all checkpoints are judged; returns how often one was killed."""
    (folder / "training").mkdir(exist_ok=True)
    deadline, draw, kills = time.monotonic() + arguments.seconds, random.Random(), 0
    kill_at = time.monotonic() + draw.uniform(30, 90)
    keys = {
        "cluster_type": "bcm",
        "cluster.python": sys.executable,
        "cluster.gpus_per_node": "null",
        "cluster.exclusive": False,
        "cluster.mem": "null",
        "watch.interval": 5,
        "watch.attempts": 1 + arguments.kills,
    }
    while time.monotonic() < deadline:
        jobs = [line.split() for line in slurm("squeue", "--noheader", "--format=%A %T %j")]
        judged = Counter(line["name"] for line in journal(folder) if line["event"] == "judged")
        if len(judged) >= arguments.checkpoints and not jobs:
            break
        if not any("watch" in name for _, _, name in jobs) and len(judged) < arguments.checkpoints:
            with (folder / "watch.log").open("ab") as log:
                line = command(folder, arguments.checkpoints, keys)
                subprocess.run(line, cwd=CHECKOUT, stdout=log, stderr=log, check=False)
        running = [job for job in jobs if job[1] == "RUNNING"]
        if running and kills < arguments.kills and time.monotonic() > kill_at:
            number, _, name = draw.choice(running)
            slurm("scancel", "--signal=KILL", "--full", number)
            print(f"killed job {number}, {name}", flush=True)
            kills, kill_at = kills + 1, time.monotonic() + draw.uniform(30, 120)
        time.sleep(3)
    return kills


def slurm(*command: str) -> list[str]:
    """Lines that one of Slurm's commands prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.splitlines()


def journal(folder: Path) -> list[dict[str, Any]]:
    """Events of the watch, [] before its first."""
    path = folder / "results" / "gpt" / "watch" / "journal.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(folder: Path, kills: int, arguments: argparse.Namespace) -> int:
    series = folder / "results" / "gpt" / "watch"
    lines = journal(folder)
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
