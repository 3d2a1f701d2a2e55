"""Models that Megatron-LM core saved as distributed checkpoints: Megatron-LM, Bridge and NeMo 2.

All three write the same tensors (distributed.py). What the model is, Megatron-LM says in the
arguments within the common state, Megatron Bridge in `run_config.yaml` beside the tensors, and
NeMo 2 in `context/model.yaml` beside the folder `weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats import distributed, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.distributed import Stored
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    HEAD,
    PREDICTORS_NOTE,
    TABLE,
    FullTensors,
    Hints,
    SourceCheckpoint,
    renamed,
)
from launcher_scripts.checkpoint.sources import core_adapters, core_layers, core_options, core_t5
from launcher_scripts.checkpoint.sources.core_adapters import PeftSettings
from launcher_scripts.checkpoint.sources.core_options import CoreOptions
from launcher_scripts.checkpoint.sources.megatron import (
    NAMESPACES,
    arguments,
    the_latest,
    training_arguments,
)
from launcher_scripts.checkpoint.sources.merging import LearnedAdapter
from launcher_scripts.checkpoint.sources.nemo_files import config_files, stripped
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import mapping, parse_yaml
from launcher_scripts.config.settings import CHECKPOINT_KEY
from launcher_scripts.models.family import ModelConfig

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
RUN_CONFIG = "run_config.yaml"
CONTEXT = "context/model.yaml"
WEIGHTS = "weights/"


@dataclass(frozen=True)
class MegatronCoreCheckpoint(FullTensors):
    """An opened checkpoint.

    root:     the folder of the tensors in the archive, "" or ending in `/`
    tool:     what wrote it
    args:     Megatron-LM's arguments, {} of another tool
    options:  what the training says, under the names of the core's configuration
    config:   the hyperparameters; token ids still the defaults
    dialects: dialects of the weight table, the first that has a row wins
    adapters: adapters that were saved together with the model
    """

    format: ClassVar[str] = "megatron_core"

    archive: Archive
    root: str
    tool: str
    args: Mapping[str, Any]
    options: CoreOptions
    config: ModelConfig
    dialects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    notes: tuple[str, ...] = ()
    adapters: tuple[LearnedAdapter, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Return whether there is a distributed checkpoint."""
        return bool(roots(archive))

    @classmethod
    def open(cls, archive: Archive, _hints: Hints) -> MegatronCoreCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        root = the_latest(archive, roots(archive))
        stored = distributed.read_stored(archive, root)
        tensors, adapter_tensors = core_adapters.separated(
            model_names(stored.tensors, str(archive.path)), str(archive.path)
        )
        if TABLE not in tensors:
            raise CheckpointError(
                f"{archive.path} holds adapters alone: name it in export.model.adapter_checkpoints"
                if adapter_tensors
                else problem(f"{archive.path} lacks the word embeddings", choices=[TABLE])
            )
        tool, args, options = _read_options(archive, root, stored)
        if options.tied_embeddings:
            tensors.pop(HEAD, None)
        predicts = core_layers.predicts_more(options)
        if predicts:
            tensors = {
                name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")
            }
        config: ModelConfig
        if core_t5.is_t5(tensors):
            tensors = core_t5.nemo_names(tensors, str(archive.path))
            config, dialects = core_t5.read_core_t5(options, tensors)
        else:
            gpt = core_options.read_core_gpt(options, names=tensors)
            if "layer_branches" in gpt.fields:
                tensors = core_layers.generic_names(tensors, str(archive.path))
            config, dialects = gpt.config(tensors[TABLE].shape[0]), gpt.dialects(tensors)
        notes = (*options.check_keys(), *([PREDICTORS_NOTE] if predicts else []))
        checkpoint = cls(archive, root, tool, args, options, config, dialects, tensors, notes)
        return (
            replace(checkpoint, adapters=checkpoint.base_adapters(adapter_tensors))
            if adapter_tensors
            else checkpoint
        )

    def base_adapters(self, tensors: Mapping[str, SourceTensor]) -> tuple[LearnedAdapter, ...]:
        """Adapters that were saved together with the base."""
        settings = peft_settings(self.archive, self.root)
        path = self.archive.path
        return (core_adapters.adapter_of(path, tensors, settings, self.config, self.dialects),)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the tokenizer that Bridge and NeMo 2 keep with the model."""
        folders = {
            f"{PurePosixPath(name).parent}/"
            for name in self.archive.names()
            if name.startswith((f"{self.root}tokenizer/", f"{_parent(self.root)}context/"))
        }
        files = [
            folder for folder in sorted(folders) if tokenizer_files.has_plain(self.archive, folder)
        ]
        if len(files) > 1:
            raise CheckpointError(
                problem(
                    f"{self.archive.path} holds several tokenizers",
                    got=files,
                    change="export.model.tokenizer",
                )
            )
        return tokenizer_files.plain_files(self.archive, files[0] if files else self.root)

    def extra_files(self) -> dict[str, bytes]:
        """args.txt: a line `name:value` per training argument."""
        return training_arguments(self.args)

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        return {"tool": self.tool, "folder": self.root.rstrip("/")}


def model_names(tensors: Mapping[str, SourceTensor], origin: str) -> dict[str, SourceTensor]:
    """The tensors without a common prefix, without what inference does not need.

    origin: where they are from, for errors
    """
    named = ((name, name.removeprefix("module."), tensor) for name, tensor in tensors.items())
    return core_layers.joined_parts(stripped(renamed(named, origin), origin))


def roots(archive: Archive) -> set[str]:
    """Folders that hold a distributed checkpoint, "" or ending in `/`."""
    names = archive.names()
    return {
        name.removesuffix(distributed.METADATA)
        for name in names
        if PurePosixPath(name).name == distributed.METADATA
    }


def _parent(root: str) -> str:
    """The folder above, "" or ending in `/`."""
    parent = str(PurePosixPath(root).parent)
    return "" if parent == "." else f"{parent}/"


def _read_options(
    archive: Archive, root: str, stored: Stored
) -> tuple[str, Mapping[str, Any], CoreOptions]:
    """Return the program that wrote the checkpoint, its arguments, and the model's options."""
    names = archive.names()
    context = _parent(root) + CONTEXT
    if root + RUN_CONFIG in names:
        origin = f"{root}{RUN_CONFIG} of {archive.path}"
        model = _section(archive, root + RUN_CONFIG, "model", origin)
        return "Megatron Bridge", {}, core_options.of_bridge(model, origin)
    if root.endswith(WEIGHTS) and context in names:
        origin = f"{context} of {archive.path}"
        model = _section(archive, context, "config", origin)
        return "NeMo 2", {}, core_options.of_nemo2(model, origin)
    args = _arguments(archive, root, stored)
    if args is None:
        raise CheckpointError(
            problem(
                f"{archive.path} does not say what its model is",
                choices=[
                    f"args in {root}{COMMON} or its common state (Megatron-LM)",
                    f"{root}{RUN_CONFIG} (Megatron Bridge)",
                    f"{context} (NeMo 2)",
                ],
                change=CHECKPOINT_KEY,
            )
        )
    return "Megatron-LM", args, core_options.of_arguments(args, f"the arguments in {archive.path}")


def peft_settings(archive: Archive, root: str) -> PeftSettings:
    """Read the training settings of the adapters in the checkpoint below `root`.

    Raises CheckpointError where it does not say so.
    """
    names, context = archive.names(), _parent(root) + CONTEXT
    nemo = root.endswith(WEIGHTS) and context in names
    tool = (context, "model_transform", "config") if nemo else (root + RUN_CONFIG, "peft", "model")
    file, key, model = tool
    if file in names:
        origin = f"section {key} of {file}"
        size = _section(archive, file, model, origin).get("tensor_model_parallel_size") or 1
        raw = _section(archive, file, key, origin)
        problems = Problems(f"the adapter {archive.path} ({origin})")
        return PeftSettings(raw, problems, int(size), nemo)
    raise CheckpointError(
        problem(
            f"{archive.path} does not say how its adapters were trained",
            choices=[
                f"section peft of {root}{RUN_CONFIG} (Megatron Bridge)",
                f"section model_transform of {context} (NeMo 2)",
            ],
        )
    )


def _section(archive: Archive, name: str, key: str, origin: str) -> Mapping[str, Any]:
    try:
        return mapping(mapping(parse_yaml(archive.read(name)))[key])
    except (ValueError, KeyError) as error:
        text = f"{origin} is damaged or holds no section {key}: {error}"
        raise CheckpointError(text) from error


def _arguments(archive: Archive, root: str, stored: Stored) -> Mapping[str, Any] | None:
    """Megatron-LM's arguments in the common state: a file, or since core 0.19 an object."""
    if root + COMMON in archive.names():
        origin = f"{root}{COMMON} of {archive.path}"
        common = torch_file.load_torch_file(archive.region(root + COMMON), origin, NAMESPACES)
    else:
        origin = f"{COMMON_OBJECT} of {archive.path}"
        region = stored.find_object(COMMON_OBJECT)
        if region is None:
            return None
        items = torch_file.load_torch_file(region, origin, NAMESPACES)
        common = items[0] if isinstance(items, list) and items else None
    return arguments(common, origin) if isinstance(common, dict) else None


def holds_adapter(path: Path) -> bool:
    """Return whether a folder holds a distributed checkpoint that is none of NeMo 1."""
    if not path.is_dir():
        return False
    archive = Archive(path)
    return bool(roots(archive)) and not config_files(archive)


def read_core_adapter(path: Path, base: SourceCheckpoint) -> LearnedAdapter:
    """The adapter, for `base`.

    Raises CheckpointError for what is damaged, a whole model, or not supported.
    """
    archive = Archive(path)
    root = the_latest(archive, roots(archive))
    tensors = model_names(distributed.read_saved_tensors(archive, root), str(path))
    if TABLE in tensors:
        raise CheckpointError(
            f"{path} holds a whole model with its adapters: name it in {CHECKPOINT_KEY}"
        )
    settings = peft_settings(archive, root)
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            archive.check(piece.values, name)
    return core_adapters.adapter_of(path, tensors, settings, base.config, tuple(base.dialects))
