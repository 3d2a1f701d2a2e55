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
from launcher_scripts.checkpoint.nemo_gpt import read_gpt
from launcher_scripts.checkpoint.source_tensor import SourceTensor, concatenated
from launcher_scripts.errors import CheckpointError, Problems, problem
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
_LAYER = re.compile(r"((?:encoder|decoder)\.layers\.)(\d+)(\..+)")
_PREFIX = re.compile(r"^model\.(?:module\.)?(?:language_model\.)?")
# Buffers and states no inference needs, and the last stage's copy of a tied table.
_IGNORED = re.compile(r"(.+[./])?_extra_state(/.*)?|(.+\.)?inv_freq|word_embeddings\.weight")
_CHUNK = re.compile(r"model\d+")

StateDict = Mapping[str, SourceTensor]


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
    def open(cls, archive: Archive) -> NemoCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        root = _root(archive)
        raw = _read_yaml(archive, root + CONFIG_NAME)
        if root + DISTRIBUTED_FOLDER + distributed.METADATA in archive.names():
            tensors = distributed.read_tensors(archive, root + DISTRIBUTED_FOLDER)
            ranks = [[_stripped(tensors)]]
        else:
            ranks = _read_ranks(archive, root)
        shards = _merged_stages(ranks)
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
        shards = self.shards.get(name)
        if shards is None:
            return None
        if partition is Partition.REPLICATED:
            return shards[0]
        axis = 1 if partition is Partition.ROW_PARALLEL else 0
        return concatenated(shards, axis, sections)

    @property
    def knows_token_ids(self) -> bool:
        """NeMo leaves the ids to the tokenizer."""
        return False

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer."""
        return tokenizer_files.nemo_files(self.raw, self.archive, self.root)

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
    files: dict[tuple[int, int], str] = {}
    for name in archive.names():
        for pattern in _RANK_FOLDERS:
            match = pattern.fullmatch(name.removeprefix(root)) if name.startswith(root) else None
            if match is None:
                continue
            places = match.groupdict()
            place = (int(places.get("pp") or 0), int(places.get("tp") or 0))
            if place in files:
                raise CheckpointError(
                    problem(f"{archive.path} has two files of one rank", got=[files[place], name])
                )
            files[place] = name
    stages = 1 + max((pp for pp, _ in files), default=-1)
    ranks = 1 + max((tp for _, tp in files), default=-1)
    if not files:
        raise CheckpointError(
            problem(
                f"{archive.path} holds no weights",
                choices=[
                    WEIGHTS_NAME,
                    f"mp_rank_00/{WEIGHTS_NAME}",
                    f"tp_rank_00_pp_rank_000/{WEIGHTS_NAME}",
                    DISTRIBUTED_FOLDER + distributed.METADATA,
                ],
            )
        )
    problems = Problems(f"the checkpoint {archive.path}")
    for pp in range(stages):
        for tp in range(ranks):
            if (pp, tp) not in files:
                problems.add(f"the file of tensor-parallel rank {tp}, stage {pp} is missing")
    problems.raise_if_any(CheckpointError)
    return [[_state_dict(archive, files[pp, tp]) for tp in range(ranks)] for pp in range(stages)]


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


def _merged_stages(stages: list[list[StateDict]]) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards, with the layers of all pipeline stages numbered through.

    Stages start counting at 0; a stage begins where the one before it ended. A tensor that
    several stages hold (a tied table) is taken from the first.
    """
    merged: dict[str, tuple[SourceTensor, ...]] = {}
    first = 0
    for ranks in stages:
        count = 0
        for name in {name: None for rank in ranks for name in rank}:
            match = _LAYER.fullmatch(name)
            target = name
            if match:
                count = max(count, int(match[2]) + 1)
                target = f"{match[1]}{first + int(match[2])}{match[3]}"
            shards = tuple(rank[name] for rank in ranks if name in rank)
            if len(shards) < len(ranks):
                raise CheckpointError(
                    problem(f"{name} is missing on a tensor-parallel rank", got=len(shards))
                )
            merged.setdefault(target, shards)
        first += count
    return merged
