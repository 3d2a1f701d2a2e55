"""Beam search beside transformers': its translations, its hypotheses, its time, in one run.

    python3 -m benchmarks.beams --pairs SHARED/data/multi30k_en-de \
        --translator SHARED/fixtures/hf/t5_multi30k [--device cuda] [--widths 1 4 8] [--lines 1000]

prints a row per width: BLEU of Multi30k's first test pairs, how many of all hypotheses are
transformers' own, and seconds: all lines (the engine takes them as they fit, transformers in
batches) and the median of single lines.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sacrebleu
import torch
import transformers
from transformers import T5ForConditionalGeneration

from benchmarks.quantization_accuracy import exported
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.model.weight_loader import DTYPES

MAX_TOKENS = 64
MAX_PIECES = 62
SINGLE_LINES = 20
HEADER = (
    "| beam_width | BLEU | transformers | same hypotheses | all lines, s | transformers, s "
    "| one line, ms | transformers, ms |"
)

# texts of one line, best first
Texts = list[list[int]]
Translate = Callable[[Sequence[list[int]], int], list[Texts]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--translator", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-type", choices=DTYPES, default="fp32")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="lines of a batch of transformers")
    arguments = parser.parse_args(argv)
    english, german = (
        gzip.decompress((arguments.pairs / f"test_2016_flickr.{side}.gz").read_bytes())
        .decode()
        .splitlines()[: arguments.lines]
        for side in ("en", "de")
    )
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        shards = exported(arguments.translator, "t5", Path(folder))
        engine = Engine.load(
            EngineSettings(
                shards, device=arguments.device, data_type=arguments.data_type, max_batch_size=128
            )
        )
        tokenizer = load_tokenizer(shards)
        end_id = engine.config.end_id
        sources = [[*tokenizer.encode(line)[:MAX_PIECES], end_id] for line in english]
        peer = T5ForConditionalGeneration.from_pretrained(
            arguments.translator, dtype=DTYPES[arguments.data_type]
        )
        peer = peer.eval().to(device)

        def theirs(ids: Sequence[list[int]], width: int) -> list[Texts]:
            batches = [ids[i : i + arguments.batch] for i in range(0, len(ids), arguments.batch)]
            return [texts for batch in batches for texts in generate(peer, batch, width, end_id)]

        def ours(ids: Sequence[list[int]], width: int) -> list[Texts]:
            return translate(engine, ids, width)

        def bleu(answers: list[Texts]) -> float:
            best = [[token for token in texts[0] if token != end_id] for texts in answers]
            return sacrebleu.corpus_bleu([tokenizer.decode(ids) for ids in best], [german]).score

        print(describe(device, arguments.data_type))
        print(HEADER + "\n|" + "---|" * 8)
        for width in arguments.widths:
            print(compare(ours, theirs, sources, width, bleu), flush=True)
        engine.close()
    return 0


def compare(
    ours: Translate,
    theirs: Translate,
    sources: Sequence[list[int]],
    width: int,
    bleu: Callable[[list[Texts]], float],
) -> str:
    """A row of the table."""
    mine, seconds = timed(ours, sources, width)
    other, other_seconds = timed(theirs, sources, width)
    same = sum(a == b for m, o in zip(mine, other, strict=True) for a, b in zip(m, o, strict=True))
    single, other_single = (
        1000 * statistics.median(timed(each, [ids], width)[1] for ids in sources[:SINGLE_LINES])
        for each in (ours, theirs)
    )
    return (
        f"| {width} | {bleu(mine):.2f} | {bleu(other):.2f} | {same} of {width * len(sources)} "
        f"| {seconds:.1f} | {other_seconds:.1f} | {single:.1f} | {other_single:.1f} |"
    )


def timed(
    function: Translate, sources: Sequence[list[int]], width: int
) -> tuple[list[Texts], float]:
    function(sources[:1], width)
    start = time.perf_counter()
    answers = function(sources, width)
    return answers, time.perf_counter() - start


def translate(engine: Engine, sources: Sequence[list[int]], width: int) -> list[Texts]:
    sampling = SamplingParameters(beam_width=width, len_penalty=1.0)
    futures = [engine.submit(GenerateRequest(tuple(ids), MAX_TOKENS, sampling)) for ids in sources]
    outputs = [future.result() for future in futures]
    return [[list(beam.output_ids) for beam in output.hypotheses] for output in outputs]


@torch.inference_mode()
def generate(
    peer: T5ForConditionalGeneration, batch: Sequence[list[int]], width: int, end_id: int
) -> list[Texts]:
    longest = max(map(len, batch))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    out = peer.generate(
        ids.to(peer.device),
        attention_mask=mask.to(peer.device),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        **({"early_stopping": True, "length_penalty": 1.0} if width > 1 else {}),
    )
    texts = [row[: row.index(end_id) + 1] if end_id in row else row for row in out[:, 1:].tolist()]
    return [texts[first : first + width] for first in range(0, len(texts), width)]


def describe(device: torch.device, data_type: str) -> str:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return (
        f"{name}, {torch.get_num_threads()} threads, {data_type}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
