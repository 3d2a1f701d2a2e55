"""What weights in bytes cost in accuracy and save in memory, on trained models.

    python3 -m benchmarks.quantization_accuracy --pairs SHARED/data/multi30k_en-de \
        --translator SHARED/fixtures/hf/t5_multi30k

prints a table: BLEU of a T5's greedy translations of Multi30k's test pairs, and LAMBADA (the first
200 items) on the GPT that the quickstart's package carries, each with whole weights and with those
in bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch

from launcher_scripts.checkpoint.convert.export import export
from launcher_scripts.common.quantization import QUANTIZATIONS
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner.loading import load_weights, open_checkpoint
from launcher_scripts.evaluation.tasks import lambada
from launcher_scripts.steps.quickstart import gguf_file

CONFIGURATIONS = [
    (data_type, quantization)
    for data_type in ("fp32", "bf16")
    for quantization in (None, *QUANTIZATIONS.values())
]
LAMBADA_ITEMS = Path(lambada.__file__).parents[1] / "data" / "lambada_first200.jsonl"
MOST_TOKENS = 64


def exported(checkpoint: Path, model_type: str, folder: Path) -> Path:
    return export(
        ExportSettings(
            model_name="model",
            model_type=model_type,
            checkpoint_path=str(checkpoint),
            triton_model_dir=str(folder / "model"),
            weight_data_type="fp32",
        )
    )


def tensor_bytes(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors below a dataclass of weights, each once."""
    if isinstance(value, torch.Tensor):
        known = value.data_ptr() in seen
        seen.add(value.data_ptr())
        return 0 if known else value.numel() * value.element_size()
    if dataclasses.is_dataclass(value):
        parts: Any = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        parts = value.values()
    else:
        parts = value if isinstance(value, tuple) else ()
    return sum(tensor_bytes(part, seen) for part in parts)


def layer_bytes(settings: EngineSettings) -> tuple[int, int]:
    """Bytes of the layers, and of the whole model."""
    checkpoint = open_checkpoint(settings, verify=False)
    weights = load_weights(settings, checkpoint, 0, torch.device("cpu"))
    return (
        sum(tensor_bytes(stack.layers, set()) for stack in weights.stacks),
        tensor_bytes(weights, set()),
    )


def translated(engine: Engine, folder: Path, sources: Sequence[str]) -> list[str]:
    """Greedy translations."""
    tokenizer, end_id = load_tokenizer(folder), engine.config.end_id
    futures = [
        engine.submit(GenerateRequest((*tokenizer.encode(text), end_id), MOST_TOKENS))
        for text in sources
    ]
    outputs = [future.result().output_ids for future in futures]
    return [
        tokenizer.decode([token for token in ids if token not in (end_id, 0)]) for ids in outputs
    ]


def lambada_logits(engine: Engine, items: Sequence[lambada.Item]) -> Iterator[np.ndarray]:
    for row in lambada.rows_to_score(items):
        request = GenerateRequest(row, output_len=0, return_context_logits=True)
        yield engine.submit(request).result().context_logits.numpy()


def measure_translator(folder: Path, pairs: Path) -> Iterator[str]:
    """BLEU, and how many translations differ from the fp32 model's."""
    english, german = (
        gzip.decompress((pairs / f"test_2016_flickr.{side}.gz").read_bytes()).decode().splitlines()
        for side in ("en", "de")
    )
    reference: list[str] = []
    for settings in configurations(folder):
        engine = Engine.load(settings)
        answers = translated(engine, folder, english)
        engine.close()
        reference = reference or answers
        differing = sum(a != b for a, b in zip(answers, reference, strict=True))
        bleu = sacrebleu.corpus_bleu(answers, [german]).score
        yield row("T5, Multi30k", settings, f"BLEU {bleu:.2f}", f"{differing} of {len(answers)}")


def measure_gpt(folder: Path) -> Iterator[str]:
    """LAMBADA, and the items judged otherwise than by the fp32 model."""
    tokenizer = load_tokenizer(folder)
    items = lambada.make_items(lambada.read_texts(LAMBADA_ITEMS), tokenizer.encode)
    reference: list[bool] = []
    for settings in configurations(folder):
        engine = Engine.load(settings)
        results = list(lambada.measure(items, lambada_logits(engine, items)))
        engine.close()
        figures = lambada.summarise(results)
        correct = [result.correct for result in results]
        reference = reference or correct
        differing = sum(a != b for a, b in zip(correct, reference, strict=True))
        figure = (
            f"accuracy {100 * figures['accuracy'].value:.1f} %, "
            f"perplexity {figures['perplexity'].value:.2f}"
        )
        yield row("SmolLM2, LAMBADA", settings, figure, f"{differing} of {len(items)}")


def configurations(folder: Path) -> Iterator[EngineSettings]:
    for data_type, quantization in CONFIGURATIONS:
        yield EngineSettings(
            folder, data_type=data_type, device="cpu", quantization=quantization, max_batch_size=64
        )


def row(name: str, settings: EngineSettings, figure: str, differing: str) -> str:
    layers, whole = (f"{size / 1e6:.1f}" for size in layer_bytes(settings))
    cells = (
        name,
        settings.data_type,
        settings.quantization or "",
        figure,
        differing,
        layers,
        whole,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--translator", type=Path, help="folder of a Hugging Face T5")
    parser.add_argument("--pairs", type=Path, help="folder with test_2016_flickr.{en,de}.gz")
    arguments = parser.parse_args(argv)
    head = ("model", "data_type", "quantization", "figure", "answers unlike fp32")
    print("| " + " | ".join((*head, "layers, MB", "all, MB")) + " |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as place:
        if arguments.translator:
            folder = exported(arguments.translator, "t5", Path(place) / "t5")
            for line in measure_translator(folder, arguments.pairs):
                print(line, flush=True)
        for line in measure_gpt(exported(gguf_file(), "gpt3", Path(place) / "gpt")):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
