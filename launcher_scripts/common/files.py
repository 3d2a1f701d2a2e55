"""Files that appear complete, ready files of servers, and digests.

A server's ready file: its name among those of several servers, and how old its word is.

A server that is held back until a verdict has a candidate file in its place, which no client reads.

Reading files that a stranger may have made: what they declare is checked before it is believed.

A declared size must fit the file before memory is asked for, nesting and aliases have a limit, and
whatever is wrong is a ValueError of one line (an OSError where the file cannot be opened).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tarfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
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


def open_appending(path: Path) -> IO[str]:
    """Open a file for reading and appending; a link or a second name of it is an OSError."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file of this export", str(path))
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")


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


def atomic_write(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there; what stood there is replaced.

    Raises:
        OSError: it could not be written; what stood there still stands
    """
    partial = path.with_name(path.name + ".partial")
    # A link under that name would have its target overwritten.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


READY = "ready.json"
CANDIDATE = "ready.candidate.json"
# ready.json of a server alone, ready-0.json, ready-1.json, ... of replicas
READY_FILES = (READY, "ready-[0-9]*.json")
_PROMOTION = "promotion.json"
STALE_SECONDS = 60.0  # a server renews its file every few seconds


def replica_file(path: Path, replica: int | None) -> Path:
    """The file of one of several servers of the same run: ready-0.json, ready-1.json, ..."""
    return path if replica is None else path.with_name(f"{path.stem}-{replica}{path.suffix}")


def replica_files(path: Path, replicas: int) -> tuple[Path, ...]:
    """The files of all `replicas` servers; 0: of the only one."""
    if not replicas:
        return (path,)
    return tuple(replica_file(path, number) for number in range(replicas))


def ready_paths(position: Path) -> list[Path]:
    """Returns the ready files of a position: the file itself, or those in the folder."""
    if not position.is_dir():
        return [position]
    # Path.glob may hide that it cannot look.
    return sorted(p for p in position.iterdir() if any(fnmatch(p.name, n) for n in READY_FILES))


def has_servers(positions: Iterable[Path]) -> bool:
    """Returns False if no ready file is of a server that may live; True where nobody can look."""
    try:
        paths = [path for index in positions for path in ready_paths(index) if path.exists()]
        ages = [seconds_silent(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    except (OSError, ValueError, TypeError, AttributeError):
        return True
    return any(age is None or age <= STALE_SECONDS for age in ages)


def request_publication(job_folder: Path) -> None:
    """Tell every server of the job, also one that is started again, to have a ready file."""
    requested_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    atomic_write(job_folder / _PROMOTION, f'{{"asked_at": "{requested_at}"}}\n')


def may_publish(job_folder: Path) -> bool:
    """Return whether ask_to_publish was called for the job."""
    return (job_folder / _PROMOTION).exists()


def seconds_silent(ready: Mapping[str, Any]) -> float | None:
    """Seconds since the server said that it lives; None for a file that does not say.

    Raises ValueError for a time that is none.
    """
    alive_at = ready.get("alive_at")
    if alive_at is None:
        return None
    return (datetime.now(timezone.utc) - datetime.fromisoformat(alive_at)).total_seconds()


_BYTES = 32
_PIECE = 1 << 20
_SHORT = 12
MANIFEST = "manifest.json"
SOURCE_DIGESTS = "digests"  # of a manifest's `source`: checkpoint -> digest
CHAIN = ("system_fingerprint", "manifest", "source")  # of DigestChain.values()


@dataclass(frozen=True)
class DigestChain:
    """From the checkpoints that were exported to the shards that are served.

    manifest: the digest of manifest.json, which has the digest of every shard
    source:   checkpoint -> its digest, as the manifest records it; {}: it records none
    version:  a trainer's name of weights that were never exported; `manifest` is the digest of
              their files' names, sizes and times then
    """

    manifest: str
    source: Mapping[str, str]
    version: str = ""

    @classmethod
    def of(cls, folder: Path) -> DigestChain:
        """The chain of exported shards. Raises OSError or ValueError without a manifest."""
        path = folder / MANIFEST
        values = parse_json(read_plain(path))
        raw = values.get("source") if isinstance(values, dict) else None
        digests = raw.get(SOURCE_DIGESTS) if isinstance(raw, dict) else None
        source = digests if isinstance(digests, dict) else {}
        named = {Path(checkpoint).name: str(digest) for checkpoint, digest in source.items()}
        return cls(file_digest(path), named)

    @property
    def fingerprint(self) -> str:
        """`fp_MANIFEST`, or `fp_MANIFEST_SOURCE`: what responses have as system_fingerprint."""
        source = [value_digest(dict(self.source))[:_SHORT]] if self.source else []
        return "_".join(["fp", self.manifest[:_SHORT], *source])

    def values(self) -> dict[str, Any]:
        """Plain values for reports and for /version."""
        return {
            "system_fingerprint": self.fingerprint,
            "manifest": self.manifest,
            "source": dict(self.source),
            **({"weights_version": self.version} if self.version else {}),
        }


def file_digest(path: Path) -> str:
    """Return the output of `b2sum -l 256` for the file, in hexadecimal. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def value_digest(value: Any) -> str:
    """Return the digest of a plain value, whatever the order of its keys, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).hexdigest()


def block_digests(ids: Sequence[int], size: int, digest: bytes) -> Iterator[bytes]:
    """Iterate over the digests of full blocks of `size` ids, each over the block and the digest
    before: it identifies everything up to the end of its block.

    digest: of what stands before the ids
    """
    for first in range(0, len(ids) - size + 1, size):
        block = array("q", ids[first : first + size])
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=_BYTES).digest()
        yield digest
