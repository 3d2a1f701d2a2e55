"""Bits of a deterministic model's answers: tokens that differ, and the price of the mode.

    python3 -m benchmarks.determinism [--tokens 1000000] [--ranks 2] [--device cuda] [--tiny]

A small model with random weights generates the same tokens several times: alone in its cache, after
a restart in another order and with found prefixes, and with drafts; with --ranks 2 (two GPUs) also
on two ranks and on one with their bits. Every token's id and log-probability must be the same, to
the last bit. A run of the same requests without `deterministic` gives the price. It fails if a bit
differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.generate import machine
from benchmarks.shapes import SHAPES, modern
from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.models.gpt import GPTConfig

CONFIG = replace(modern(SHAPES["126m"].config()), vocab_size=32000, end_id=32000, num_kv_heads=4)
TINY = replace(CONFIG, vocab_size=67, end_id=67, num_layers=2, hidden_size=64, head_size=16)
TINY = replace(TINY, num_heads=4, num_kv_heads=2, ffn_size=96)
OUTPUT, STEM = 512, 1100
SAMPLING = SamplingParameters(top_k=40)
Answers = list[tuple[tuple[int, ...], tuple[float, ...] | None]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of each run")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for trying it out on a CPU")
    arguments = parser.parse_args(argv)
    config = TINY if arguments.tiny else CONFIG
    made = requests(config, arguments.tokens)
    report: dict = {"machine": machine() if arguments.device == "cuda" else None, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = exported(config, Path(folder), arguments.ranks)
        differing = measured(report, checkpoints, made, arguments)
    print(json.dumps(report, indent=2))
    print(f"{differing} differing tokens")
    return 1 if differing else 0


def measured(
    report: dict,
    checkpoints: Sequence[Path],
    made: Sequence[GenerateRequest],
    arguments: argparse.Namespace,
) -> int:
    """Return the number of tokens that differ between runs, which are added to the report."""
    fixed = {"deterministic": True, "device": arguments.device}
    with engine_of(checkpoints[0], deterministic=False, device=arguments.device) as engine:
        timed(report, "not deterministic", engine, made, 1)
    salted = [replace(one, cache_salt=index + 1) for index, one in enumerate(made)]
    with engine_of(checkpoints[0], **fixed) as engine:
        expected = timed(report, "no prefix is found", engine, salted, 1)
    with engine_of(checkpoints[0], **fixed) as engine:
        runs = [timed(report, "restarted, another order, found prefixes", engine, made, 2)]
        drafting = [
            replace(one, num_speculative_tokens=4 * (at % 2)) for at, one in enumerate(made)
        ]
        runs.append(timed(report, "every second request drafts", engine, drafting, 3))
    differing = sum(count_differing(report, expected, run) for run in runs)
    if arguments.ranks > 1:
        parallelism = Parallelism(arguments.ranks, 1)
        with engine_of(checkpoints[1], parallelism=parallelism, **fixed) as engine:
            expected = timed(report, "two ranks", engine, made, 4)
        with engine_of(checkpoints[0], deterministic_ranks=2, **fixed) as engine:
            run = timed(report, "one rank with the bits of two", engine, made, 5)
        differing += count_differing(report, expected, run)
    return differing


def requests(config: GPTConfig, tokens: int) -> list[GenerateRequest]:
    """Prompts of 40 to 1,300 tokens, most of which begin as others."""
    draw = random.Random(0)
    stems = [[draw.randrange(config.vocab_size) for _ in range(STEM)] for _ in range(4)]
    result = []
    for index in range(max(2, tokens // OUTPUT)):
        stem = draw.choice(stems)[: draw.choice((0, 520, STEM))]
        tail = [draw.randrange(config.vocab_size) for _ in range(draw.randrange(40, 200))]
        ids = (*stem, *tail)
        sampling = replace(SAMPLING, random_seed=index)
        result.append(GenerateRequest(ids, OUTPUT, sampling, return_log_probs=True))
    return result


def exported(config: GPTConfig, folder: Path, ranks: int) -> list[Path]:
    """Random weights, split for one rank and, with several, for these."""
    (folder / "config.ini").write_text(format_config(config, 1, "bf16"))
    options = {"tokenizer": TokenizerSettings("none"), "weight_data_type": "bf16"}
    result: list[Path] = []
    for size in range(1, ranks + 1):
        source = (
            ("random", folder / "config.ini") if size == 1 else ("fastertransformer", result[0])
        )
        result.append(
            export(
                ExportSettings(
                    model_name="m",
                    model_type="gpt3",
                    source=source[0],
                    checkpoint_path=str(source[1]),
                    triton_model_dir=str(folder / str(size) / "m"),
                    parallelism=Parallelism(size, 1),
                    **options,
                )
            )
        )
    return result


@contextmanager
def engine_of(checkpoint: Path, **options: object) -> Iterator[Engine]:
    settings = EngineSettings(checkpoint, data_type="bf16", enable_prefix_caching=True, **options)
    engine = Engine.load(settings)
    engine.warm_up()
    yield engine
    engine.close()


def timed(
    report: dict, name: str, engine: Engine, made: Sequence[GenerateRequest], seed: int
) -> Answers:
    """Return the answers in the order of `made`, which is not the order in which they run."""
    order = random.Random(seed).sample(range(len(made)), len(made))
    start = time.perf_counter()
    futures = {index: engine.submit(made[index]) for index in order}
    outputs = [futures[index].result() for index in range(len(made))]
    seconds = time.perf_counter() - start
    tokens = sum(len(output.output_ids) for output in outputs)
    report["runs"].append({"run": name, "tokens": tokens, "seconds": round(seconds, 2)})
    report["runs"][-1]["tokens_per_second"] = round(tokens / seconds)
    print(json.dumps(report["runs"][-1]), flush=True)
    return [(output.output_ids, output.output_log_probs) for output in outputs]


def count_differing(report: dict, expected: Answers, answers: Answers) -> int:
    """Return the number of tokens whose id or log-probability differs."""
    count = sum(
        (one, p) != (other, q)
        for want, got in zip(expected, answers, strict=True)
        for one, other, p, q in zip(want[0], got[0], want[1] or (), got[1] or (), strict=True)
    )
    report["runs"][-1]["differing_tokens"] = count
    return count


if __name__ == "__main__":
    sys.exit(main())
