"""What weights, keys and values in bytes cost in accuracy and save in memory, on trained models.

    python3 -m benchmarks.quantization_accuracy --pairs SHARED/data/multi30k_en-de \
        --translator SHARED/fixtures/hf/t5_multi30k

prints a table: BLEU of a T5's greedy translations of Multi30k's test pairs, and LAMBADA (the first
200 items) on the GPT that the quickstart's package carries, each with whole weights and with those
in bytes, and with keys and values in fp8. KL is the mean divergence of the next token's
probabilities from those of the first row, over all tokens of the items, in nats.
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

from launcher_scripts.checkpoint.export import export
from launcher_scripts.common.quantization import KV_CACHE_DTYPES, QUANTIZATIONS
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.runner.loading import load_weights, open_checkpoint
from launcher_scripts.evaluation.tasks import scored_tasks
from launcher_scripts.steps.quickstart import gguf_file

CONFIGURATIONS = [
    (data_type, quantization, kv_cache_dtype)
    for data_type in ("fp32", "bf16")
    for quantization in (None, *QUANTIZATIONS.values())
    for kv_cache_dtype in (KV_CACHE_DTYPES if quantization != "int8" else ("auto",))
]
LAMBADA_ITEMS = Path(scored_tasks.__file__).parents[1] / "data" / "lambada_first200.jsonl"
MAX_TOKENS = 64


def exported(checkpoint: Path, model_type: str, folder: Path, tokenizer: str = "auto") -> Path:
    return export(
        ExportSettings(
            model_name="model",
            model_type=model_type,
            checkpoint_path=str(checkpoint),
            triton_model_dir=str(folder / "model"),
            tokenizer=TokenizerSettings(tokenizer),
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
        engine.submit(GenerateRequest((*tokenizer.encode(text), end_id), MAX_TOKENS))
        for text in sources
    ]
    outputs = [future.result().output_ids for future in futures]
    return [
        tokenizer.decode([token for token in ids if token not in (end_id, 0)]) for ids in outputs
    ]


class Logits:
    """Every item's logits, and how far they are from those of the first engine that was asked."""

    def __init__(self, items: Sequence[scored_tasks.Item]) -> None:
        self._rows = list(scored_tasks.rows_to_score(items))
        self._usual: list[torch.Tensor] = []
        self._divergences: list[torch.Tensor] = []

    def of(self, engine: Engine) -> Iterator[np.ndarray]:
        self._divergences = []
        for place, row in enumerate(self._rows):
            request = GenerateRequest(row, output_len=0, return_context_logits=True)
            logits = engine.submit(request).result().context_logits
            if place == len(self._usual):
                self._usual.append(logits)
            self._divergences.append(divergence(self._usual[place], logits))
            yield logits.numpy()

    def mean_divergence(self) -> float:
        """Of all tokens that the last engine was asked for."""
        return float(torch.cat(self._divergences).mean())


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
        yield row(
            "T5, Multi30k", settings, f"BLEU {bleu:.2f}", f"{differing} of {len(answers)}", ""
        )


def measure_gpt(folder: Path) -> Iterator[str]:
    """LAMBADA, and the items judged otherwise than by the fp32 model."""
    tokenizer = load_tokenizer(folder)
    items = scored_tasks.make_items(scored_tasks.read_passages(LAMBADA_ITEMS), tokenizer.encode)
    reference: list[bool] = []
    logits = Logits(items)
    for settings in configurations(folder):
        engine = Engine.load(settings)
        results = list(scored_tasks.score_items(items, logits.of(engine)))
        engine.close()
        figures = scored_tasks.summarise_lambada(results)
        correct = [result["correct"] for result in results]
        reference = reference or correct
        differing = sum(a != b for a, b in zip(correct, reference, strict=True))
        figure = (
            f"accuracy {100 * figures['accuracy'].value:.1f} %, "
            f"perplexity {figures['perplexity'].value:.2f}"
        )
        yield row(
            "SmolLM2, LAMBADA",
            settings,
            figure,
            f"{differing} of {len(items)}",
            f"{logits.mean_divergence():.1g}",
        )


def divergence(usual: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback and Leibler's, of every token's logits [T, vocab] from the usual ones: [T]."""
    p, q = (each.double().log_softmax(-1) for each in (usual, logits))
    return (p.exp() * (p - q)).sum(-1)


def configurations(folder: Path) -> Iterator[EngineSettings]:
    for data_type, quantization, kv_cache_dtype in CONFIGURATIONS:
        yield EngineSettings(
            folder,
            data_type=data_type,
            device="cpu",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_batch_size=64,
        )


def row(name: str, settings: EngineSettings, figure: str, differing: str, kl: str) -> str:
    layers, whole = (f"{size / 1e6:.1f}" for size in layer_bytes(settings))
    cells = (
        name,
        settings.data_type,
        settings.quantization or "",
        settings.kv_cache_dtype,
        figure,
        differing,
        kl,
        layers,
        whole,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--translator", type=Path, help="folder of a Hugging Face T5")
    parser.add_argument("--pairs", type=Path, help="folder with test_2016_flickr.{en,de}.gz")
    arguments = parser.parse_args(argv)
    head = ("model", "data_type", "quantization", "kv_cache_dtype", "figure", "answers unlike fp32")
    print("| " + " | ".join((*head, "KL", "layers, MB", "all, MB")) + " |\n" + "|---" * 9 + "|")
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
