"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer` that saves to tokenizer.json.

The keys are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from launcher_scripts.checkpoint.formats.nemo_config import ADVICE
from launcher_scripts.checkpoint.tokenizers.vocabularies import (
    CHARSMAP,
    CONTROL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    byte_pairs,
    merged_pieces,
    pieces,
    unigram,
)
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.tokenizer import GENERATION_FILE, is_of_library

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
MODEL_NAME = "general.name"
SAMPLING = "general.sampling."
# Defaults of sampling -> their names in generation_config.json.
_DEFAULTS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Fields that name tokens which end an answer.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# tokenizer.ggml.model -> what makes the tokenizer, and the lists that it needs besides.
MODELS: dict[str, tuple[Callable[[Mapping[str, Any]], Tokenizer], dict[str, type]]] = {
    "gpt2": (byte_pairs, {"merges": str}),
    "gemma4": (merged_pieces, {"merges": str}),
    "llama": (pieces, {"scores": float}),
    "t5": (unigram, {"scores": float}),
}
_SENTENCEPIECE = ("gemma4", "llama", "t5")
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def tokenizer_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every `tokenizer.ggml.*` field of an open GGUF file, by its name without that prefix, and its
    chat templates, sampling defaults and the model's name by their whole keys."""
    try:
        return {
            key.removeprefix(PREFIX): field.contents()
            for key, field in reader.fields.items()
            if key.startswith((PREFIX, CHAT_TEMPLATE, SAMPLING)) or key == MODEL_NAME
        }
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the GGUF file's tokenizer is not text: {error}") from error


def gguf_tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Name -> content of the files of a Hugging Face tokenizer."""
    tokenizer = build_tokenizer(metadata)
    special = gguf_special_tokens(metadata)
    config: dict[str, Any] = {
        **special,
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if templates := _chat_templates(metadata):
        config["chat_template"] = templates
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if defaults := generation_defaults(metadata):
        files[GENERATION_FILE] = json.dumps(defaults).encode()
    return files


def generation_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's defaults of sampling, and its end tokens if it has several, as
    generation_config.json has them."""
    values = {
        name: metadata[f"{SAMPLING}{key}"]
        for key, name in _DEFAULTS.items()
        if isinstance(metadata.get(f"{SAMPLING}{key}"), int | float)
    }
    ends = list(dict.fromkeys(metadata[key] for key in _ENDS if type(metadata.get(key)) is int))
    return values | ({"eos_token_id": ends} if len(ends) > 1 else {})


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` (of tokenizer_metadata) describes.

    Asked for special tokens, it adds those that the file tells it to; a text's own, written out,
    are always recognised.

    Raises CheckpointError when fields are missing or name a kind of tokenizer not known here.
    """
    _check(metadata)
    make, _ = MODELS[metadata["model"]]
    try:
        tokenizer = make(metadata)
        _add_tokens(tokenizer, metadata)
        _add_ends(tokenizer, metadata)
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise CheckpointError(f"cannot make the GGUF file's tokenizer: {error}") from error
    return tokenizer


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the start, end, padding and unknown tokens as special_tokens_map.json has them: only
    those that the GGUF file names."""
    tokens = metadata.get("tokens")
    valid_ids = range(len(tokens) if isinstance(tokens, list) else 0)
    for field in _ROLES.values():
        if field in metadata and metadata[field] not in valid_ids:
            raise CheckpointError(
                problem(f"{PREFIX}{field} is not an id of the vocabulary", got=metadata[field])
            )
    return {
        role: metadata["tokens"][metadata[field]]
        for role, field in _ROLES.items()
        if field in metadata
    }


def _adds(metadata: Mapping[str, Any], end: str) -> bool:
    """Return whether a text gets the start ("bos") or the end ("eos") token, by llama.cpp's
    defaults."""
    defaults = {
        "gpt2": lambda: end == "bos" and PRE_TOKENIZERS[metadata["pre"]].starts,
        "gemma4": lambda: end == "bos",
        "llama": lambda: end == "bos",
        "t5": lambda: end == "eos",
    }[metadata["model"]]()
    return metadata.get(f"add_{end}_token", defaults) is True and f"{end}_token_id" in metadata


def _chat_templates(metadata: Mapping[str, Any]) -> Any:
    """The template, or a list of several with their names, as tokenizer_config.json has them."""
    templates = {
        key.removeprefix(CHAT_TEMPLATE).lstrip(".") or "default": value
        for key, value in metadata.items()
        if key == CHAT_TEMPLATE or key.startswith(f"{CHAT_TEMPLATE}.")
    }
    if not all(isinstance(value, str) for value in templates.values()):
        raise CheckpointError(problem(f"{CHAT_TEMPLATE} is not text", got=sorted(templates)))
    if templates.keys() <= {"default"}:
        return templates.get("default")
    return [{"name": name, "template": template} for name, template in sorted(templates.items())]


def _check(metadata: Mapping[str, Any]) -> None:
    problems = Problems("the GGUF file's tokenizer")
    model = metadata.get("model", "gpt2")
    if not isinstance(model, str) or model not in MODELS:
        problems.add(f"unknown {PREFIX}model", got=model, choices=sorted(MODELS), change=ADVICE)
        problems.raise_if_any(CheckpointError)
    lists = {"tokens": str, "token_type": int, **MODELS[model][1]}
    texts = ("model", "pre") if model == "gpt2" else ("model",)
    for key in (*texts, *lists):
        if key not in metadata:
            problems.add(f"missing field {PREFIX}{key}")
    problems.raise_if_any(CheckpointError)
    for key, kind in lists.items():
        values = metadata[key]
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            problems.add(f"{PREFIX}{key} is not a list of {kind.__name__}")
    if model == "gpt2" and not isinstance(metadata["pre"], str):
        problems.add(f"{PREFIX}pre is not text", got=metadata["pre"])
    problems.raise_if_any(CheckpointError)
    if model == "gpt2" and metadata["pre"] not in PRE_TOKENIZERS:
        problems.add(
            f"unknown {PREFIX}pre",
            got=metadata["pre"],
            choices=sorted(PRE_TOKENIZERS),
            change=ADVICE,
        )
    count = len(metadata["tokens"])
    unique = len(set(metadata["tokens"]))
    if unique != count:
        problems.add("the GGUF tokenizer's tokens are not unique", got=f"{unique} of {count}")
    if model == "llama" and metadata.get("remove_extra_whitespaces"):
        problems.add(f"{PREFIX}remove_extra_whitespaces is not supported", got=True, change=ADVICE)
    charsmap = metadata.get(CHARSMAP) or []
    if not isinstance(charsmap, list) or not all(
        type(value) is int and -128 <= value < 256 for value in charsmap
    ):
        problems.add(f"{PREFIX}{CHARSMAP} is not a list of bytes")
    if model == "llama" and charsmap:
        problems.add(f"{PREFIX}{CHARSMAP} is not supported", change=ADVICE)
    for key in ("token_type", "scores"):
        if key in lists and len(metadata[key]) != count:
            problems.add(
                f"{PREFIX}{key} must have one value per token",
                got=f"{len(metadata[key])} for {count} tokens",
            )
    problems.raise_if_any(CheckpointError)


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Declare the tokens that the merges must not touch."""
    from tokenizers import AddedToken

    kinds = metadata["token_type"]
    special = (CONTROL, UNKNOWN) if metadata["model"] in _SENTENCEPIECE else (CONTROL,)
    pairs = list(zip(metadata["tokens"], kinds, strict=True))
    # The file does not say that Phi-3's take the white space after them; llama.cpp tells Phi-3 by
    # its name, too.
    phi3 = re.search("phi[- ]?3", str(metadata.get(MODEL_NAME, "")).lower()) is not None
    keeping = ("<unk>", "<s>", "<|endoftext|>")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, rstrip=phi3 and token not in keeping)
            for token, kind in pairs
            if kind in special
        ]
    )
    # SentencePiece looks for its own after it has made spaces visible.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized="▁" in token, rstrip=phi3)
            for token, kind in pairs
            if kind == USER_DEFINED
        ]
    )


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """The start and end token around a text that is encoded with special tokens."""
    from tokenizers.processors import TemplateProcessing

    special = gguf_special_tokens(metadata)
    start, end = (
        [special[f"{end}_token"]] if _adds(metadata, end) else [] for end in ("bos", "eos")
    )
    if not (start or end):
        return
    one, two = ([*start, text, *end] for text in ("$A", "$B"))
    tokenizer.post_processor = TemplateProcessing(
        single=one,
        pair=one + two,
        special_tokens=[(token, metadata["tokens"].index(token)) for token in {*start, *end}],
    )
