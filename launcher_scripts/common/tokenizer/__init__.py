"""Text to token ids and back, from the files that travel with a checkpoint.

This package stands alone: it is copied beside the text models of a Triton repository, so it imports
nothing of this project but itself. tokenizers or sentencepiece is imported when a folder needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from .base import (
    OPTIONAL_FILES,
    SpecialIds,
    TokenizationError,
    Tokenizer,
    TokenizerError,
    is_of_library,
    tokenizer_class,
    tokenizer_config,
)
from .libraries import (
    BYT5,
    ByT5Tokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    M2M100Tokenizer,
    MarianTokenizer,
    PieceTokenizer,
    SentencePieceTokenizer,
    is_byt5,
)

__all__ = [
    "BYT5",
    "CHAT_TEMPLATE_FILES",
    "COMPANION_FILES",
    "GENERATION_FILE",
    "KINDS",
    "OPTIONAL_FILES",
    "PieceTokenizer",
    "SentencePieceTokenizer",
    "SpecialIds",
    "TokenizationError",
    "Tokenizer",
    "TokenizerError",
    "chat_templates",
    "is_byt5",
    "is_of_library",
    "load_tokenizer",
    "special_tokens",
    "tokenizer_files",
]

# What a folder may hold, best source first, and what is made of it.
KINDS: dict[tuple[str, ...], Callable[[Path], Tokenizer]] = {
    ("tokenizer.json",): HuggingFaceTokenizer,
    ("tokenizer.model",): SentencePieceTokenizer,
    ("vocab.json", "merges.txt"): GPT2Tokenizer,
    ("vocab.json", "source.spm"): MarianTokenizer,
    ("vocab.json", "sentencepiece.bpe.model"): M2M100Tokenizer,
    (OPTIONAL_FILES[1],): ByT5Tokenizer,  # which it must name
}
# How chats are written and texts are generated, under the names that transformers gives them.
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
GENERATION_FILE = "generation_config.json"
# What may lie beside a tokenizer's own files.
COMPANION_FILES = (*OPTIONAL_FILES, *CHAT_TEMPLATE_FILES, GENERATION_FILE)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of `folder` that make up its tokenizer, required ones first; [] if it has none."""
    names = _kind(folder)
    names_to_copy = dict.fromkeys((*names, *(COMPANION_FILES if names else ())))
    return [folder / name for name in names_to_copy if (folder / name).is_file()]


def _kind(folder: Path) -> tuple[str, ...]:
    """The key of KINDS whose files a folder holds; () where it has none."""
    for names, make in KINDS.items():
        is_complete = all((folder / name).is_file() for name in names)
        if is_complete and (make is not ByT5Tokenizer or is_byt5(tokenizer_config(folder))):
            return names
    return ()


def chat_templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """Name -> Jinja text of the chat templates of a tokenizer; {} where it has none.

    The usual one is called `default`. As in transformers, chat_template.jinja goes before the
    entry of tokenizer_config.json: a text, a list of names and texts, or a mapping.

    files: name -> content of the tokenizer's files
    Raises ValueError for files that are damaged.
    """
    if CHAT_TEMPLATE_FILES[0] in files:
        return {"default": files[CHAT_TEMPLATE_FILES[0]].decode("utf-8")}
    for name in (OPTIONAL_FILES[1], CHAT_TEMPLATE_FILES[1]):
        raw = json.loads(files.get(name, b"{}"))
        templates = raw.get("chat_template") if isinstance(raw, dict) else None
        if isinstance(templates, str):
            return {"default": templates}
        if isinstance(templates, list):
            try:
                templates = {template["name"]: template["template"] for template in templates}
            except (KeyError, TypeError) as error:
                raise ValueError(f"the chat templates of {name} are damaged") from error
        if isinstance(templates, dict) and all(
            isinstance(text, str) for pair in templates.items() for text in pair
        ):
            return templates
        if templates is not None:
            raise ValueError(f"the chat templates of {name} are damaged")
    return {}


def special_tokens(files: Mapping[str, bytes]) -> dict[str, int | None]:
    """Special token -> its id, None if the files beside a tokenizer name it without an id.

    files: name -> content
    """
    result: dict[str, int | None] = {}
    for name in OPTIONAL_FILES:
        raw = json.loads(files.get(name, b"{}"))
        lists = (raw.get(f"{kind}_special_tokens") for kind in ("additional", "extra"))
        listed = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
        roles = [raw[role] for role in raw if role.endswith("_token")]
        for token in (*roles, *listed):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                result.setdefault(text, None)
        for number, token in (raw.get("added_tokens_decoder") or {}).items():
            if token.get("special"):
                result[str(token["content"])] = int(number)
    return result


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer whose files lie in `folder`.

    Raises TokenizerError when the folder holds none or holds a broken one.
    """
    folder = Path(folder)
    kind = _kind(folder)
    if not kind:
        names_present = (
            sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no folder"
        )
        choices = ", ".join(" + ".join(names) for names in KINDS)
        raise TokenizerError(f"no tokenizer in {folder}; got {names_present}; choices: {choices}")
    if KINDS[kind] in (SentencePieceTokenizer, GPT2Tokenizer):
        _reject_other_classes(folder, kind)
    try:
        return KINDS[kind](folder)
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer in {folder} needs a Python package that is not installed: {error.name}"
        ) from error
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise TokenizerError(f"cannot read the tokenizer in {folder}: {error}") from error


def _reject_other_classes(folder: Path, kind: tuple[str, ...]) -> None:
    """Raise TokenizerError where the files beside the main one change the ids of a text.

    The export makes a tokenizer.json of all of them.
    """
    config = tokenizer_config(folder)
    if config.get("tokenizer_class") or config.get("added_tokens_decoder"):
        raise TokenizerError(
            f"{folder}: {' + '.join(kind)} of a {tokenizer_class(config)} cannot be read without "
            "the "
            "files beside; choices: the folder of an export, which makes one tokenizer.json of all"
        )
