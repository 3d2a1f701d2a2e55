"""NeMo's Megatron checkpoints: `.nemo` files, unpacked ones and trainings, however sharded.

GPT, classic and of Megatron-LM core, and T5; one state dict per tensor- and pipeline-parallel rank,
or one distributed checkpoint. Seen from outside, every tensor is whole and layers are numbered
globally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats import distributed
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.shards import (
    HEAD,
    T5_TABLE,
    TABLE,
    Shards,
    merged_stages,
    rank_files,
    table_rows,
)
from launcher_scripts.checkpoint.layout.source_checkpoint import Hints, TensorShards
from launcher_scripts.checkpoint.sources import nemo_training
from launcher_scripts.checkpoint.sources.nemo_files import (
    chunked_stages,
    config_files,
    distributed_tensors,
    read_config,
    stripped,
    weight_files,
)
from launcher_scripts.checkpoint.sources.nemo_gpt import read_gpt
from launcher_scripts.checkpoint.sources.nemo_t5 import read_t5, t5_token_ids
from launcher_scripts.checkpoint.sources.nemo_training import TrainingCheckpoint
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.common.errors import Problems
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config


@dataclass(frozen=True)
class NemoCheckpoint(TensorShards):
    """An opened checkpoint.

    raw:      model_config.yaml, or what a training's hparams.yaml says in its place
    root:     folder of the archive that holds it, "" or ending in `/`
    config:   the hyperparameters; token ids still the defaults
    dialects: dialects of the weight table, the first that has a row wins
    shards:   name without prefix -> the tensor on every tensor-parallel rank that has it
    notes:    what a user should know about the model
    training: the checkpoint of a training that this is; None for a .nemo file
    """

    format: ClassVar[str] = "nemo"

    archive: Archive
    root: str
    raw: Mapping[str, Any]
    config: ModelConfig
    dialects: tuple[str, ...]
    shards: Shards
    notes: tuple[str, ...] = ()
    training: TrainingCheckpoint | None = None

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Whether the archive looks like NeMo's."""
        return bool(config_files(archive)) or nemo_training.is_training(archive)

    @classmethod
    def open(cls, archive: Archive, hints: Hints) -> NemoCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        training = None
        notes: tuple[str, ...] = ()
        if nemo_training.is_training(archive) and not config_files(archive):
            training = nemo_training.find_checkpoint(archive, hints.training_checkpoint)
            root, raw = "", training.raw
            shards = _read_training(archive, training)
            notes = (f"the checkpoint of the training: {training.name}",)
        else:
            root, raw = read_config(archive)
            shards = _read_weights(archive, root, raw)
        read = _t5 if T5_TABLE in shards else _gpt
        options = TrainingOptions(raw, Problems(f"model_config.yaml of {archive.path}"))
        config, dialects, more = read(archive, options, shards)
        notes = (*notes, *more, *options.check_keys())
        return cls(archive, root, raw, config, dialects, shards, notes, training)

    @property
    def token_rule(self) -> tokenizer_files.TokenRule | None:
        """T5's decoder starts with another token than the tokenizer's own, by model."""
        if not isinstance(self.config, T5Config):
            return None
        return partial(t5_token_ids, self.raw)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer."""
        find = partial(tokenizer_files.archived, self.archive, self.root)
        if self.training is not None:
            find = partial(tokenizer_files.beside, self.training.folder)
        return tokenizer_files.nemo_files(self.raw, self.archive.path, find)

    def details(self) -> dict[str, Any]:
        """What the manifest records besides path, format and dialects."""
        return {
            "container": "training" if self.training else self.archive.container,
            **({"checkpoint": self.training.name} if self.training else {}),
            "nemo_version": self.raw.get("nemo_version"),
        }


def _read_weights(
    archive: Archive, root: str, raw: Mapping[str, Any]
) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards of what lies beside model_config.yaml."""
    tensors = distributed_tensors(archive, root)
    if tensors is not None:
        return merged_stages([[stripped(tensors, str(archive.path))]])
    return merged_stages(chunked_stages(archive, weight_files(archive, root), raw))


def _read_training(
    archive: Archive, training: TrainingCheckpoint
) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards of one checkpoint of a training."""
    if training.distributed:
        tensors = distributed.read_tensors(archive, f"{training.name}/")
        return merged_stages([[stripped(tensors, str(archive.path))]])
    files = rank_files(archive, "", f"{training.name}.ckpt")
    return merged_stages(chunked_stages(archive, files, training.raw))


def _gpt(
    archive: Archive, options: TrainingOptions, shards: dict[str, Any]
) -> tuple[GPTConfig, tuple[str, ...], tuple[str, ...]]:
    """Hyperparameters, dialects and notes; what a tied model stores twice leaves `shards`."""
    core = any(name.startswith("decoder.") for name in shards)
    local_norms = any(".pre_mlp_layernorm." in name for name in shards)
    gpt = read_gpt(options, core=core, local_norms=local_norms)
    rows = table_rows(archive, shards, TABLE)
    if gpt.fields["tied_embeddings"]:
        shards.pop(HEAD, None)
    return GPTConfig(vocab_size=rows, **gpt.fields), gpt.dialects, gpt.notes


def _t5(
    archive: Archive, options: TrainingOptions, shards: dict[str, Any]
) -> tuple[T5Config, tuple[str, ...], tuple[str, ...]]:
    """As _gpt. The decoder's copy of a shared embedding is the encoder's."""
    t5 = read_t5(options)
    rows = table_rows(archive, shards, T5_TABLE)
    if t5.fields["shared_embeddings"]:
        for name in [name for name in shards if name.startswith("decoder_embedding.")]:
            del shards[name]
    return T5Config(vocab_size=rows, **t5.fields), t5.dialects, ()
