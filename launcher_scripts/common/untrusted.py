"""Reading files that a stranger may have made: what they declare is checked before it is believed.

A declared size must fit the file before memory is asked for, nesting and aliases have a limit, and
whatever is wrong is a ValueError of one line (an OSError where the file cannot be opened).
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import yaml

# The largest configurations of models have some 100 KB and a few thousand values.
MAX_YAML_BYTES = 4 << 20
_MAX_VALUES = 1 << 18
# A member's name and attributes, where they do not fit the 512 bytes of its own header.
_MAX_HEADER_BYTES = 1 << 13
# A distributed checkpoint has up to some 100,000 files.
_MAX_MEMBERS = 1 << 18
_LONG_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a pipe, a device or a folder is an OSError.

    Opening a pipe by its name would wait until somebody writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path) -> bytes:
    """The content of a regular file; see open_plain."""
    with open_plain(path) as file:
        return file.read()


def parse_json(text: bytes | str) -> Any:
    """The value in a JSON text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def mapping(value: Any) -> dict[str, Any]:
    """A parsed value that must be a mapping; a ValueError for any other."""
    if not isinstance(value, dict):
        raise ValueError("it holds no mapping")
    return value


def parse_yaml(text: bytes) -> Any:
    """The value in a YAML text of plain values."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"it has {len(text)} bytes, more than {MAX_YAML_BYTES}")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _expanded(node, {}) > _MAX_VALUES:
                raise ValueError(f"its aliases stand for more than {_MAX_VALUES} values")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node when every alias is written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = _MAX_VALUES + 1  # of a node that contains itself
        children = (
            [part for pair in node.value for part in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        sizes[id(node)] = 1 + sum(_expanded(child, sizes) for child in children)
    return sizes[id(node)]


class _Member(tarfile.TarInfo):
    """A member of an archive whose headers have plausible sizes."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        limit = _MAX_HEADER_BYTES if self.type in _LONG_HEADERS else None
        if self.size < 0 or (limit is not None and self.size > limit):
            raise tarfile.HeaderError(f"a header says that {self.size} bytes follow")
        result: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return result


@contextmanager
def _tar_errors() -> Iterator[None]:
    """tarfile lets the errors of everything below it through."""
    try:
        yield
    except RecursionError as error:
        raise ValueError("its headers are nested too deeply") from error
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def open_tar(file: IO[bytes], mode: Literal["r:", "r:*"] = "r:") -> tarfile.TarFile:
    """A tar archive, whose headers ask for little memory. Raises ValueError."""
    with _tar_errors():
        return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member)


def tar_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive from open_tar, each behind the one before. Raises ValueError."""
    end = 0
    with _tar_errors():
        for count, member in enumerate(archive):
            if count >= _MAX_MEMBERS:
                raise ValueError(f"it has more than {_MAX_MEMBERS} members")
            if member.size < 0 or member.offset_data <= end:
                raise ValueError("its members do not follow each other")
            end = member.offset_data
            yield member
