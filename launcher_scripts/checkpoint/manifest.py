"""manifest.json: every file of a checkpoint with its size and digest.

The manifest is written last, so a folder that holds one is complete, and a loader can refuse a
file that is missing, short, long or altered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.errors import CheckpointError, Problems, problem

FILE_NAME = "manifest.json"
FORMAT = "fastertransformer-checkpoint"
VERSION = 1
TOOL_NAME = "nemo-deployment-launcher"
TOOL_VERSION = "0.1.0"

_HASH_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file: its name in the folder, bytes and sha256; shape and dtype for a weight."""

    name: str
    bytes: int
    sha256: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Manifest:
    """All files of one checkpoint folder but the manifest itself.

    source: where the weights came from, as plain values (path, format, ...)
    """

    model_type: str
    tp_size: int
    weight_data_type: str
    files: tuple[FileEntry, ...]
    source: Mapping[str, Any] = field(default_factory=dict)
    tool: Mapping[str, str] = field(
        default_factory=lambda: {"name": TOOL_NAME, "version": TOOL_VERSION}
    )

    @property
    def entries(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json; files are listed by name."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        values["files"] = [
            {key: value for key, value in asdict(entry).items() if value is not None}
            for entry in sorted(self.files, key=lambda entry: entry.name)
        ]
        text = json.dumps(values, indent=1) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`, None where it has none; a damaged one is a CheckpointError."""
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if (values.pop("format"), values.pop("version")) != (FORMAT, VERSION):
            raise CheckpointError(
                problem(f"{path} has another format", choices=[f"{FORMAT} {VERSION}"])
            )
        values["files"] = tuple(file_entry(entry) for entry in values["files"])
        return Manifest(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def file_digest(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def check_files(
    folder: Path, entries: Mapping[str, FileEntry], problems: Problems, *, digests: bool
) -> None:
    """Note every file that is missing, short, long or (with `digests`) altered."""
    sound = []
    for entry in entries.values():
        path = folder / entry.name
        if check_size(path, entry.bytes, problems):
            sound.append(entry)
    if digests:
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda entry: file_digest(folder / entry.name), sound)
            for entry, digest in zip(sound, found, strict=True):
                if digest != entry.sha256:
                    problems.add(f"{entry.name} is altered", got=digest, choices=[entry.sha256])


def check_size(path: Path, size: int, problems: Problems) -> bool:
    """Whether `path` is a file of `size` bytes; a problem is noted when not."""
    if not path.is_file():
        problems.add(f"{path.name} is missing")
        return False
    got = path.stat().st_size
    if got != size:
        word = "short" if got < size else "long"
        problems.add(f"{path.name} is too {word}", got=f"{got} bytes", choices=[f"{size} bytes"])
    return got == size


def file_entry(values: Mapping[str, Any]) -> FileEntry:
    """An entry from its JSON form."""
    shape = values.get("shape")
    return FileEntry(**{**values, "shape": None if shape is None else tuple(shape)})
