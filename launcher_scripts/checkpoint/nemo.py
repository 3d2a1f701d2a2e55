"""NeMo's Megatron GPT checkpoints: `.nemo` files and unpacked folders, however they are sharded.

Classic models and Megatron-LM core ones; one state dict per tensor- and pipeline-parallel rank, or
one distributed checkpoint. Seen from outside, every tensor is whole and layers are numbered
globally.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import yaml

from launcher_scripts.checkpoint import distributed, tokenizer_files, torch_file
from launcher_scripts.checkpoint.archive import Archive
from launcher_scripts.checkpoint.hints import Hints
from launcher_scripts.checkpoint.nemo_gpt import read_gpt
from launcher_scripts.checkpoint.shards import StateDict, find_whole, merged_stages, rank_files
from launcher_scripts.checkpoint.source_tensor import SourceTensor
from launcher_scripts.errors import CheckpointError, problem
from launcher_scripts.models.family import Partition
from launcher_scripts.models.gpt import GPTConfig

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights.ckpt"
DISTRIBUTED_FOLDER = "model_weights/"
TABLE = "embedding.word_embeddings.weight"

_RANK_FOLDERS = (
    re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)/" + re.escape(WEIGHTS_NAME)),
    re.compile(r"mp_rank_(?P<tp>\d+)/" + re.escape(WEIGHTS_NAME)),
    re.compile(re.escape(WEIGHTS_NAME)),
)
_PREFIX = re.compile(r"^model\.(?:module\.)?(?:language_model\.)?")
# Buffers and states no inference needs, and the last stage's copy of a tied table.
_IGNORED = re.compile(r"(.+[./])?_extra_state(/.*)?|(.+\.)?inv_freq|word_embeddings\.weight")
_CHUNK = re.compile(r"model\d+")


@dataclass(frozen=True)
class NemoCheckpoint:
    """An opened checkpoint.

    raw:      model_config.yaml
    root:     folder of the archive that holds it, "" or ending in `/`
    config:   the hyperparameters; token ids still GPTConfig's defaults
    dialects: dialects of the weight table, the first that has a row wins
    shards:   name without prefix -> the tensor on every tensor-parallel rank that has it
    notes:    what a user should know about the model
    """

    archive: Archive
    root: str
    raw: Mapping[str, Any]
    config: GPTConfig
    dialects: tuple[str, ...]
    shards: Mapping[str, tuple[SourceTensor, ...]]
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Whether the archive looks like NeMo's."""
        return any(PurePosixPath(name).name == CONFIG_NAME for name in archive.names())

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> NemoCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        root = _root(archive)
        raw = _read_yaml(archive, root + CONFIG_NAME)
        if root + DISTRIBUTED_FOLDER + distributed.METADATA in archive.names():
            tensors = distributed.read_tensors(archive, root + DISTRIBUTED_FOLDER)
            ranks = [[_stripped(tensors)]]
        else:
            ranks = _read_ranks(archive, root)
        shards = merged_stages(ranks)
        core = any(name.startswith("decoder.") for name in shards)
        local_norms = any(".pre_mlp_layernorm." in name for name in shards)
        gpt = read_gpt(raw, core=core, local_norms=local_norms)
        rows = sum(shard.shape[0] for shard in shards.get(TABLE, ()) if shard.shape)
        if not rows:
            raise CheckpointError(problem(f"{archive.path} lacks the word embeddings", got=TABLE))
        if gpt.fields["tied_embeddings"]:
            shards.pop("output_layer.weight", None)
        config = GPTConfig(vocab_size=rows, **gpt.fields)
        return cls(archive, root, raw, config, gpt.dialects, shards, gpt.notes)

    def names(self) -> set[str]:
        """Every tensor that must find its place in the target."""
        return set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        """One whole tensor, merged from its shards as `partition` says; None if it is not there.

        sections: see Layout. The source's weights are [out, in], the transpose of the stored form.
        """
        return find_whole(self.shards, name, partition, sections)

    @property
    def knows_token_ids(self) -> bool:
        """NeMo leaves the ids to the tokenizer."""
        return False

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer."""
        return tokenizer_files.nemo_files(self.raw, self.archive, self.root)

    def extra_files(self) -> dict[str, bytes]:
        """Other files to put beside the weights."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What the manifest records about the source."""
        return {
            "path": str(self.archive.path),
            "format": "nemo",
            "container": self.archive.container,
            "nemo_version": self.raw.get("nemo_version"),
            "dialects": list(self.dialects),
        }


def _root(archive: Archive) -> str:
    found = [name for name in archive.names() if PurePosixPath(name).name == CONFIG_NAME]
    if len(found) != 1:
        raise CheckpointError(
            problem(f"{archive.path} must hold one {CONFIG_NAME}", got=found or "none")
        )
    return found[0].removesuffix(CONFIG_NAME)


def _read_yaml(archive: Archive, name: str) -> Mapping[str, Any]:
    try:
        raw = yaml.safe_load(archive.read(name))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{name} of {archive.path} is damaged: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{name} of {archive.path} holds no mapping")
    return raw


def _read_ranks(archive: Archive, root: str) -> list[list[StateDict]]:
    """The state dicts, [pipeline stage][tensor-parallel rank]."""
    choices = [
        WEIGHTS_NAME,
        f"mp_rank_00/{WEIGHTS_NAME}",
        f"tp_rank_00_pp_rank_000/{WEIGHTS_NAME}",
        DISTRIBUTED_FOLDER + distributed.METADATA,
    ]
    files = rank_files(archive, root, _RANK_FOLDERS, choices)
    return [[_state_dict(archive, name) for name in ranks] for ranks in files]


def _state_dict(archive: Archive, name: str) -> StateDict:
    origin = f"{name} of {archive.path}"
    loaded = torch_file.load(archive.region(name), origin)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{origin} holds no state dict")
    state = loaded.get("state_dict", loaded)
    if any(isinstance(key, str) and _CHUNK.fullmatch(key) for key in loaded):
        raise CheckpointError(
            f"{origin} was saved by a run with virtual pipeline stages, which is not supported"
        )
    if not isinstance(state, dict):
        raise CheckpointError(f"{origin} holds no state dict")
    tensors = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    others = [str(key) for key in state if key not in tensors and not _IGNORED.fullmatch(str(key))]
    if others:
        raise CheckpointError(
            problem(
                f"{origin} holds something other than a model's weights; prompts and adapters are "
                "no models of their own",
                got=others[:3],
            )
        )
    return _stripped({str(key): SourceTensor.whole(value) for key, value in tensors.items()})


def _stripped(tensors: StateDict) -> StateDict:
    """Names without their common prefix, without what inference does not need."""
    stripped = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in stripped.items() if not _IGNORED.fullmatch(name)}
