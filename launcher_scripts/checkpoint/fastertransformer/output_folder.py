"""The folder that an export writes, and the journal that an interrupted export continues from.

What an interrupted export leaves to the next one: its finished files, and a list of them.

The list lies in the partial folder. Its first line says what is being exported; every further line
is one finished file with its size and digest. A run that exports the same finds what is sound.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from launcher_scripts.checkpoint.fastertransformer.manifest import (
    FileEntry,
    check_files,
    file_entry,
)
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.untrusted import parse_json


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


FILE_NAME = "journal.jsonl"


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


def _opened(path: Path) -> IO[str]:
    """The list, for reading and appending; never another file that a link makes of it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file of this export", str(path))
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")


class Journal:
    """The list, open and locked: a second export into the same folder is refused."""

    def __init__(self, folder: Path, name: str) -> None:
        """Opens the list of `folder` (which exists); `name` is the identity of this export."""
        self.folder = folder
        self.name = name
        self._file = _opened(folder / FILE_NAME)
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
            if path.name not in sound and path.name != FILE_NAME:
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
            (self.folder / FILE_NAME).unlink(missing_ok=True)
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
