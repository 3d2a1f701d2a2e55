"""What pipeline stages gain when many rows run: each stage works on other rows at a time.

    python3 -m benchmarks.pipeline --folder FOLDER --out pipeline.json [--shapes 20b]

A model of random bfloat16 weights is served by one process a stage, a GPU or a share of the cores
each. All rows come at once, and every one generates all its tokens. The numbers of stages take
turns, and the medians are compared with those of the first one in the same run. On the CPU all
have to give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.generate import machine, release
from benchmarks.repositories import RandomModel
from benchmarks.shapes import CONFIGS
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings

IDS = 1000  # of the prompts' tokens, all of which every shape knows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where models are written")
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=["20b"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rows", nargs="+", type=int, default=[128], metavar="N")
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS", help="of every row")
    parser.add_argument("--tokens", type=int, default=200, help="that every row generates")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeat", type=int, default=3, help="times that each count is measured")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus < max(arguments.stages):
        print(f"{max(arguments.stages)} GPUs are needed; {gpus} found", file=sys.stderr)
        return 1
    report = {"machine": machine() if arguments.device == "cuda" else "CPU", "rows": []}
    for name in arguments.shapes:
        root = arguments.folder / name
        if not root.exists():
            RandomModel(name, CONFIGS[name], max(arguments.rows)).write(root)
        for rows in arguments.rows:
            report["rows"] += compare(root / name / "1" / "1-gpu", rows, arguments)
            if arguments.out:
                arguments.out.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


def compare(checkpoint: Path, rows: int, arguments: argparse.Namespace) -> list[dict]:
    """A row of figures for each number of stages."""
    rates: dict[int, list[float]] = {stages: [] for stages in arguments.stages}
    answers = set()
    for _ in range(arguments.repeat):
        for stages, measured in rates.items():
            rate, tokens = tokens_per_second(checkpoint, stages, rows, arguments)
            measured.append(rate)
            answers.add(tokens)
    if arguments.device == "cpu" and len(answers) > 1:
        raise RuntimeError("the numbers of stages disagree about the tokens")
    first = statistics.median(rates[arguments.stages[0]])
    found = [
        {
            "model": checkpoint.parents[1].name,
            "stages": stages,
            "rows": rows,
            "prompt": arguments.prompt,
            "tokens": arguments.tokens,
            "tokens_per_second": round(statistics.median(measured), 1),
            "speedup": round(statistics.median(measured) / first, 2),
        }
        for stages, measured in rates.items()
    ]
    for row in found:
        print(json.dumps(row), flush=True)
    return found


def tokens_per_second(
    checkpoint: Path, stages: int, rows: int, arguments: argparse.Namespace
) -> tuple[float, tuple]:
    """From the first request to the last answer, prompts included; and what was generated."""
    settings = EngineSettings(
        checkpoint,
        parallelism=Parallelism(1, stages),
        data_type="bf16" if arguments.device == "cuda" else "fp32",
        device=arguments.device,
        max_batch_size=rows,
        max_tokens=rows * (arguments.prompt + arguments.tokens + 1),
        verify=False,
    )
    engine = Engine.load(settings)
    try:
        ask(engine, rows, arguments.prompt, 2)
        start = time.perf_counter()
        answers = ask(engine, rows, arguments.prompt, arguments.tokens)
        return sum(map(len, answers)) / (time.perf_counter() - start), answers
    finally:
        engine.close()
        del engine
        release()  # the next one needs the memory


def ask(engine: Engine, rows: int, prompt: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """What every row generates; their prompts differ."""
    ids = [tuple((row * 31 + place) % IDS for place in range(prompt)) for row in range(rows)]
    futures = [engine.submit(GenerateRequest(each, tokens)) for each in ids]
    return tuple(future.result().output_ids for future in futures)


if __name__ == "__main__":
    sys.exit(main())
