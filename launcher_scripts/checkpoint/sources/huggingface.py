"""Hugging Face folders: config.json and weights as safetensors or torch files, sharded or not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor, same_values
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    PREDICTORS_NOTE,
    Hints,
    WholeTensors,
)
from launcher_scripts.checkpoint.sources.huggingface_architectures import (
    CONFIG_NAME,
    HEAD,
    WEIGHT_FILES,
    architecture,
    check_classes,
    described,
    has_own_head,
    refuse_disobeyed,
)
from launcher_scripts.checkpoint.sources.huggingface_files import (
    read_mapping,
    read_tensors,
    weight_files,
)
from launcher_scripts.checkpoint.sources.huggingface_multimodal import MULTIMODAL, text_name
from launcher_scripts.checkpoint.sources.huggingface_multimodal import NOTE as IMAGES_NOTE
from launcher_scripts.checkpoint.sources.huggingface_quantization import (
    FILES,
    KEY,
    check_no_weight_is_left,
    weight_schemes,
)
from launcher_scripts.checkpoint.sources.huggingface_raw import (
    PREDICTORS,
    RawConfig,
    generation_keys,
)
from launcher_scripts.checkpoint.sources.huggingface_stacked_experts import own_experts
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.common.tokenizer import (
    BYT5,
    GENERATION_FILE,
    OPTIONAL_FILES,
    is_byt5,
)
from launcher_scripts.models.family import ModelConfig

# What counts of generation_config.json: the token that texts begin with, which left config.json.
GENERATION_KEYS = ("forced_bos_token_id",)
TOKENIZER_CONFIG = OPTIONAL_FILES[1]
DECODER = ("decoder.", "lm_head.")
PREFIXES = ("transformer.", "model.", "gpt_neox.")
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
class HuggingFaceCheckpoint(WholeTensors):
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
        """Whether the folder looks like one of transformers."""
        return CONFIG_NAME in archive.names()

    @classmethod
    def open(cls, archive: Archive, hints: Hints) -> HuggingFaceCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        whole = read_mapping(archive, CONFIG_NAME)
        raw = described(whole)
        row = architecture(raw, archive.path / CONFIG_NAME)
        reads_images = whole.get("model_type") in MULTIMODAL
        of_files: list[str] = []
        files = weight_files(archive, WEIGHT_FILES, of_files)
        name_of = partial(_weight_name, reads_images=reads_images)
        tensors = read_tensors(archive, files, name_of, of_files)
        widened = _widened(tensors, raw, archive)
        tensors = own_experts(tensors, raw["model_type"], str(archive.path))
        tensors, predicts = _without_predictors(tensors, raw)
        if hints.encoder_only:
            tensors = {
                name: tensor for name, tensor in tensors.items() if not name.startswith(DECODER)
            }
        heads = {HEAD, *row.tied.get(HEAD, ())}
        headless = not heads & tensors.keys() and not hints.encoder_only
        own_head = has_own_head(RawConfig(raw, tensors.keys(), Problems("")), row.ties)
        _untied(tensors, row.tied, own_head)
        said = raw | _generation(archive)
        problems = Problems(str(archive.path / CONFIG_NAME))
        values = RawConfig(said, tensors.keys(), problems)
        values.unused(KEY)
        if headless and has_own_head(values, row.ties):
            problems.add(f"{HEAD} is missing, and tie_word_embeddings is false")
        refuse_disobeyed(values)
        check_classes(values, whole, row.family, hints.allow_custom_code_config)
        dialects = row.dialects(values)
        try:
            config = row.read(values)
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
        said = generation_keys(self.raw)
        own = {GENERATION_FILE: json.dumps(said, indent=2).encode()} if said else {}
        kind = self.raw.get("model_type")
        more = tokenizer_files.FAIRSEQ_SETS if kind == "mbart" else ()
        name = None
        there = TOKENIZER_CONFIG in self.archive.names()
        if there and is_byt5(self.raw, read_mapping(self.archive, TOKENIZER_CONFIG)):
            more, name = ({TOKENIZER_CONFIG: TOKENIZER_CONFIG},), BYT5
        whole = read_mapping(self.archive, CONFIG_NAME)
        files = own | tokenizer_files.plain_files(self.archive, more=more, config=whole)
        return files if name is None else tokenizer_files.with_class(files, name)

    def details(self) -> dict[str, Any]:
        """What the manifest records besides path, format and dialects."""
        return {key: self.raw.get(key) for key in ("model_type", "transformers_version")}


def _check_heads(config: Any, tensors: Mapping[str, SourceTensor], problems: Problems) -> None:
    """Note a number of key/value heads that the keys and values of no layer have."""
    rows = {
        tensor.shape[:1]
        for name, tensor in tensors.items()
        if name.endswith((".self_attn.k_proj.weight", ".self_attn.v_proj.weight"))
    }
    heads = getattr(config, "num_kv_heads", None)
    if heads and len(rows) == 1 and rows != {(heads * config.head_size,)}:
        ((size,),) = rows
        fits, left = divmod(size, config.head_size)
        problems.add(
            f"num_key_value_heads does not fit k_proj.weight of {size} rows "
            f"in heads of {config.head_size}",
            got=heads,
            choices=[] if left else [fits],
        )


def _generation(archive: Archive) -> dict[str, Any]:
    """What generation_config.json, if there is one, says of GENERATION_KEYS."""
    if GENERATION_FILE not in archive.names():
        return {}
    said = read_mapping(archive, GENERATION_FILE)
    return {key: said[key] for key in GENERATION_KEYS if key in said}


def _weight_name(name: str, reads_images: bool) -> str | None:
    """The weight table's name of a tensor; None for a buffer, or one that reads images."""
    plain = without_prefix(name)
    if plain.endswith(BUFFERS):
        return None
    return text_name(plain) if reads_images else plain


def without_prefix(name: str) -> str:
    """A tensor's or a module's name as the weight table has it."""
    return next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)


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


def _without_predictors(
    tensors: dict[str, SourceTensor], raw: Mapping[str, Any]
) -> tuple[dict[str, SourceTensor], bool]:
    """The tensors without those of layers behind the last one that predict further tokens, if
    config.json says that there may be such; and whether there were."""
    layers = raw.get("num_hidden_layers")
    if not isinstance(layers, int) or not any(raw.get(key) for key in PREDICTORS):
        return tensors, False
    kept = {}
    for name, tensor in tensors.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if not name.startswith("mtp") and (layer is None or int(layer[1]) < layers):
            kept[name] = tensor
    return kept, len(kept) < len(tensors)


def _untied(
    tensors: dict[str, SourceTensor], tied: Mapping[str, tuple[str, ...]], own_head: bool
) -> None:
    """Keep tied tensors once, under their usual name, whatever name the checkpoint gave them.

    own_head: the output layer has a table of its own, also where its values are the input's
    """
    for name, others in tied.items():
        for other in others:
            if other in tensors and name not in tensors:
                tensors[name] = tensors[other]
            is_own = own_head and other == HEAD
            if other in tensors and not is_own and same_values(tensors[other], tensors[name]):
                del tensors[other]
