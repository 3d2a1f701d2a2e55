"""Base of the readers of checkpoints, and the options that a user gives them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import PART_ADVICE
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, concatenated
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenRule
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models.family import Partition

StateDict = Mapping[str, SourceTensor]
Shards = Mapping[str, tuple[SourceTensor, ...]]

# The vocabulary's tables of a GPT and of a T5's encoder, and a GPT's output layer.
TABLE = "embedding.word_embeddings.weight"
T5_TABLE = "encoder_embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
# The folder of one rank, as Megatron-LM and NeMo call it; groups `tp` and `pp` are the rank.
RANK_FOLDER = r"(?:tp|mp)_rank_(?P<tp>\d+)(?:_(?:pp_rank_)?(?P<pp>\d+))?/"
_ADAPTER = re.compile("adapter|prompt_table")
_LAYER = re.compile(r"((?:.+\.)?(?:encoder|decoder)\.(?:model\.)?layers\.)(\d+)(\..+)")


def rank_files(
    archive: Archive, root: str, file: str, others: Sequence[str] = ()
) -> list[list[str]]:
    """Names of the ranks' files below `root`, [pipeline stage][tensor-parallel rank].

    file:   what each is called in the folder of its rank; a lone one may lie in `root` itself
    others: further names to look for, for the error

    Raises CheckpointError when there is none, when one is missing, or when one is there twice.
    """
    pattern = re.compile(f"{re.escape(root)}(?:{RANK_FOLDER})?{re.escape(file)}")
    files: dict[tuple[int, int], str] = {}
    for name in archive.names():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank_key = (int(match["pp"] or 0), int(match["tp"] or 0))
        if rank_key in files:
            raise CheckpointError(
                problem(f"{archive.path} has two files of one rank", got=[files[rank_key], name])
            )
        files[rank_key] = name
    if not files:
        choices = (file, f"mp_rank_00/{file}", f"tp_rank_00_pp_rank_000/{file}", *others)
        raise CheckpointError(problem(f"{archive.path} holds no weights", choices=choices))
    stages = 1 + max(pp for pp, _ in files)
    ranks = 1 + max(tp for _, tp in files)
    problems = Problems(f"the checkpoint {archive.path}")
    for pp in range(stages):
        for tp in range(ranks):
            if (pp, tp) not in files:
                problems.add(f"the file of tensor-parallel rank {tp}, stage {pp} is missing")
    problems.raise_if_any(CheckpointError)
    return [[files[pp, tp] for tp in range(ranks)] for pp in range(stages)]


def flat_values(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries; names joined by dots."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def in_layer_order(
    archive: Archive, ranks: Sequence[Sequence[Sequence[StateDict]]], count: int | None
) -> list[list[StateDict]]:
    """The state dicts in the order of the layers they hold, [stage of a chunk][rank].

    ranks: the chunks of layers that a rank holds, in order, [pipeline stage][tensor-parallel rank]
    count: how many each must hold (virtual pipeline stages); None: it is not said

    The first chunks of all pipeline stages come first, then the second ones: so do the layers,
    however many of them a chunk holds (Megatron-LM core, get_transformer_layer_offset).
    """
    counts = {len(chunks) for stage in ranks for chunks in stage}
    num_layers = count or max(counts)
    if counts != {num_layers}:
        raise CheckpointError(
            problem(
                f"{archive.path} does not hold its virtual pipeline stages",
                got=sorted(counts),
                choices=[num_layers],
            )
        )
    return [[chunks[number] for chunks in stage] for number in range(num_layers) for stage in ranks]


def merged_stages(stages: Sequence[Sequence[StateDict]]) -> dict[str, tuple[SourceTensor, ...]]:
    """Name -> shards, with the layers of all pipeline stages numbered through.

    Stages start counting at 0; a stage begins where the one before it ended, for the layers of
    an encoder and of a decoder each. A tensor that several stages hold (a tied table) is taken
    from the first: a later stage may hold an untrained copy, of the same shape.
    """
    merged: dict[str, tuple[SourceTensor, ...]] = {}
    first: dict[str, int] = {}
    for ranks in stages:
        counts: dict[str, int] = {}
        for name in {name: None for rank in ranks for name in rank}:
            match = _LAYER.fullmatch(name)
            target = name
            if match:
                stack, number = match[1], int(match[2])
                counts[stack] = max(counts.get(stack, 0), number + 1)
                target = f"{stack}{first.get(stack, 0) + number}{match[3]}"
            shards = tuple(rank[name] for rank in ranks if name in rank)
            if len(shards) < len(ranks):
                raise CheckpointError(
                    problem(f"{name} is missing on a tensor-parallel rank", got=len(shards))
                )
            copies = (merged.setdefault(target, shards), shards)
            shapes = [[shard.shape for shard in copy] for copy in copies]
            if shapes[0] != shapes[1]:
                raise CheckpointError(
                    problem(f"{target} has another shape in another pipeline stage", got=shapes)
                )
        first = {stack: first.get(stack, 0) + counts.get(stack, 0) for stack in {*first, *counts}}
    return merged


def table_rows(archive: Archive, shards: Shards, table: str) -> int:
    """Rows of the vocabulary's table, over all ranks."""
    rows = sum(shard.shape[0] for shard in shards.get(table, ()) if shard.shape)
    if not rows:
        if any(_ADAPTER.search(name) for name in shards):
            raise CheckpointError(f"{archive.path} is {PART_ADVICE}")
        raise CheckpointError(problem(f"{archive.path} lacks the word embeddings", got=table))
    return rows


def find_full(
    shards: Shards, name: str, partition: Partition, sections: int
) -> SourceTensor | None:
    """One whole tensor, merged from its shards as `partition` says; None if it is not there.

    The source's weights are [out, in], the transpose of the stored form.
    """
    parts = shards.get(name)
    if parts is None:
        return None
    if partition is Partition.REPLICATED:
        shapes = [part.shape for part in parts]
        if len({*shapes}) > 1:
            raise CheckpointError(problem("the ranks hold different shapes of it", got=shapes))
        return parts[0]
    axis = 1 if partition is Partition.ROW_PARALLEL else 0
    return concatenated(parts, axis, sections)


PREDICTORS_NOTE = "the layers for multi-token prediction are left out"


@dataclass(frozen=True)
class Hints:
    """Answers to what a source may ask.

    num_heads:    attention heads, for a checkpoint without hyperparameters
    encoder_only: of an encoder-decoder, export the encoder
    allow_custom_code_config: take a model for the one of its model type, although its configuration
                              names code or a class of its own
    prediction_layer: export the layer for multi-token prediction alone, as a draft head
    training_checkpoint: of a training's checkpoints, the `last`, the `best`, or one by its name
    """

    num_heads: int | None = None
    encoder_only: bool = False
    training_checkpoint: str = "last"
    allow_custom_code_config: bool = False
    prediction_layer: bool = False


class SourceCheckpoint(ABC):
    """A source checkpoint as the export uses it, whatever its format.

    By default it leaves the special ids to its tokenizer, and has weights alone.
    format:   its row of SOURCES
    dialects: dialects of the weight table, the first that has a row wins
    notes:    what a user should know about the model
    """

    format: ClassVar[str]
    archive: Archive
    config: Any
    dialects: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def token_rule(self) -> TokenRule | None:
        """The ids the model was trained with, given its tokenizer; None: the tokenizer's own."""
        return None

    @property
    def knows_token_ids(self) -> bool:
        """Return whether start, end and pad id of `config` are the model's own, not defaults."""
        return False

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the checkpoint's files, for errors."""
        return name

    @property
    def adapters(self) -> Sequence[Any]:
        """Adapters (merging.Adapter) that were saved together with their base."""
        return ()

    @abstractmethod
    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer; an error if it has none."""

    def config_json(self) -> Mapping[str, Any] | None:
        """Return the config.json of the model in transformers; None if the checkpoint has none."""
        return None

    @property
    def config_dialects(self) -> tuple[str, ...]:
        """Dialects of the model that config_json describes."""
        return self.dialects

    def extra_files(self) -> dict[str, bytes]:
        """Name -> content of other files to put beside the weights."""
        return {}

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return the description of the source for the manifest."""
        return {
            "path": str(self.archive.path),
            "format": self.format,
            **self.details(),
            "dialects": list(self.dialects),
        }

    @abstractmethod
    def names(self) -> set[str]:
        """Every tensor that must find its place in the target."""

    @abstractmethod
    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        """One whole tensor, merged from its shards as `partition` says; None if it is not there.

        sections: see Layout. The source's weights are [out, in], the transpose of the stored form.
        """


class FullTensors(SourceCheckpoint):
    """Every tensor in one place, by its name."""

    tensors: Mapping[str, SourceTensor]

    def names(self) -> set[str]:
        return set(self.tensors)

    def find(self, name: str, _partition: Partition, _sections: int = 1) -> SourceTensor | None:
        return self.tensors.get(name)


class TensorShards(SourceCheckpoint):
    """Every tensor in parts of tensor-parallel ranks, by its name."""

    shards: Shards

    def names(self) -> set[str]:
        return set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        return find_full(self.shards, name, partition, sections)


_MAX_LISTED = 10
# Modules that a training puts around others: torch.compile, FSDP, activation checkpointing.
_INNER = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# Modules around the whole model: PEFT, DistributedDataParallel.
_OUTER = ("base_model.model.", "module.")
Value = TypeVar("Value")


def renamed(tensors: Iterable[tuple[str, str, Value]], origin: str) -> dict[str, Value]:
    """New name -> value of triples (name in the source, new name, value).

    origin: the source, for errors
    Raises CheckpointError with both source names of every name that two of them become.
    """
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    clashes: list[str] = []
    for source, name, value in tensors:
        if name in sources:
            clashes.append(
                f"{sources[name]} and {source} are both the model's {name}; expected one of them"
            )
        sources.setdefault(name, source)
        values.setdefault(name, value)
    problems = Problems(f"the names in {origin}")
    problems.add_first(clashes, _MAX_LISTED)
    problems.raise_if_any(CheckpointError)
    return values


def unwrapped(name: str) -> tuple[str, str]:
    """A tensor's name in its model, and the names of the modules around it that were removed."""
    plain = _INNER.sub("", name)
    removed = "".join(_INNER.findall(name))
    while prefix := next((wrapper for wrapper in _OUTER if plain.startswith(wrapper)), ""):
        plain = plain.removeprefix(prefix)
        removed = prefix + removed
    return plain, removed
