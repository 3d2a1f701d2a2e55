"""What drafts of tokens save on a trained model, on the CPU: steps, and tokens per second.

    python3 -m benchmarks.drafts --articles SHARED/data/cnn_dailymail/cnn_dailymail_test.csv

The GPT that the quickstart's package carries goes on after the beginnings of articles, one request
at a time, greedy and sampled, without drafts and with num_speculative_tokens of several sizes. It
fails if any answer differs.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.quantization_accuracy import exported
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.steps.quickstart import gguf_file

PROMPT_TOKENS, TOKENS = 300, 100
SIZES = (0, 2, 4, 8, 16)
SAMPLINGS = {
    "greedy": SamplingParameters(),
    "top_p 0.9, temperature 0.8": SamplingParameters(top_p=0.9, temperature=0.8, random_seed=1),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--articles", type=Path, required=True, help="a CSV with a column article")
    parser.add_argument("--count", type=int, default=8, help="of articles")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        weights = exported(gguf_file(), "gpt3", Path(folder))
        engine = Engine.load(EngineSettings(weights, data_type="fp32", device="cpu"))
        prompts = prompts_of(arguments.articles, arguments.count, weights)
        print("| sampling | draft | tokens/s | steps per token | share of drafts that came |")
        print("|---|---|---|---|---|")
        for name, sampling in SAMPLINGS.items():
            measure(engine, name, sampling, prompts)
        engine.close()
    return 0


def prompts_of(articles: Path, count: int, weights: Path) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(weights)
    with articles.open(encoding="utf-8", newline="") as file:
        texts = [row["article"] for _, row in zip(range(count), csv.DictReader(file), strict=False)]
    return [tuple(tokenizer.encode(text)[:PROMPT_TOKENS]) for text in texts]


def measure(
    engine: Engine, name: str, sampling: SamplingParameters, prompts: list[tuple[int, ...]]
) -> None:
    """A row of the table for each size of drafts."""
    wanted: list[tuple[int, ...]] = []
    for size in SIZES:
        before, steps, start = counted(engine), engine.statistics.steps, time.perf_counter()
        request = GenerateRequest((), TOKENS, sampling, num_speculative_tokens=size)
        answers = [
            engine.submit(replace(request, input_ids=ids)).result().output_ids for ids in prompts
        ]
        seconds = time.perf_counter() - start
        wanted = wanted or answers
        if answers != wanted:
            raise RuntimeError(f"answers with drafts of {size} tokens differ")
        tokens = sum(map(len, answers))
        tried, came = (now - then for now, then in zip(counted(engine), before, strict=True))
        share = f"{came / tried:.2f}" if tried else ""
        per_token = (engine.statistics.steps - steps) / tokens
        print(
            f"| {name} | {size} | {tokens / seconds:.1f} | {per_token:.2f} | {share} |", flush=True
        )


def counted(engine: Engine) -> tuple[float, float]:
    """Tokens of drafts that were tried, and those that came."""
    values = {sample.name: sample.value for sample in engine.statistics.samples()}
    return values[names.DRAFT_TOKENS.name], values[names.ACCEPTED_TOKENS.name]


if __name__ == "__main__":
    sys.exit(main())
