"""manifest.json: every file of a checkpoint with its size and digest.

The manifest is written last, so a folder that holds one is complete, and a loader can refuse a
file that is missing, short, long or altered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launcher_scripts.checkpoint.formats.archive import crc32
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.untrusted import parse_json, read_plain

FILE_NAME = "manifest.json"
FORMAT = "fastertransformer-checkpoint"
HUGGINGFACE_FORMAT = "huggingface-checkpoint"
FORMATS = (FORMAT, HUGGINGFACE_FORMAT)
LIST_FORMAT = "files"
VERSION = 3
# Version 1 knew sha256 alone; version 2 had no CRC-32 beside BLAKE3.
VERSIONS = (1, 2, 3)
TOOL_NAME = "nemo-deployment-launcher"
TOOL_VERSION = "0.1.0"

# Fits the second cache, so that a second digest finds it there.
_HASH_CHUNK = 1 << 19
_FILE_NAME = re.compile(r"[^/\0]{1,255}", re.DOTALL)


class Digest(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class Crc32:
    """The CRC-32 of a file, of the form of a digest."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


# What makes a digest. BLAKE3 takes 0.16 s per GB of a processor with wide vectors, sha256 with the
# instructions made for it 0.56 s.
DIGESTS: dict[str, Callable[[], Digest]] = {"sha256": hashlib.sha256, "crc32": Crc32}
with suppress(ImportError):
    from blake3 import blake3

    DIGESTS["blake3"] = blake3
# Of small files; every Python can compare it.
SMALL = "sha256"
# Of weights, beside their CRC-32.
ALGORITHM = "blake3" if "blake3" in DIGESTS else SMALL
ALGORITHMS = ("blake3", "sha256")


@dataclass(frozen=True)
class FileEntry:
    """One file: its name in the folder, bytes and digest; shape and dtype for a weight.

    algorithm: one of ALGORITHMS
    crc32:     what is compared where the package of `algorithm` is missing
    fixed:     of a file that may be edited, the digest of what must stay
    """

    name: str
    bytes: int
    digest: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    algorithm: str = ALGORITHM
    crc32: str | None = None
    fixed: str | None = None

    @property
    def comparable(self) -> tuple[str, str]:
        """(name in DIGESTS, digest) of what this Python can compare.

        Raises CheckpointError where the file has nothing of the kind.
        """
        if self.algorithm in DIGESTS:
            return self.algorithm, self.digest
        if self.crc32 is not None:
            return "crc32", self.crc32
        message = f"the digest of {self.name} needs the package {self.algorithm}, which is missing"
        change = "the Python packages (docs/containers.md), or export the checkpoint again"
        raise CheckpointError(problem(message, change=change))

    def values(self) -> dict[str, Any]:
        """The JSON form: the digest stands under the name of its algorithm."""
        values = {"name": self.name, "bytes": self.bytes, self.algorithm: self.digest}
        if self.shape is not None:
            values["shape"] = list(self.shape)
        if self.dtype is not None:
            values["dtype"] = self.dtype
        if self.crc32 is not None:
            values["crc32"] = self.crc32
        if self.fixed is not None:
            values["fixed"] = self.fixed
        return values


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
    format: str = FORMAT

    @property
    def entries(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json, a line per file, by name."""
        head = {"format": self.format, "version": VERSION, "model_type": self.model_type}
        head |= {"tp_size": self.tp_size, "weight_data_type": self.weight_data_type}
        files = sorted(self.files, key=lambda entry: entry.name)
        lines = ",\n  ".join(json.dumps(entry.values()) for entry in files)
        parts = [json.dumps(head)[1:-1], f'"files": [\n  {lines}\n ]']
        parts += [f'"{key}": {json.dumps(getattr(self, key))}' for key in ("source", "tool")]
        text = "{\n " + ",\n ".join(parts) + "\n}\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`, None where it has none; a damaged one is a CheckpointError."""
    path = folder / FILE_NAME
    try:
        values = parse_json(read_plain(path))
        header = (values.pop("format"), values.pop("version"))
        supported = [(name, version) for name in FORMATS for version in VERSIONS]
        if header not in supported:
            raise CheckpointError(
                problem(
                    f"{path} has another format",
                    got=" ".join(map(str, header)),
                    choices=[f"{name} {version}" for name, version in supported],
                )
            )
        values["files"] = tuple(file_entry(entry) for entry in values["files"])
        if not isinstance(values.get("source", {}), dict):
            raise ValueError("its source is not a mapping")
        return Manifest(**values, format=header[0])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_file_list(folder: Path) -> None:
    """List the files of a folder that is not a checkpoint in a manifest of its own."""
    entries = [
        FileEntry(name, path.stat().st_size, file_digest(path)).values()
        for name, path in _files_of(folder)
    ]
    values = {"format": LIST_FORMAT, "version": VERSION, "files": entries}
    (folder / FILE_NAME).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def check_file_list(folder: Path, problems: Problems) -> None:
    """Note every file of `folder` that is not as write_file_list found it, or came later."""
    path = folder / FILE_NAME
    try:
        values = parse_json(read_plain(path))
        if (values["format"], values["version"]) != (LIST_FORMAT, VERSION):
            raise ValueError(f"it is no {LIST_FORMAT} {VERSION}")
        entries = {entry.name: entry for entry in map(file_entry, values["files"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.add(f"cannot read {path}: {error}")
        return
    result = Problems(str(folder))
    check_files(folder, entries, result, digests=True)
    for name, _ in _files_of(folder):
        if name not in {*entries, FILE_NAME}:
            result.add(f"{name} is not in the manifest")
    problems.messages += [f"{folder}: {message}" for message in result.messages]


def _files_of(folder: Path) -> list[tuple[str, Path]]:
    """Name in `folder` and path of all files there, but for what Python compiles."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    named = ((path.relative_to(folder), path) for path in files)
    return [(name.as_posix(), path) for name, path in named if "__pycache__" not in name.parts]


def file_digest(path: Path, algorithm: str = ALGORITHM) -> str:
    """The digest of a file, read in pieces."""
    digest = DIGESTS[algorithm]()
    add_bytes([digest], path, 0, path.stat().st_size)
    return digest.hexdigest()


def add_bytes(digests: Sequence[Digest], path: Path, first: int, last: int) -> None:
    """Add the bytes [first, last) of a file, as many as it has, which are read once."""
    piece = memoryview(bytearray(_HASH_CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        while size := file.readinto(piece[: last - first]):
            first += size
            for digest in digests:
                digest.update(piece[:size])


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for _, file in _files_of(path)]
    return sum(file.stat().st_size for file in files)


def source_digest(path: Path) -> str:
    """`algorithm:digest` of a file or of all files of a folder.

    It is the digest of the lines that b3sum (or sha256sum) prints of the files, by their names.
    """
    files = [(path.name, path)] if path.is_file() else _files_of(path)
    with ThreadPoolExecutor() as pool:
        result = pool.map(lambda entry: file_digest(entry[1]), files)
        lines = [f"{digest}  {name}\n" for digest, (name, _) in zip(result, files, strict=True)]
    return f"{ALGORITHM}:{content_digest(''.join(lines).encode(), ALGORITHM)}"


def content_digest(content: bytes, algorithm: str = SMALL) -> str:
    digest = DIGESTS[algorithm]()
    digest.update(content)
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
            expected = [entry.comparable for entry in sound]
            names = [name for name, _ in expected]
            result = pool.map(lambda e, name: file_digest(folder / e.name, name), sound, names)
            for entry, (_, right), digest in zip(sound, expected, result, strict=True):
                if digest != right:
                    problems.add(f"{entry.name} is altered", got=digest, choices=[right])


def check_size(path: Path, size: int, problems: Problems) -> bool:
    """Return whether `path` is a file of `size` bytes; a problem is noted when not."""
    if not path.is_file():
        problems.add(f"{path.name} is missing")
        return False
    got = path.stat().st_size
    if got != size:
        word = "short" if got < size else "long"
        problems.add(f"{path.name} is too {word}", got=f"{got} bytes", choices=[f"{size} bytes"])
    return got == size


def file_entry(values: Mapping[str, Any]) -> FileEntry:
    """An entry from its JSON form; a KeyError or ValueError where that is damaged."""
    algorithms = [name for name in ALGORITHMS if name in values]
    if len(algorithms) != 1:
        raise ValueError(f"{values['name']} has no digest of {', '.join(ALGORITHMS)}")
    (algorithm,) = algorithms
    remaining = {key: value for key, value in values.items() if key != algorithm}
    name, size = remaining["name"], remaining["bytes"]
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(_FILE_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a name of a file in the folder")
    if type(size) is not int or size < 0:
        raise ValueError(f"{name} has no number of bytes, but {size!r}")
    shape = remaining.pop("shape", None)
    return FileEntry(
        **remaining,
        digest=values[algorithm],
        algorithm=algorithm,
        shape=None if shape is None else tuple(shape),
    )
