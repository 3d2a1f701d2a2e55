"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer` that saves to tokenizer.json.

A GGUF file carries the vocabulary, the merges and the kind of every token, but only the *name* of
the rule that cuts text into words before the merges apply (`tokenizer.ggml.pre`). The table below
says what those names mean; the keys are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher_scripts.errors import CheckpointError, Problems, problem
from launcher_scripts.tokenizer import is_of_library

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

PREFIX = "tokenizer.ggml."

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def tokenizer_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every `tokenizer.ggml.*` field of an open GGUF file, by its name without that prefix."""
    try:
        return {
            key.removeprefix(PREFIX): field.contents()
            for key, field in reader.fields.items()
            if key.startswith(PREFIX)
        }
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the GGUF file's tokenizer is no text: {error}") from error


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Name -> content of the files of a Hugging Face tokenizer."""
    return {
        "tokenizer.json": build_tokenizer(metadata).to_str().encode(),
        "special_tokens_map.json": json.dumps(special_tokens(metadata)).encode(),
    }


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` (of tokenizer_metadata) describes.

    It adds no token of its own: neither at the start nor at the end of a text. Special tokens
    written out in a text are recognised as such.

    Raises CheckpointError when fields are missing or name a kind of tokenizer not known here.
    """
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    _check(metadata)
    tokens = metadata["tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    try:
        tokenizer = Tokenizer(BPE(vocab, merges))
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise CheckpointError(
            f"the GGUF tokenizer's merges and tokens disagree: {error}"
        ) from error
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[metadata["pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata["token_type"])
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Which tokens start, end and pad a sequence, as special_tokens_map.json says it.

    Keys are those of `bos_token`, `eos_token` and `pad_token` that the GGUF file names.
    """
    fields = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
    tokens = metadata.get("tokens")
    for field in fields.values():
        known = range(len(tokens) if isinstance(tokens, list) else 0)
        if field in metadata and metadata[field] not in known:
            raise CheckpointError(
                problem(f"{PREFIX}{field} is no id of the vocabulary", got=metadata[field])
            )
    return {
        f"{role}_token": metadata["tokens"][metadata[field]]
        for role, field in fields.items()
        if field in metadata
    }


def _gpt2() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> PreTokenizer:
    from tokenizers.pre_tokenizers import Digits, Sequence

    return Sequence([Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits_then_gpt2,
}


def _check(metadata: Mapping[str, Any]) -> None:
    problems = Problems("the GGUF file's tokenizer")
    for key in ("model", "pre", "tokens", "token_type", "merges"):
        if key not in metadata:
            problems.add(f"missing field {PREFIX}{key}")
    problems.raise_if_any(CheckpointError)
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        values = metadata[key]
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            problems.add(f"{PREFIX}{key} is no list of {kind.__name__}")
    if not isinstance(metadata["pre"], str):
        problems.add(f"{PREFIX}pre is no text", got=metadata["pre"])
    problems.raise_if_any(CheckpointError)
    if metadata["model"] != "gpt2":
        problems.add(f"unknown {PREFIX}model", got=metadata["model"], choices=["gpt2"])
    if metadata["pre"] not in PRE_TOKENIZERS:
        problems.add(f"unknown {PREFIX}pre", got=metadata["pre"], choices=sorted(PRE_TOKENIZERS))
    unique = len(set(metadata["tokens"]))
    if unique != len(metadata["tokens"]):
        problems.add(
            "the GGUF tokenizer's tokens are not unique",
            got=f"{unique} of {len(metadata['tokens'])}",
        )
    if len(metadata["token_type"]) != len(metadata["tokens"]):
        problems.add(
            f"{PREFIX}token_type must have one value per token",
            got=f"{len(metadata['token_type'])} for {len(metadata['tokens'])} tokens",
        )
    problems.raise_if_any(CheckpointError)


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Declare the tokens that the merges must not touch."""
    from tokenizers import AddedToken

    pairs = list(zip(tokens, kinds, strict=True))
    special = [token for token, kind in pairs if kind == CONTROL]
    defined = [token for token, kind in pairs if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
