"""Megatron-LM GPT checkpoints: `model_optim_rng.pt` or `model_rng.pt` per rank, of every version.

Names are those of NeMo's classic GPTs, which descend from these: the weight table's dialect is
"nemo", and only the order of query, key and value differs between the versions. Models of
Megatron-LM core (`--ckpt-format torch`) have the core's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.nemo_config import MEGATRON_FILES
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    HEAD,
    TABLE,
    Hints,
    Shards,
    StateDict,
    TensorShards,
    flat_values,
    in_layer_order,
    merged_stages,
    rank_files,
    renamed,
    table_rows,
)
from launcher_scripts.checkpoint.sources.core_layers import generic_names, joined_ranks
from launcher_scripts.checkpoint.sources.core_options import (
    CORE_ONLY,
    CoreOptions,
    of_arguments,
    read_core_gpt,
)
from launcher_scripts.checkpoint.sources.locations import TRACKER_NAME
from launcher_scripts.checkpoint.sources.training_options import NO_EXPERTS
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.config.settings import CHECKPOINT_KEY
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_nemo import nemo_dialects

# checkpoint_version -> the dialect that differs from "nemo" by the order of the rows of query, key
# and value (Megatron-LM, fix_query_key_value_ordering).
_VERSIONS = {0: ("nemo_legacy",), 1: ("megatron_innermost",), 2: (), 3: ()}
_IGNORED = ("rotary_pos_emb.", "_extra_state")
# Names of the releases that know RMSNorm -> those of the others.
_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "final_norm": "final_layernorm",
}
_NORM = re.compile(rf"(?<=\.)({'|'.join(_NORMS)})(?=\.)")
# The last stage's copy of a tied table.
_COPY = "word_embeddings_for_head"


@dataclass(frozen=True)
class MegatronCheckpoint(TensorShards):
    """An opened checkpoint.

    version:  how the rows of query, key and value are ordered
    args:     the training's arguments, {} where the checkpoint has none
    config:   the hyperparameters; token ids still GPTConfig's defaults
    dialects: dialects of the weight table, the first that has a row wins
    shards:   name -> the tensor on every tensor-parallel rank
    """

    format: ClassVar[str] = "megatron"

    archive: Archive
    root: str
    version: float
    args: Mapping[str, Any]
    config: GPTConfig
    dialects: tuple[str, ...]
    shards: Shards
    notes: tuple[str, ...] = ()

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Return whether the folder looks like Megatron-LM's."""
        return any(PurePosixPath(name).name in MEGATRON_FILES for name in archive.names())

    @classmethod
    def open(cls, archive: Archive, hints: Hints) -> MegatronCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        root = _root(archive)
        present = {PurePosixPath(name).name for name in archive.names() if name.startswith(root)}
        files = rank_files(archive, root, next(name for name in MEGATRON_FILES if name in present))
        loaded = {name: _load(archive, name) for stage in files for name in stage}
        first = loaded[files[0][0]]
        _check_same_save(archive, loaded)
        version = first.get("checkpoint_version") or 0
        if type(version) not in (int, float) or version not in _VERSIONS:
            raise CheckpointError(
                problem(f"{archive.path}: unknown version", got=version, choices=_VERSIONS)
            )
        args = arguments(first, f"{files[0][0]} of {archive.path}") or {}
        virtual = args.get("virtual_pipeline_model_parallel_size")
        ranks = [[_chunks(archive, name, loaded[name]) for name in stage] for stage in files]
        shards = merged_stages(in_layer_order(archive, ranks, virtual))
        vocab = table_rows(archive, shards, TABLE)
        settings = _settings(args, shards, vocab, hints, f"the checkpoint {archive.path}")
        dialects = (*_VERSIONS[int(version)], *settings.dialects)
        if settings.config.layer_branches is not None:
            shards = joined_ranks(generic_names(shards, str(archive.path)), settings.config)
        return cls(
            archive, root, float(version), args, settings.config, dialects, shards, settings.notes
        )

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of a tokenizer that lies in the checkpoint's folder."""
        return tokenizer_files.plain_files(self.archive, self.root)

    def extra_files(self) -> dict[str, bytes]:
        """args.txt: a line `name:value` per training argument."""
        return training_arguments(self.args)

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        return {"checkpoint_version": self.version}


def training_arguments(args: Mapping[str, Any]) -> dict[str, bytes]:
    """args.txt with the arguments that are plain values; no file without any."""
    plain = (str, int, float, bool, list, tuple, type(None))
    settings = {name: value for name, value in args.items() if isinstance(value, plain)}
    text = "".join(f"{name}:{value}\n" for name, value in settings.items())
    return {"args.txt": text.encode()} if text else {}


def _root(archive: Archive) -> str:
    """The folder of the ranks: the one the tracker file names, or the only one there is."""
    roots = set()
    for name in archive.names():
        path = PurePosixPath(name)
        if path.name in MEGATRON_FILES:
            in_rank = re.match(r"(mp|tp)_rank_\d", path.parent.name)
            root = path.parent.parent if in_rank else path.parent
            roots.add("" if root == PurePosixPath(".") else f"{root}/")
    return the_latest(archive, roots)


def the_latest(archive: Archive, roots: set[str]) -> str:
    """Return the folder ("" or ending in `/`) that the tracker file names, or the only one there
    is.

    Raises CheckpointError where the tracker file names a folder that holds no such checkpoint.
    """
    if TRACKER_NAME in archive.names() and roots != {""}:
        step = archive.read(TRACKER_NAME).decode(errors="replace").strip()
        latest = f"{step}/" if step == "release" else f"iter_{step:0>7}/"
        if latest in roots:
            return latest
        if any(name.startswith(latest) for name in archive.names()):
            raise CheckpointError(
                problem(
                    f"{TRACKER_NAME} of {archive.path} names {latest}, whose checkpoint is "
                    "incomplete or of another format than the others",
                    got=sorted(roots),
                    change=f"{CHECKPOINT_KEY}, naming one folder",
                )
            )
    if len(roots) != 1:
        raise CheckpointError(
            problem(
                f"{archive.path} must hold one checkpoint",
                got=sorted(roots) or "none",
                change=f"{CHECKPOINT_KEY}, naming one of them",
            )
        )
    return roots.pop()


class Namespace(pickles.PickledObject):
    """argparse.Namespace: the training's arguments."""


# Classes that hold the training's arguments.
NAMESPACES: pickles.Globals = {
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
}


def arguments(loaded: Mapping[str, Any], origin: str) -> Mapping[str, Any] | None:
    """The training's arguments in a file, None if it has none.

    Raises CheckpointError for an object that nothing here reads.
    """
    args = loaded.get("args")
    pickles.check_readable(args, f"args of {origin}")
    if isinstance(args, Namespace):
        return args.state
    return args if isinstance(args, dict) else None


def _load(archive: Archive, name: str) -> Mapping[str, Any]:
    origin = f"{name} of {archive.path}"
    loaded = torch_file.load_state(archive.region(name), origin, NAMESPACES)
    for key, value in loaded.items():
        if re.fullmatch(r"model\d*", str(key)):
            pickles.check_readable(value, f"{key} of {origin}")
    if not _models(loaded):
        raise CheckpointError(f"{origin} holds no model")
    return loaded


def _check_same_save(archive: Archive, loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointError for ranks of several saves: one of them was interrupted, or copied."""
    for key in ("iteration", "checkpoint_version"):
        values = {name: file.get(key) for name, file in loaded.items()}
        if len({repr(value) for value in values.values()}) > 1:
            raise CheckpointError(
                problem(f"the files of {archive.path} are of several saves: {key}", got=values)
            )


def _models(loaded: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the models of one rank: its model, or `model0`, `model1`, ... of its virtual stages,
    up to the first that is missing."""
    names = ["model"] if "model" in loaded else (f"model{number}" for number in count())
    models: Iterator[Any] = (loaded.get(name) for name in names)
    return list(takewhile(lambda model: isinstance(model, dict), models))


def _chunks(archive: Archive, name: str, loaded: Mapping[str, Any]) -> list[StateDict]:
    """The state dicts of the chunks of layers that one rank's file holds."""
    return [_tensors(model, f"{name} of {archive.path}") for model in _models(loaded)]


def _tensors(model: Mapping[str, Any], origin: str) -> StateDict:
    """Name -> tensor, with the names of NeMo's classic GPTs."""
    if not isinstance(model.get("language_model", model), dict):
        raise CheckpointError(f"{origin} holds no language model")
    others = sorted(map(str, model.keys() - {"language_model", _COPY}))
    if "language_model" in model and others:
        raise CheckpointError(
            problem(f"{origin} is no GPT: it has more than a language model", got=others)
        )
    tensors = []
    for source, values in flat_values(model.get("language_model", model)):
        name = re.sub(r"^transformer\.", "encoder.", source)
        name = re.sub(r"(layers\.\d+)\.attention\.", r"\1.self_attention.", name)
        name = _NORM.sub(lambda match: _NORMS[match[1]], name)
        if name.startswith((_COPY, *_IGNORED)) or name.endswith(_IGNORED):
            continue
        if not isinstance(values, np.ndarray):
            raise CheckpointError(
                problem(f"{origin} holds something other than weights", got=f"{name}: {values!r}")
            )
        tensors.append((source, name, SourceTensor.full(values)))
    return renamed(tensors, origin)


# What the core's layers can do and these cannot.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    **CORE_ONLY,
    "qk_layernorm": (None, False),
}


@dataclass(frozen=True)
class MegatronArgs:
    """The training arguments of a GPT, as hyperparameters.

    Absent arguments have the defaults of the releases that did not know them. A checkpoint from
    before there were arguments in it (version 0) is measured by its tensors.

    dialects: dialects to look into, first choice first
    notes:    what a user should know about the model
    """

    config: GPTConfig
    dialects: tuple[str, ...] = ("nemo",)
    notes: tuple[str, ...] = ()


def _settings(
    args: Mapping[str, Any],
    shards: dict[str, tuple[SourceTensor, ...]],
    vocab: int,
    hints: Hints,
    origin: str,
) -> MegatronArgs:
    """Translate `args`, {} for a checkpoint without; what a tied model of Megatron-LM core stores
    twice leaves `shards`.

    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    core = any(mark in name for name in shards for mark in (".linear_qkv.", ".mixer.in_proj."))
    if not args and not core:
        return _measured(shards, vocab, hints, Problems(origin))
    options = of_arguments(args, origin) if core else _classic_options(args, origin)
    gpt = read_core_gpt(options, NO_EXPERTS if core else _SUPPORTED_VALUES, shards)
    dialects = nemo_dialects(fused=gpt.fields["gated"], plus_one=gpt.plus_one)
    if gpt.fields["num_kv_heads"] != gpt.fields["num_heads"]:
        dialects = ("megatron_groups", *dialects)
    if core:
        dialects = gpt.dialects(shards)
        if gpt.fields["tied_embeddings"]:
            shards.pop(HEAD, None)
    return MegatronArgs(gpt.config(vocab), dialects, options.check_keys())


def _classic_options(args: Mapping[str, Any], origin: str) -> CoreOptions:
    """The options of a model that is not the core's: the code of these never looked at the base and
    the scaling of rotary positions, and has its own order of GELUs (megatron/legacy/model).
    """
    defaults = {"rotary_base": 10000, "use_rope_scaling": False}
    ignored = {
        name: args[name] for name in defaults if args.get(name) not in (None, defaults[name])
    }
    fused = args.get("openai_gelu") or (not args.get("onnx_safe") and args.get("bias_gelu_fusion"))
    options = of_arguments({**args, **dict.fromkeys(ignored), "bias_gelu_fusion": fused}, origin)
    if not ignored or options.get("position_embedding_type") != "rope":
        return options
    note = f"Megatron-LM's older models ignore {ignored}, and so does this one"
    return replace(options, notes=(*options.notes, note))


def _measured(shards: Shards, vocab: int, hints: Hints, problems: Problems) -> MegatronArgs:
    """A checkpoint without arguments: the number of heads alone leaves no trace in the tensors.

    The epsilon is FasterTransformer's.
    """
    positions = shards.get("embedding.position_embeddings.weight")
    up = shards.get("encoder.layers.0.mlp.dense_h_to_4h.weight")
    layers = {int(match[1]) for name in shards if (match := re.search(r"layers\.(\d+)\.", name))}
    if positions is None or up is None:
        problems.add("the position embeddings or the first MLP are missing")
        raise problems.error(CheckpointError)
    max_positions, hidden = positions[0].shape
    heads = hints.num_heads or 0
    if heads < 1 or hidden % heads:
        problems.add(
            "this version of Megatron-LM does not store the number of attention heads",
            got=hints.num_heads,
            choices=[f"a divisor of {hidden}"],
            change="export.model.num_attention_heads",
        )
    problems.raise_if_any(CheckpointError)
    config = GPTConfig(
        vocab_size=vocab,
        num_layers=len(layers),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=sum(part.shape[0] for part in up),
        max_positions=max_positions,
        norm_eps=1e-6,
    )
    return MegatronArgs(config)
