"""Hugging Face folders: config.json and weights as safetensors or torch files, sharded or not.

The files of a Hugging Face folder that hold its weights, and their tensors by name.

A folder may hold one set of weights per format. transformers prefers safetensors, and a single file
to an index; where a single file stands next to the shards of an index, one of them is a leftover of
another save, and nothing says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, ClassVar

from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats import source_tensor, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, same_values
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    PREDICTORS_NOTE,
    FullTensors,
    Hints,
    renamed,
    unwrapped,
)
from launcher_scripts.checkpoint.sources.huggingface_architectures import (
    CONFIG_NAME,
    HEAD,
    WEIGHT_FILES,
    architecture,
    described,
    has_separate_head,
)
from launcher_scripts.checkpoint.sources.huggingface_classes import check_classes, reject_disobeyed
from launcher_scripts.checkpoint.sources.huggingface_drafts import (
    as_head,
    eagle3,
    head_kind,
    prediction_layer,
    without_predictors,
)
from launcher_scripts.checkpoint.sources.huggingface_quantization import (
    FILES,
    KEY,
    check_no_weight_is_left,
    weight_schemes,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import (
    MULTIMODAL,
    RawConfig,
    generation_keys,
    text_name,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import NOTE as IMAGES_NOTE
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import (
    BY_LAYER,
    GEMMAS_WITH_INPUTS,
    joined_head_norms,
    separate_experts,
    tensors_of_layers,
    unscaled_by_layer,
)
from launcher_scripts.checkpoint.sources.locations import foreign_weights, listed_shards
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import mapping, parse_json
from launcher_scripts.common.tokenizer import BYT5, GENERATION_FILE, OPTIONAL_FILES, is_byt5
from launcher_scripts.config.settings import CHECKPOINT_KEY
from launcher_scripts.models.draft_heads import EAGLE3, MTP
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig

_MAX_LISTED = 5
_WEIGHTS = re.compile(r"(?!training_args)[^/]+\.(?:safetensors|bin|pth|pt|msgpack|h5|gguf)")
_LFS_POINTER = b"version https://git-lfs"


def read_mapping(archive: Archive, name: str) -> dict[str, Any]:
    """A JSON file of a folder. Raises CheckpointError for one that is damaged or no mapping."""
    try:
        return mapping(parse_json(archive.read(name)))
    except ValueError as error:
        raise CheckpointError(f"{name} of {archive.path} is damaged: {error}") from error


def weight_files(archive: Archive, names: Sequence[str], notes: list[str]) -> list[str]:
    """The files that hold the weights.

    names: what a single file is called, by format, first choice first
    notes: gets what was ignored
    Raises CheckpointError where there are none, two sets, or a set that is not complete.
    """
    present = set(archive.names())
    selected: list[str] = []
    stale: dict[str, list[str]] = {}
    for name in names:
        shards = _shards(archive, f"{name}.index.json") if f"{name}.index.json" in present else []
        shards_present = [shard for shard in shards if shard in present]
        single = [name] if name in present else []
        if shards and not shards_present:
            stale[f"{name}.index.json"] = shards
        if not selected and (single or shards_present):
            selected = _one_set(archive, name, single, shards if shards_present else [])
    if not selected:
        _reject_missing(archive, names, stale)
    if stale:
        notes.append(f"{', '.join(stale)} is ignored: none of its files exist")
    ignored = [
        item for item in sorted(present) if _WEIGHTS.fullmatch(item) and item not in selected
    ]
    if ignored:
        listed = ", ".join(ignored[:_MAX_LISTED]) + (", ..." if ignored[_MAX_LISTED:] else "")
        notes.append(f"the weights are read from {listed_shards(selected)}; not read: {listed}")
    return selected


def _shards(archive: Archive, index: str) -> list[str]:
    try:
        weight_map = mapping(read_mapping(archive, index)["weight_map"])
        shards = sorted({str(PurePosixPath(shard)) for shard in weight_map.values()})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} of {archive.path} is damaged: {error!r}") from error
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise CheckpointError(f"{index} of {archive.path} is damaged: it names no files")
    return shards


def _one_set(
    archive: Archive, name: str, single: Sequence[str], shards: Sequence[str]
) -> list[str]:
    """The single file or the index's shards, of which some exist."""
    index = f"{name}.index.json"
    problems = Problems(f"{index} of {archive.path}")
    if single and shards and {*single} != {*shards}:
        raise CheckpointError(
            problem(
                f"{archive.path} holds two sets of weights: {name}, and {index} with "
                f"{listed_shards(shards)}",
                choices=["one of them: remove the leftover of another save"],
                change=CHECKPOINT_KEY,
            )
        )
    for shard in shards:
        if shard not in archive.names():
            problems.add("a shard is missing", got=shard)
    problems.raise_if_any(CheckpointError)
    return [*(shards or single)]


def _reject_missing(
    archive: Archive, names: Sequence[str], stale: Mapping[str, Sequence[str]]
) -> None:
    problems = Problems(f"the weights of {archive.path}")
    for index, shards in stale.items():
        missing = ", ".join(shards[:_MAX_LISTED]) + (", ..." if shards[_MAX_LISTED:] else "")
        problems.add(f"{index} names shards, and a shard is missing, as are all", got=missing)
    hint = foreign_weights(archive.names())
    if hint:
        problems.add(hint, change=CHECKPOINT_KEY)
    if not problems.messages:
        choices = [*names, *(f"{name}.index.json" for name in names)]
        problems.add(f"{archive.path} holds no weights", choices=choices)
    problems.raise_if_any(CheckpointError)


def read_tensors(
    archive: Archive,
    files: Sequence[str],
    rename: Callable[[str], str | None],
    notes: list[str],
) -> dict[str, SourceTensor]:
    """New name -> tensor, of all files.

    rename: a name, without the modules that a training puts around the model -> its new name; None
            for a tensor that is not needed
    notes:  gets which modules these were
    Raises CheckpointError for what is damaged, or two tensors of one new name.
    """
    removed: set[str] = set()

    def triples() -> Iterator[tuple[str, str, SourceTensor]]:
        for file in files:
            for key, values in _state_dict(archive, file).items():
                plain, modules = unwrapped(key)
                name = rename(plain)
                if name is not None:
                    removed.update({modules} if modules else ())
                    source = key if len(files) == 1 else f"{key} ({file})"
                    yield source, name, SourceTensor.full(values)

    tensors = renamed(triples(), str(archive.path))
    if removed:
        notes.append(f"names of tensors: {', '.join(sorted(removed))} is removed from their front")
    return tensors


def _state_dict(archive: Archive, file: str) -> dict[str, NDArray[Any]]:
    origin, region = f"{file} of {archive.path}", archive.region(file)
    if region.part(0, min(region.size, len(_LFS_POINTER))).bytes() == _LFS_POINTER:
        raise CheckpointError(
            f"{origin} is a pointer of git-lfs, not the weights; expected the file itself; "
            "run `git lfs pull` in the repository, or download it with huggingface-cli"
        )
    load = (
        source_tensor.load_safetensors if file.endswith(".safetensors") else torch_file.load_state
    )
    tensors = dict(torch_file.tensors_of(load(region, origin).items(), origin))
    if not tensors:
        raise CheckpointError(f"{origin} holds no state dict")
    return tensors


# What counts of generation_config.json: the token that texts begin with, which left config.json.
GENERATION_KEYS = ("forced_bos_token_id",)
TOKENIZER_CONFIG = OPTIONAL_FILES[1]
DECODER = ("decoder.", "lm_head.")
PREFIXES = ("transformer.", "model.", "gpt_neox.", "backbone.")
# A module of a Kimi Linear in memory, and in the files of transformers 5.
_KIMI_IN_MEMORY = (".self_attn.forget_gate.", ".self_attn.")
# Endings of names that are not weights; the last ones lie in the first T5s and BARTs, unused.
BUFFERS = (
    ".attn.bias",
    ".attn.causal_mask",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
    "embed_positions.weights",
    "embed_positions._float_tensor",
    "position_ids",
    ".EncDecAttention.relative_attention_bias.weight",
    "coder.version",
)


@dataclass(frozen=True)
class HuggingFaceCheckpoint(FullTensors):
    """An opened folder.

    raw:      config.json
    dialects: dialects of the weight table, the first that has a row wins
    tensors:  name without prefix -> tensor
    """

    format: ClassVar[str] = "huggingface"

    archive: Archive
    raw: Mapping[str, Any]
    config: ModelConfig
    dialects: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    notes: tuple[str, ...] = ()
    root: str = ""

    @classmethod
    def matches(cls, archive: Archive) -> bool:
        """Return whether the folder looks like one of transformers."""
        return CONFIG_NAME in archive.names()

    @classmethod
    def open(cls, archive: Archive, hints: Hints) -> HuggingFaceCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        full = read_mapping(archive, CONFIG_NAME)
        raw = described(full)
        row = architecture(raw, archive.path / CONFIG_NAME)
        head = head_kind(raw, hints.prediction_layer)
        reads_images = full.get("model_type") in MULTIMODAL
        of_files: list[str] = []
        files = weight_files(archive, WEIGHT_FILES, of_files)
        name_of = partial(_weight_name, reads_images=reads_images)
        tensors = read_tensors(archive, files, name_of, of_files)
        # transformers makes a shared expert of no width where there is none.
        tensors = {name: tensor for name, tensor in tensors.items() if 0 not in tensor.shape}
        widened = _widened(tensors, raw, archive)
        if head == EAGLE3:
            tensors, raw = eagle3(tensors, raw)
        elif head == MTP:
            tensors, raw = prediction_layer(tensors, raw, str(archive.path))
        tensors = separate_experts(tensors, raw["model_type"], str(archive.path))
        unscaled: dict[str, Any] = {}
        if raw["model_type"] == "gpt2" and raw.get(BY_LAYER) is True:
            tensors, unscaled = unscaled_by_layer(tensors), {BY_LAYER: False}
        if raw["model_type"] == "stablelm":
            tensors = joined_head_norms(tensors)
        if raw["model_type"] in GEMMAS_WITH_INPUTS:
            tensors = tensors_of_layers(tensors, raw)
        tensors, predicts = without_predictors(tensors, raw)
        if hints.encoder_only:
            tensors = {
                name: tensor for name, tensor in tensors.items() if not name.startswith(DECODER)
            }
        heads = {HEAD, *row.tied.get(HEAD, ())}
        headless = not heads & tensors.keys() and not hints.encoder_only
        has_head = has_separate_head(RawConfig(raw, tensors.keys(), Problems("")), row.ties)
        if head is None:
            _untied(tensors, row.tied, has_head)
        raw_values = raw | _generation(archive) | unscaled
        problems = Problems(str(archive.path / CONFIG_NAME))
        values = RawConfig(raw_values, tensors.keys(), problems)
        values.unused(KEY)
        if headless and has_separate_head(values, row.ties):
            problems.add(f"{HEAD} is missing, and tie_word_embeddings is false")
        reject_disobeyed(values)
        check_classes(
            values, full if head is None else raw, row.family, hints.allow_custom_code_config
        )
        dialects = row.dialects(values)
        try:
            config = row.read(values)
            if head is not None and isinstance(config, GPTConfig):
                config = as_head(config, values, head)
        except CheckpointError:
            values.check_keys()
            problems.raise_if_any(CheckpointError)
            raise
        notes = [*of_files, *values.notes, *values.check_keys(), *widened]
        notes += [IMAGES_NOTE] if reads_images else []
        notes += [PREDICTORS_NOTE] if predicts else []
        _check_heads(config, tensors, problems)
        problems.raise_if_any(CheckpointError)
        return cls(archive, raw, config, dialects, tensors, tuple(notes))

    @property
    def knows_token_ids(self) -> bool:
        """config.json has them."""
        return True

    def tokenizer_files(self) -> dict[str, bytes]:
        """Exported name -> content of the checkpoint's own tokenizer, and generation_config.json.

        Before transformers 4.26 its values stood in config.json.
        """
        generation = generation_keys(self.raw)
        local = {GENERATION_FILE: json.dumps(generation, indent=2).encode()} if generation else {}
        kind = self.raw.get("model_type")
        more = tokenizer_files.FAIRSEQ_SETS if kind == "mbart" else ()
        name = None
        has_config = TOKENIZER_CONFIG in self.archive.names()
        if has_config and is_byt5(self.raw, read_mapping(self.archive, TOKENIZER_CONFIG)):
            more, name = ({TOKENIZER_CONFIG: TOKENIZER_CONFIG},), BYT5
        config = read_mapping(self.archive, CONFIG_NAME)
        files = local | tokenizer_files.plain_files(self.archive, more=more, config=config)
        return files if name is None else tokenizer_files.with_class(files, name)

    def config_json(self) -> Mapping[str, Any]:
        """Return config.json of the decoder."""
        return self.raw

    def details(self) -> dict[str, Any]:
        """Details that the manifest records besides path, format and dialects."""
        keys = ("model_type", "transformers_version")
        return {**{key: self.raw.get(key) for key in keys}, "config": dict(self.raw)}


def _check_heads(config: Any, tensors: Mapping[str, SourceTensor], problems: Problems) -> None:
    """Note a number of key/value heads that the keys and values of no layer have."""
    rows = {
        tensor.shape[:1]
        for name, tensor in tensors.items()
        if name.endswith((".self_attn.k_proj.weight", ".self_attn.v_proj.weight"))
    }
    heads = getattr(config, "num_kv_heads", None)
    if not heads or getattr(config, "kv_lora_rank", None) is not None or len(rows) != 1:
        return
    layers = (config.of_layer(layer) for layer in range(config.num_layers))
    if not rows & {(layer.num_kv_heads * layer.head_size,) for layer in layers}:
        ((size,),) = rows
        fits, left = divmod(size, config.head_size)
        problems.add(
            f"num_key_value_heads does not fit k_proj.weight of {size} rows "
            f"in heads of {config.head_size}",
            got=heads,
            choices=[] if left else [fits],
        )


def _generation(archive: Archive) -> dict[str, Any]:
    """Read GENERATION_KEYS of generation_config.json, if there is one."""
    if GENERATION_FILE not in archive.names():
        return {}
    generation = read_mapping(archive, GENERATION_FILE)
    return {key: generation[key] for key in GENERATION_KEYS if key in generation}


def _weight_name(name: str, reads_images: bool) -> str | None:
    """The weight table's name of a tensor; None for a buffer, or one that reads images."""
    plain = without_prefix(name)
    if plain.endswith(BUFFERS):
        return None
    return text_name(plain) if reads_images else plain


def without_prefix(name: str) -> str:
    """A tensor's or a module's name as the weight table has it."""
    plain = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)
    return plain.replace(*_KIMI_IN_MEMORY)


def _widened(
    tensors: dict[str, SourceTensor], raw: Mapping[str, Any], archive: Archive
) -> list[str]:
    """Put tensors as wide as they are in place of quantized ones: a note of it, if there are such.

    Raises CheckpointError.
    """
    problems = Problems(f"the quantized weights of {archive.path}")
    present = {name: read_mapping(archive, name) for name in FILES if name in archive.names()}
    schemes = weight_schemes(raw, present, problems)
    if not problems.messages:
        for scheme in schemes:
            scheme.applied(tensors, problems)
    problems.raise_if_any(CheckpointError)
    check_no_weight_is_left(tensors)
    return [scheme.note for scheme in schemes if scheme.note]


def _untied(
    tensors: dict[str, SourceTensor], tied: Mapping[str, tuple[str, ...]], has_head: bool
) -> None:
    """Keep tied tensors once, under their usual name, whatever name the checkpoint gave them.

    has_head: the output layer has a table of its own, also where its values are the input's
    """
    for name, others in tied.items():
        for other in others:
            if other in tensors and name not in tensors:
                tensors[name] = tensors[other]
            is_separate = has_head and other == HEAD
            if other in tensors and not is_separate and same_values(tensors[other], tensors[name]):
                del tensors[other]
