"""manifest.json: every file of a checkpoint with its size and digest.

The manifest is written last, so a folder that holds one is complete, and a loader can refuse a
file that is missing, short, long or altered.

The folder that an export writes, and the journal that an interrupted export continues from.

What an interrupted export leaves to the next one: its finished files, and a list of them.

The list lies in the partial folder. Its first line says what is being exported; every further line
is one finished file with its size and digest. A run that exports the same finds what is sound.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launcher_scripts.checkpoint.formats.archive import PARALLEL_BYTES, Crc32, memory_threads
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import open_appending, parse_json, read_plain

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
        FileEntry(name, path.stat().st_size, hash_file(path)).values()
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


def new_digest(algorithm: str = ALGORITHM, threads: int = 1) -> Digest:
    """Begin a digest; threads: that compute BLAKE3's of a large piece together."""
    if algorithm == "blake3" and threads > 1:
        parallel: Digest = blake3(max_threads=threads)
        return parallel
    return DIGESTS[algorithm]()


def stream_threads() -> int:
    """Return the number of threads for the digest of one file after the other.

    One on few processors: others that write need them, and its pieces stay in the second cache.
    """
    threads = memory_threads()
    return threads if threads > 2 else 1


def hash_file(path: Path, algorithm: str = ALGORITHM, threads: int = 1) -> str:
    """The digest of a file, read in pieces."""
    digest = new_digest(algorithm, threads)
    add_bytes([digest], path, 0, path.stat().st_size, threads)
    return digest.hexdigest()


def add_bytes(
    digests: Sequence[Digest], path: Path, first: int, last: int, threads: int = 1
) -> None:
    """Add the bytes [first, last) of a file, as many as it has, which are read once.

    threads: see new_digest; with more than one each of the digests has one of its own, too
    """
    size = min(_HASH_CHUNK if threads == 1 else PARALLEL_BYTES, max(last - first, 1))
    buffer = memoryview(bytearray(size))
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(len(digests)) as pool:
        file.seek(first)
        while size := file.readinto(buffer[: last - first]):
            first += size
            piece = buffer[:size]
            if threads == 1:
                for digest in digests:
                    digest.update(piece)
            else:
                list(pool.map(lambda digest, data=piece: digest.update(data), digests))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for _, file in _files_of(path)]
    return sum(file.stat().st_size for file in files)


def source_digest(path: Path) -> str:
    """`algorithm:digest` of a file or of all files of a folder.

    It is the digest of the lines that b3sum (or sha256sum) prints of the files, by their names.
    """
    files = [(path.name, path)] if path.is_file() else _files_of(path)
    threads = stream_threads() if len(files) == 1 else 1
    with ThreadPoolExecutor() as pool:
        result = pool.map(lambda entry: hash_file(entry[1], threads=threads), files)
        lines = [f"{digest}  {name}\n" for digest, (name, _) in zip(result, files, strict=True)]
    return f"{ALGORITHM}:{content_digest(''.join(lines).encode(), ALGORITHM)}"


def memory_digest(data: memoryview, algorithm: str) -> str:
    """The digest of memory; several threads compute BLAKE3's of much of it."""
    digest = new_digest(algorithm, memory_threads() if data.nbytes >= PARALLEL_BYTES else 1)
    digest.update(data)
    return digest.hexdigest()


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
            result = pool.map(lambda e, name: hash_file(folder / e.name, name), sound, names)
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file or folder the system did not take."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def partial_folder(folder: Path) -> Path:
    """The name of a checkpoint's folder until it is complete."""
    return folder.with_name(folder.name + ".partial")


def _old_folder(folder: Path) -> Path:
    """Return the path that a folder moves to when another one takes its name."""
    return folder.with_name(folder.name + ".old")


def reject_existing(folder: Path, overwrite: bool) -> None:
    """Raises CheckpointError when there is something at `folder` that may not be replaced.

    A link there, or under one of the names on the way, leads to files of somebody else.
    """
    reject_links(folder, partial_folder(folder), _old_folder(folder))
    with writing(folder):
        exists = folder.exists()
    if exists and not overwrite:
        raise CheckpointError(
            problem(
                "the output already exists",
                got=str(folder),
                change="export.model.overwrite to replace it",
            )
        )


def reject_links(*paths: Path) -> None:
    """Raises CheckpointError when one of the places to write to is a link."""
    links = [str(path) for path in paths if path.is_symlink()]
    if links:
        raise CheckpointError(
            problem(
                "an export would overwrite or delete what a link leads to; remove the link",
                got=links,
            )
        )


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def replace_folder(new: Path, target: Path) -> None:
    """Give `new` the name `target`; a folder that has the name is removed after the exchange."""
    old = _old_folder(target)
    shutil.rmtree(old, ignore_errors=True)
    with writing(target):
        if target.exists():
            target.rename(old)
        new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


JOURNAL_NAME = "journal.jsonl"


def identity(values: Mapping[str, Any], sources: Iterable[Path]) -> str:
    """A digest of what is exported: `values`, and the size and time of every source file."""
    stamps = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for source in sources
        for path in ([source] if source.is_file() else sorted(source.rglob("*")))
        if path.is_file()
    ]
    text = json.dumps([values, stamps], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class ExportJournal:
    """The list, open and locked: a second export into the same folder is refused."""

    def __init__(self, folder: Path, name: str) -> None:
        """Opens the list of `folder` (which exists); `name` is the identity of this export."""
        self.folder = folder
        self.name = name
        self._file = open_appending(folder / JOURNAL_NAME)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise CheckpointError(
                problem("another export is writing here", got=str(folder))
            ) from error

    def restart(self) -> dict[str, FileEntry]:
        """Files that an earlier run of the same export finished, by name; all others are removed.

        A file that is missing, short, long or altered is written again.
        """
        self._file.seek(0)
        entries = self._read(self._file.read().splitlines())
        sound = {}
        for entry in entries.values():
            problems = Problems(str(self.folder))
            check_files(self.folder, {entry.name: entry}, problems, digests=True)
            if not problems.messages and not (self.folder / entry.name).is_symlink():
                sound[entry.name] = entry
        for path in self.folder.iterdir():
            if path.name not in sound and path.name != JOURNAL_NAME:
                remove(path)
        self._file.truncate(0)
        self._write({"identity": self.name})
        for entry in sound.values():
            self.add(entry)
        return sound

    def add(self, entry: FileEntry) -> None:
        """Note a file that is complete."""
        self._write(entry.values())

    def close(self, *, remove: bool) -> None:
        """Give up the lock; with `remove` the list goes, too."""
        if remove:
            (self.folder / JOURNAL_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a line that a full disk did not take
            self._file.close()

    def _read(self, lines: list[str]) -> dict[str, FileEntry]:
        """The entries of an earlier run; none when it exported something else.

        The last line of a run that was killed may be cut short.
        """
        entries: dict[str, FileEntry] = {}
        try:
            if not lines or parse_json(lines[0]) != {"identity": self.name}:
                return {}
            for line in lines[1:]:
                entry = file_entry(parse_json(line))
                entries[entry.name] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            return entries
        return entries

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
