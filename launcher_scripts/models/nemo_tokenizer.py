"""Which files are the tokenizer of a NeMo checkpoint, by what its model_config.yaml says."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from launcher_scripts.errors import CheckpointError, problem
from launcher_scripts.models.nemo_config import read_config
from launcher_scripts.untrusted import open_plain, open_tar, tar_members

KEY = "export.model.tokenizer"
ADVICE = f"{KEY}: name the files (model, or vocab_file and merge_file), or none"

# Key of model_config.yaml and of the settings -> stem of the exported file, and what the file is
# usually called.
ROLES = {
    "model": ("tokenizer", "*.model"),
    "vocab_file": ("vocab", "*vocab*"),
    "merge_file": ("merges", "*merge*.txt"),
}
# What lies behind so much of a compressed archive is left to the conversion.
_MOST_DECOMPRESSED_BYTES = 2**30
Found = TypeVar("Found")


def named_files(
    config: Mapping[str, Any], origin: Path, find: Callable[[str, str], Found | None]
) -> dict[str, Found]:
    """Role -> what `find` gives for the file that section `tokenizer` names.

    config: model_config.yaml
    origin: the checkpoint, for errors
    find:   (value, what such a file is usually called) -> the file; None where it is not there
    Raises CheckpointError where a file is lost, or none is named.
    """
    section = config.get("tokenizer")
    if not isinstance(section, dict):
        section = {}
    values = {role: section.get(role) for role in ROLES}
    named = {role: value for role, value in values.items() if isinstance(value, str) and value}
    files = {role: find(value, ROLES[role][1]) for role, value in named.items()}
    lost = [value for role, value in named.items() if files[role] is None]
    if lost or not named:
        kind = section.get("type") or section.get("library") or "unknown"
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
    base = PurePosixPath(value.removeprefix("nemo:")).name
    beside = [name for name in names if "/" not in name]
    for wanted in (base, f"*_{base}", pattern):
        found = [name for name in beside if fnmatch.fnmatchcase(name, wanted)]
        if len(found) == 1:
            return found[0]
    return None


def check_tokenizer(path: Path) -> None:
    """Raises CheckpointError when a .nemo file or an unpacked one lacks its tokenizer's files."""
    config = read_config(path)
    if config is not None and (names := _names(path)) is not None:
        named_files(config, path, lambda value, pattern: find_name(names, value, pattern))


def _names(path: Path) -> list[str] | None:
    """The names in a checkpoint; None where finding them would take long."""
    if path.is_dir():
        return [entry.name for entry in path.iterdir()]
    try:
        with open_plain(path) as file, open_tar(file, "r:*") as archive:
            compressed = archive.fileobj is not file
            names = []
            for member in tar_members(archive):
                names.append(member.name.removeprefix("./"))
                if compressed and archive.offset > _MOST_DECOMPRESSED_BYTES:
                    return None
            return names
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
