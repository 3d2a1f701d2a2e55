"""What a round of a draft model takes: proposals and the pass that tries them, beside plain steps.

    python3 -m benchmarks.draft_rounds [--shape 8b-modern] [--rows 1 8 32] [--out rounds.json]
        [--head eagle3|mtp]

The engine in its process on one GPU, random bfloat16 weights: an 8B and a 1B, or a draft head of
the 8B (an EAGLE-3 of 32,000 tokens). They never
agree, so every round brings each row one token, and a round is timed as a step is: all rows come
together, and the seconds between the first token of the last row and the last one are divided by
the rounds. `pays_at` is a round's milliseconds over a plain step's: a draft model gains where a
round brings more tokens than that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import DEVICE, engine_settings, machine, random_weights
from benchmarks.shapes import CONFIGS, DRAFTS
from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row import Snapshot
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.runner.loading import assemble_runner, prepare_process
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.models.draft_heads import DRAFT_HEADS, EAGLE3
from launcher_scripts.models.gpt import GPTConfig

COUNTS = (0, 1, 2, 4, 6, 8)
PROMPT, TOKENS = 80, 64
HEAD_VOCABULARY = 32000
SAMPLING = SamplingParameters(top_k=40)  # greedy, random weights repeat themselves


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=DRAFTS, default="8b-modern")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--head", choices=DRAFT_HEADS, help="in place of the draft model")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device; the shapes are far beyond a CPU", file=sys.stderr)
        return 1
    settings = engine_settings(max_batch_size=max(arguments.rows), max_tokens=16384)

    def build() -> Runner:
        prepare_process(settings, DEVICE)
        weights = random_weights(CONFIGS[arguments.shape])
        draft = random_weights(draft_config(arguments.shape, arguments.head))
        if draft.draft is not None and draft.draft.ids is not None:
            ids = torch.arange(HEAD_VOCABULARY, device=DEVICE)
            draft = replace(draft, draft=replace(draft.draft, ids=ids))
        return assemble_runner(weights, settings, Communicator(), DEVICE, draft=draft)

    engine = Engine.from_runner(settings, build)
    report = {"machine": machine(), "model": arguments.shape, "head": arguments.head, "rows": []}
    for rows in arguments.rows:
        report["rows"] += measured(engine, rows)
    engine.close()
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def draft_config(shape: str, head: str | None) -> GPTConfig:
    """Return the draft model's configuration, or that of a head of the model."""
    if head is None:
        return DRAFTS[shape]
    size = HEAD_VOCABULARY if head == EAGLE3 else None
    model: Any = CONFIGS[shape]
    result: GPTConfig = replace(model, num_layers=1, draft_head=head, draft_vocab_size=size)
    return result


def measured(engine: Engine, rows: int) -> list[dict]:
    """A row of figures for each number of proposed tokens."""
    made = []
    for count in COUNTS:
        times = [round_ms(engine, rows, count, seed) for seed in range(4)]
        made.append({"rows": rows, "proposed": count, "ms": round(min(times), 3)})
        made[-1]["pays_at"] = round(made[-1]["ms"] / made[0]["ms"], 2)
        print(json.dumps(made[-1]), flush=True)
    return made


def round_ms(engine: Engine, rows: int, count: int, seed: int) -> float:
    """Milliseconds of a round, or of a step where nothing is proposed."""
    begun: dict[int, float] = {}

    def note(snapshot: Snapshot) -> None:
        begun.setdefault(id(snapshot.row), time.perf_counter())

    came = counted(engine)[1]
    futures = [
        engine.submit(
            GenerateRequest(
                tuple((seed * 7919 + row * 101 + 37 * place) % 32000 for place in range(PROMPT)),
                TOKENS,
                SAMPLING,
                num_speculative_tokens=count,
            ),
            note,
        )
        for row in range(rows)
    ]
    wait(futures)
    seconds = time.perf_counter() - max(begun.values())
    most = TOKENS - 1 - (counted(engine)[1] - came) / rows
    return seconds / most * 1e3


def counted(engine: Engine) -> tuple[float, float]:
    """Tokens of drafts that were tried, and those that came."""
    values = {sample.name: sample.value for sample in engine.statistics.samples()}
    return values[names.DRAFT_TOKENS.name], values[names.ACCEPTED_TOKENS.name]


if __name__ == "__main__":
    sys.exit(main())
