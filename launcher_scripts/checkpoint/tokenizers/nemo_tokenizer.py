"""Files of a checkpoint's tokenizer; of NeMo's, by its model_config.yaml."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from launcher_scripts.checkpoint.formats.nemo_config import folders, read_config, section
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import open_plain, open_tar, parse_json, read_plain, tar_members
from launcher_scripts.common.tokenizer import (
    CHAT_TEMPLATE_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    is_byt5,
)

KEY = "export.model.tokenizer"
ADVICE = f"{KEY}: name the files (model, or vocab_file and merge_file), or none"

# Key of model_config.yaml and of the settings -> stem of the exported file, and what the file is
# usually called.
ROLES = {
    "model": ("tokenizer", "*.model"),
    "vocab_file": ("vocab", "*vocab*"),
    "merge_file": ("merges", "*merge*.txt"),
}
# Further keys of section `tokenizer` that may name an artifact, as `nemo:<name>` -> exported file.
COMPANIONS = {
    "tokenizer_config": OPTIONAL_FILES[1],
    "chat_template": CHAT_TEMPLATE_FILES[0],
    "generation_config": GENERATION_FILE,
}
ARTIFACT = "nemo:"
# Name in a folder of another tool -> exported name, best set first. The last one is an mBART's,
# whose ids follow from it; XGLM's file of that name has other ids than the model.
SOURCE_SETS: tuple[Mapping[str, str], ...] = (
    {"tokenizer.json": "tokenizer.json"},
    {"spiece.model": "tokenizer.model"},
    {"tokenizer.model": "tokenizer.model"},
    {"vocab.json": "vocab.json", "merges.txt": "merges.txt"},
    {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"},
    {"vocab.json": "vocab.json", "source.spm": "source.spm"},
    {"vocab.json": "vocab.json", "sentencepiece.bpe.model": "sentencepiece.bpe.model"},
    {"sentencepiece.bpe.model": "sentencepiece.bpe.model"},
)
# What only folders of transformers and of Megatron-LM and its kin hold, and what is in one of the
# latter or below.
_INDICATORS = ("config.json", "latest_checkpointed_iteration.txt")
_INNER_INDICATORS = (_INDICATORS[1], ".metadata", "model_optim_rng.pt")
# What lies behind so much of a compressed archive is left to the conversion.
_MAX_DECOMPRESSED_BYTES = 2**30
Match = TypeVar("Match")


def named_files(
    config: Mapping[str, Any], origin: Path, find: Callable[[str, str], Match | None]
) -> dict[str, Match]:
    """Role -> what `find` gives for the file that section `tokenizer` names.

    config: model_config.yaml
    origin: the checkpoint, for errors
    find:   (value, what such a file is usually called) -> the file; None where it is not there
    Raises CheckpointError where a file is lost, or none is named.
    """
    settings = section(config, "tokenizer")
    values = {role: settings.get(role) for role in ROLES}
    named = {role: value for role, value in values.items() if isinstance(value, str) and value}
    files = {role: find(value, ROLES[role][1]) for role, value in named.items()}
    lost = [value for role, value in named.items() if files[role] is None]
    if lost or not named:
        kind = settings.get("type") or settings.get("library") or "unknown"
        raise CheckpointError(
            problem(
                f"{origin} does not hold its tokenizer's files ({kind})",
                got=lost or "no file is named",
                change=ADVICE,
            )
        )
    return {role: file for role, file in files.items() if file is not None}


def find_name(names: Iterable[str], value: str, pattern: str) -> str | None:
    """The name meant by `value` among those beside model_config.yaml; a lost one by its kind."""
    base = PurePosixPath(value.removeprefix(ARTIFACT)).name
    top_level = [name for name in names if "/" not in name]
    for glob in (base, f"*_{base}", pattern):
        matching = [name for name in top_level if fnmatch.fnmatchcase(name, glob)]
        if len(matching) == 1:
            return matching[0]
    return None


def check_tokenizer(path: Path) -> None:
    """Raises CheckpointError when a checkpoint lacks its tokenizer's files: a .nemo file, an
    unpacked one, or a folder of transformers or Megatron-LM."""
    result = None
    if not any((path / mark).is_file() for mark in _INDICATORS):
        result = read_config(path)
        if result is None and not _is_megatrons(path):
            return
    if result is None:
        if not any(_is_complete(path / folder) for folder in folders(path)):
            raise CheckpointError(no_tokenizer(path, SOURCE_SETS))
        return
    root, config = result
    names = _names(path, root)
    if names is not None:
        named_files(config, path, lambda value, pattern: find_name(names, value, pattern))


def no_tokenizer(path: Path, sets: Iterable[Iterable[str]], foreign: Sequence[str] = ()) -> str:
    """Say that a checkpoint has no tokenizer, and where its files may come from.

    sets: names of files that are one together;  foreign: files of forms that are not read
    """
    suffix = f"; {', '.join(foreign)} must be converted first" if foreign else ""
    return problem(
        f"{path} holds no tokenizer{suffix}; put the files of one of these sets into that folder",
        choices=[" + ".join(names) for names in sets],
        change=ADVICE,
    )


def _is_megatrons(path: Path) -> bool:
    """True if a folder, or one within it, is a checkpoint of Megatron-LM or its kin."""
    return path.is_dir() and any(
        (path / folder / mark).is_file() for folder in folders(path) for mark in _INNER_INDICATORS
    )


def _is_complete(folder: Path) -> bool:
    if any(all((folder / name).is_file() for name in names) for names in SOURCE_SETS):
        return True
    configs = (folder / name for name in (_INDICATORS[0], OPTIONAL_FILES[1]))
    return (folder / OPTIONAL_FILES[1]).is_file() and is_byt5(
        *(values for path in configs if isinstance(values := _json_of(path), dict))
    )


def _json_of(path: Path) -> Any:
    try:
        return parse_json(read_plain(path))
    except (OSError, ValueError):
        return None


def _names(path: Path, root: str) -> list[str] | None:
    """The names in folder `root` of a checkpoint; None where finding them would take long."""
    if path.is_dir():
        return [entry.name for entry in (path / root).iterdir()]
    try:
        with open_plain(path) as file, open_tar(file, "r:*") as archive:
            compressed = archive.fileobj is not file
            names = []
            for member in tar_members(archive):
                name = str(PurePosixPath(member.name))
                if name.startswith(root):
                    names.append(name.removeprefix(root))
                if compressed and archive.offset > _MAX_DECOMPRESSED_BYTES:
                    return None
            return names
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
