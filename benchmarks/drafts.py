"""What drafts of tokens save on trained models, on the CPU: steps, and tokens per second.

    python3 -m benchmarks.drafts --articles SHARED/data/cnn_dailymail/cnn_dailymail_test.csv
    python3 -m benchmarks.drafts --text SHARED/data/wikitext-2/test.txt --minutes 20 --folder pair

The first has the GPT that the quickstart's package carries go on after the beginnings of articles,
with drafts of its own text. The second trains a pair of models of bytes (benchmarks.draft_pair), or
takes those that a run before has left in the folder, and has the model go on after lines that it
has not seen: with drafts of its own text, and with those of the draft model. One request at a time,
greedy and sampled, without drafts and with num_speculative_tokens of several sizes; tokens per
second of one thread's processor time. It fails if any answer differs.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.draft_pair import exported_pair, trained_pair
from benchmarks.draft_rounds import counted
from benchmarks.quantization_accuracy import exported
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.steps.quickstart import gguf_file

PROMPT_TOKENS, PROMPT_BYTES, TOKENS = 300, 100, 100
SIZES = (0, 2, 4, 8, 16)
TRAINED_ON = 0.95  # of a text
SAMPLINGS = {
    "greedy": SamplingParameters(),
    "top_p 0.9, temperature 0.8": SamplingParameters(top_p=0.9, temperature=0.8, random_seed=1),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--articles", type=Path, help="a CSV with a column article")
    what.add_argument("--text", type=Path, help="what a pair of models is trained on")
    parser.add_argument("--minutes", type=float, default=20.0, help="to train the larger model")
    parser.add_argument("--folder", type=Path, help="where a pair is kept")
    parser.add_argument("--count", type=int, default=8, help="of articles, or of lines")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.articles:
            weights = exported(gguf_file(), "gpt3", folder)
            runs = {"text": EngineSettings(weights, data_type="fp32", device="cpu")}
            prompts = prompts_of(arguments.articles, arguments.count, weights)
        else:
            text = arguments.text.read_bytes()
            seen = int(TRAINED_ON * len(text))
            pair = exported_pair(folder) or trained_pair(text[:seen], arguments.minutes, folder)
            alone = EngineSettings(pair["model"], data_type="fp32", device="cpu")
            runs = {"text": alone, "model": replace(alone, draft_checkpoint_dir=pair["draft"])}
            prompts = lines_of(text[seen:], arguments.count)
        print("| sampling | drafts of the | size | tokens/s | steps per token | share that came |")
        print("|---|---|---|---|---|---|")
        for name, sampling in SAMPLINGS.items():
            for source, settings in runs.items():
                engine = Engine.load(settings)
                measure(engine, f"{name} | {source}", sampling, prompts)
                engine.close()
    return 0


def prompts_of(articles: Path, count: int, weights: Path) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(weights)
    with articles.open(encoding="utf-8", newline="") as file:
        texts = [row["article"] for _, row in zip(range(count), csv.DictReader(file), strict=False)]
    return [tuple(tokenizer.encode(text)[:PROMPT_TOKENS]) for text in texts]


def lines_of(text: bytes, count: int) -> list[tuple[int, ...]]:
    """The beginnings of the first long lines."""
    long = [line for line in text.splitlines() if len(line) > 2 * PROMPT_BYTES]
    return [tuple(line[:PROMPT_BYTES]) for line in long[:count]]


def measure(
    engine: Engine, name: str, sampling: SamplingParameters, prompts: list[tuple[int, ...]]
) -> None:
    """A row of the table for each size of drafts."""
    wanted: list[tuple[int, ...]] = []
    for size in SIZES:
        before, steps, start = counted(engine), engine.statistics.steps, time.process_time()
        request = GenerateRequest((), TOKENS, sampling, num_speculative_tokens=size)
        answers = [
            engine.submit(replace(request, input_ids=ids)).result().output_ids for ids in prompts
        ]
        seconds = time.process_time() - start
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


if __name__ == "__main__":
    sys.exit(main())
