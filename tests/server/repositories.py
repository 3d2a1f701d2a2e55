"""Tiny exported models: a random GPT with a real tokenizer, in a repository Triton can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, weight_files
from launcher_scripts.checkpoint.repository.model_repository import ModelRepository
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import random_tensors, rank_part, small_config

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
VOCAB_SIZE = 491  # of the small GPT-2 vocabulary
END_ID = 0
SHAPES = {"tp1_pp1": (1, 1), "tp2_pp1": (2, 1), "tp1_pp2": (1, 2)}  # models of one server


def beside(model: str, name: str) -> str:
    """The name of a text model of one of SHAPES; that of the first has no prefix."""
    return name if model == next(iter(SHAPES)) else f"{model}_{name}"


def text_config(**changes: Any) -> GPTConfig:
    """A tiny GPT whose vocabulary is the small GPT-2 tokenizer's."""
    ids = {"vocab_size": VOCAB_SIZE, "start_id": END_ID, "end_id": END_ID}
    return small_config(**{**ids, **changes})


def export_settings(folder: Path, name: str = "tiny", tp: int = 1, pp: int = 1, **more: Any):
    """Settings as the export stage would write them, for a repository below `folder`."""
    return ExportSettings(
        model_name=name,
        triton_model_dir=str(folder / "model_repo" / name),
        parallelism=Parallelism(tp, pp),
        **{
            "checkpoint_path": "unused.nemo",
            "model_type": "gpt3",
            "max_batch_size": 8,
            **more,
        },
    )


def write_weights(
    settings: ExportSettings, config: GPTConfig | None = None, tokenizer: str | None = "gpt2bpe"
) -> dict[str, np.ndarray]:
    """The shards that convert_checkpoint would write; returns the whole tensors."""
    config = config or text_config()
    tensors = random_tensors(config)
    tp_size = settings.parallelism.tp_size
    with FTWriter(settings.checkpoint_dir, config, tp_size, "fp32") as writer:
        for file in weight_files(config, tp_size):
            whole = tensors[file.spec.tensor_name(file.layer)]
            part = rank_part(file.spec, config, whole, tp_size, file.tp_rank)
            writer.write(file, [np.ascontiguousarray(part)])
        if tokenizer is not None:
            for path in (TOKENIZERS / tokenizer).iterdir():
                writer.copy(path.read_bytes(), path.name)
    return tensors


def export(folder: Path, config: GPTConfig | None = None, **more: Any) -> ExportSettings:
    """A whole repository; its root is the settings' model_repository."""
    settings = export_settings(folder, **more)
    tokenizer = None if settings.tokenizer.source == "none" else "gpt2bpe"
    write_weights(settings, config, tokenizer)
    ModelRepository(settings.model_repository).write(settings)
    return settings
