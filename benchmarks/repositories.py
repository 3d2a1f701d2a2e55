"""Model repositories of random bfloat16 weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, WeightFile, shard_files
from launcher_scripts.checkpoint.model_repository import ModelRepository
from launcher_scripts.checkpoint.sources.fastertransformer import is_gain
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

BLOCK = 1 << 22  # numbers; larger tensors repeat them


@dataclass(frozen=True)
class RandomModel:
    """What is written: a model that ends no row by itself.

    rows: most rows in flight
    linked: every layer's files are links to those of the first, which takes a fraction of the disk
            and of the time; in the GPU's memory each layer has its own copy all the same
    decoupled: it streams
    seed: other weights of the same sizes have another one
    """

    name: str
    config: GPTConfig | T5Config
    rows: int
    tp_size: int = 1
    linked: bool = True
    decoupled: bool = False
    prefix_caching: bool = False
    seed: int = 0

    def write(self, root: Path) -> None:
        """Make the repository at `root`, or add the model to the one that is there."""
        # No end token, so that every row generates all that it was asked for.
        config = replace(self.config, end_id=self.config.vocab_size)
        folder = root / self.name / "1" / f"{self.tp_size}-gpu"
        small, gains = random_bits(0.0, self.seed), random_bits(1.0, self.seed)
        writer = LinkingWriter(folder, config, self.tp_size, "bf16")
        with writer:
            first: dict[tuple[str, int], WeightFile] = {}
            for file in shard_files(config, self.tp_size):
                if not file.spec.required:
                    continue
                model = first.setdefault((file.spec.name, file.tp_rank), file)
                if self.linked and model is not file:
                    writer.link(file, model)
                    continue
                values = gains if is_gain(file.spec.name) else small
                shape = file.spec.shape_on(config, self.tp_size)
                writer.write(file, [np.resize(values, shape)])
        ModelRepository(root).write(self._export_settings(root))

    def _export_settings(self, root: Path) -> ExportSettings:
        return ExportSettings(
            model_name=self.name,
            model_type="t5" if isinstance(self.config, T5Config) else "gpt3",
            checkpoint_path="random",
            triton_model_dir=str(root / self.name),
            parallelism=Parallelism(self.tp_size),
            tokenizer=TokenizerSettings(source="none"),
            max_batch_size=self.rows,
            weight_data_type="bf16",
            data_type="bf16",
            enable_custom_all_reduce=self.tp_size > 1,
            enable_prefix_caching=self.prefix_caching,
            decoupled=self.decoupled,
        )


class LinkingWriter(FTWriter):
    """A writer that can give a file's content a second name."""

    def link(self, file: WeightFile, content: WeightFile) -> None:
        os.link(self.partial / content.name, self.partial / file.name)
        self.add(replace(self._entries[content.name], name=file.name))


def random_bits(mean: float, seed: int = 0) -> np.ndarray:
    """BLOCK bfloat16 numbers around `mean`, of a size that keeps activations in range."""
    values = np.random.default_rng(seed).normal(mean, 0.02, BLOCK).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
