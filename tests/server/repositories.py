"""Tiny exported models: a random GPT with a real tokenizer, in a repository Triton can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from tests.engine.small_models import random_tensors, small_config, write_checkpoint
from tests.engine.small_t5 import NEMO, t5_config, t5_tensors

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
VOCAB_SIZE = 491  # of the small GPT-2 vocabulary
END_ID = 0
T5_END_ID = 3
# Layer norms, biases and two kinds of relative bias; the small tokenizer's vocabulary.
T5_CONFIG = t5_config(
    **NEMO, vocab_size=VOCAB_SIZE, end_id=T5_END_ID, cross_attention_relative_bias=True
)
# Models of one server. Two stages of a GPT run in test_sessions.py, a T5 of two ranks in shared.py.
SHAPES = {"tp1_pp1": (1, 1), "tp2_pp1": (2, 1)}
T5_SHAPES = {"tp1_pp1": (1, 1), "tp1_pp2": (1, 2)}
NO_TEXT = TokenizerSettings("none")


def beside(model: str, name: str) -> str:
    """The name of a text model of one of these shapes; that of the first has no prefix."""
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
            "data_type": "fp32",
            **more,
        },
    )


def write_weights(
    settings: ExportSettings,
    config: ModelConfig | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    source: str | None = None,
    tokenizer: str | None = "gpt2bpe",
) -> None:
    """The shards that convert_checkpoint would write; by default of a random `text_config`."""
    config = config or text_config()
    write_checkpoint(
        settings.checkpoint_dir,
        config,
        random_tensors(config) if tensors is None else tensors,
        settings.parallelism.tp_size,
        source=source,
        files=() if tokenizer is None else (TOKENIZERS / tokenizer).iterdir(),
    )


def export(
    folder: Path,
    config: ModelConfig | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    source: str | None = None,
    **more: Any,
) -> ExportSettings:
    """A whole repository; its root is the settings' model_repository."""
    settings = export_settings(folder, **more)
    tokenizer = None if settings.tokenizer.source == "none" else "gpt2bpe"
    write_weights(settings, config, tensors, source=source, tokenizer=tokenizer)
    ModelRepository(settings.model_repository).write(settings)
    return settings


def export_t5(folder: Path, model_type: str = "t5", **more: Any) -> ExportSettings:
    """A whole repository around T5_CONFIG; `more` is that of `export`."""
    tensors = t5_tensors(T5_CONFIG)
    values = {"source": "huggingface", "model_type": model_type, **more}
    return export(folder, T5_CONFIG, tensors, **values)
