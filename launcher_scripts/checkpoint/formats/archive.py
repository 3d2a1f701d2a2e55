"""A checkpoint's files, read in place: a tar archive, a gzipped one, or an unpacked folder.

Nothing is extracted. A plain tar is mapped into memory and its members are views of it; a gzipped
one is decompressed once into an unnamed temporary file, which vanishes with the process. A single
GGUF file, or a config.ini, stands for itself. Whatever could make a reader leave the archive, or
could mean two things, is refused: links, devices, absolute names, `..`, two members of one name.

Checksums that a file holds of its own parts, compared before what they cover is used.

torch.save notes the CRC-32 of every storage. Comparing it costs a pass over bytes that are about
to be read anyway: 0.03 s per GB with zlib-ng's vectors, 0.24 s where only zlib itself is there.
"""

from __future__ import annotations

import bisect
import gzip
import mmap
import os
import tarfile
import tempfile
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.common.files import open_plain, open_tar, tar_members

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

PARALLEL_BYTES = 1 << 24  # fewer are copied, and get their digest, by one thread
_MAX_THREADS = 8


def memory_threads() -> int:
    """Return the number of threads that copy or digest much memory together."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class Crc32:
    """The CRC-32 of a file, of the form of a digest."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


@dataclass(frozen=True, order=True)
class Checksum:
    """The CRC-32 of `size` bytes from `start` of a file; origin names them in errors."""

    start: int
    size: int
    crc: int
    origin: str


@dataclass
class Checksums:
    """Checksums of one mapped file. Every part is compared once, when it is first asked for.

    path: the file, for errors
    Parts are added before threads ask.
    """

    buffer: mmap.mmap
    path: Path
    _parts: list[Checksum] = field(default_factory=list)
    _sound: set[Checksum] = field(default_factory=set)

    def check_size(self, last: int) -> None:
        """Raise CheckpointError if the file has become shorter than `last` bytes."""
        size = self.buffer.size() if last else 0  # an empty file has no mapping
        if size < last:
            raise CheckpointError(
                problem(
                    f"{self.path} became shorter while it was read",
                    got=f"{size} bytes",
                    choices=[f"at least {last} bytes"],
                )
            )

    def add(self, part: Checksum) -> None:
        at = bisect.bisect_left(self._parts, part)
        if part.size and self._parts[at : at + 1] != [part]:
            self._parts.insert(at, part)

    def check(self, first: int, last: int, message: str) -> None:
        """Compare all parts that have bytes in [first, last); `message` lies there, for the error.

        Raises CheckpointError when the bytes are not those that were written.
        """
        at = bisect.bisect_left(self._parts, last, key=lambda part: part.start)
        while at > 0:
            at -= 1
            part = self._parts[at]
            if part.start + part.size <= first:
                return
            if part not in self._sound:
                self._compare(part, message)
                self._sound.add(part)

    def _compare(self, part: Checksum, message: str) -> None:
        with (
            memoryview(self.buffer) as data_view,
            data_view[part.start : part.start + part.size] as data,
        ):
            checksum = crc32(data)
        if checksum != part.crc:
            raise CheckpointError(
                problem(
                    f"{part.origin} is damaged: the bytes of {message} have another CRC-32",
                    got=f"{checksum:08x}",
                    choices=[f"{part.crc:08x}"],
                )
            )


_BLOCK = 512
_GZIP_MAGIC = b"\x1f\x8b"
GGUF_MAGIC = b"GGUF"
INI_SUFFIX = ".ini"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Region:
    """Bytes of a mapped file: where they are, the mapping, and what is known of its content."""

    buffer: mmap.mmap
    offset: int
    size: int
    checksums: Checksums

    def part(self, offset: int, size: int) -> Region:
        """A part, its bounds checked."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CheckpointError(
                problem("data lies outside of its file", got=(offset, size), choices=[self.size])
            )
        return Region(self.buffer, self.offset + offset, size, self.checksums)

    def bytes(self) -> bytes:
        self.checksums.check_size(self.offset + self.size)
        return self.buffer[self.offset : self.offset + self.size]

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """`count` items as a read-only view of the file, shape [count]."""
        self.part(0, count * dtype.itemsize)
        return np.frombuffer(self.buffer, dtype, count, self.offset)


@dataclass(frozen=True)
class _Mapping:
    """A mapped file: its address in memory, and its checksums."""

    first: int
    last: int
    checksums: Checksums

    @classmethod
    def of(cls, checksums: Checksums) -> _Mapping:
        values = np.frombuffer(checksums.buffer, np.uint8)
        first = values.__array_interface__["data"][0]
        return cls(first, first + values.size, checksums)


class Archive:
    """The regular files of a checkpoint by name, `/` between folders, no leading `./`."""

    def __init__(self, path: Path, scratch: Path | None = None) -> None:
        """Open `path`; `scratch` is where a gzipped archive is decompressed (default: TMPDIR).

        Raises CheckpointError for what is not an archive, is damaged or cut short, or is refused.
        """
        self.path = Path(path)
        if self.path.is_dir():
            self.container = "folder"
            self._files = dict(_folder_files(self.path))
            self._members: dict[str, Region] = {}
            self._mappings: list[_Mapping] = []  # by address
            return
        self._files = {}
        with _opened(self.path) as file:
            start = file.read(4)
            if start == GGUF_MAGIC or self.path.suffix == INI_SUFFIX:
                self.container = "gguf" if start == GGUF_MAGIC else INI_SUFFIX
                self._files = {self.path.name: self.path}
                self._members = {}
            elif start.startswith(_GZIP_MAGIC):
                self.container = "tar.gz"
                with _decompressed(self.path, scratch) as plain:
                    self._members = _tar_members(self.path, plain)
            else:
                self.container = "tar"
                self._members = _tar_members(self.path, file)
        self._mappings = [_Mapping.of(r.checksums) for r in list(self._members.values())[:1]]

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted({*self._members, *self._files})

    def region(self, name: str) -> Region:
        """The content of one file, mapped."""
        if name not in self._members:
            if name not in self._files:
                raise CheckpointError(problem(f"{self.path} has no such file", got=name))
            with _opened(self._files[name]) as file:
                self._members[name] = _mapped(file, self._files[name])
            insort(
                self._mappings,
                _Mapping.of(self._members[name].checksums),
                key=attrgetter("first"),
            )
        return self._members[name]

    def read(self, name: str) -> bytes:
        """The content of one (small) file."""
        return self.region(name).bytes()

    def check(self, values: NDArray[Any], message: str) -> None:
        """Compare the bytes of a view with the checksum that its file holds of them, if any.

        message: the tensor, for the error

        Raises CheckpointError if they were altered after the file was written, or are cut off.
        """
        location = self._location(values)
        if location is not None:
            checksums, first, last = location
            checksums.check_size(last)
            checksums.check(first, last, message)

    def check_size(self, values: NDArray[Any]) -> None:
        """Raise CheckpointError if the file has become shorter than the end of a view.

        The end of its last page reads as zeros, so this is also called after the values were read.
        """
        location = self._location(values)
        if location is not None:
            location[0].check_size(location[2])

    def forget(self, values: NDArray[Any]) -> None:
        """Let the system take the pages behind a view back; a later look reads them again."""
        location = self._location(values)
        if location is not None:
            checksums, first, last = location
            low = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            high = last // mmap.PAGESIZE * mmap.PAGESIZE
            if low < high:
                checksums.buffer.madvise(mmap.MADV_DONTNEED, low, high - low)

    def _location(self, values: NDArray[Any]) -> tuple[Checksums, int, int] | None:
        """The file a view lies in, its first byte and the one behind its last; None for others."""
        first = values.__array_interface__["data"][0]
        spans = zip(values.shape, values.strides, strict=True)
        last = first + sum((n - 1) * step for n, step in spans) + values.itemsize
        at = bisect_right(self._mappings, first, key=attrgetter("first")) - 1
        if at < 0 or not values.size or last > self._mappings[at].last:
            return None
        mapping = self._mappings[at]
        return mapping.checksums, first - mapping.first, last - mapping.first


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_plain(path)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}") from error


def _mapped(file: IO[bytes], path: Path) -> Region:
    size = os.fstat(file.fileno()).st_size
    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else mmap.mmap(-1, 1)
    return Region(buffer, 0, size, Checksums(buffer, path))


def _folder_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below `folder`; one that a link takes out of the folder is refused.

    Hugging Face's cache is one folder per repository: snapshots/<revision>/ links into blobs/.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    problems = Problems(f"the checkpoint {folder}")
    closed: list[OSError] = []  # these may hide a part of the checkpoint
    for _ in os.walk(folder, onerror=closed.append):
        pass
    for error in closed:
        # A file system has the latter for itself, and a training removes folders meanwhile.
        if not (isinstance(error, FileNotFoundError) or error.filename.endswith("/lost+found")):
            problems.add(f"a folder cannot be read: {error.strerror}", got=str(error.filename))
    problems.raise_if_any(CheckpointError)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not _leads_into(path, root):
            problems.add("a link leads out of the folder, or nowhere", got=str(path))
        elif path.is_file():
            yield path.relative_to(folder).as_posix(), path
    problems.raise_if_any(CheckpointError)


def _leads_into(link: Path, root: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # nothing is there; a circle
        return False


def _decompressed(path: Path, scratch: Path | None) -> IO[bytes]:
    """The plain content of a gzip file, in a temporary file without a name."""
    folder = scratch or Path(tempfile.gettempdir())
    try:
        target = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 the caller closes it
    except OSError as error:
        raise CheckpointError(f"cannot unpack {path} in {folder}: {error.strerror}") from error
    try:
        with gzip.open(path, "rb") as source:
            while piece := source.read(_COPY_BYTES):
                target.write(piece)
        target.flush()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        target.close()
        raise CheckpointError(f"{path} is damaged or was cut short: {error}") from error
    except OSError as error:
        target.close()
        raise CheckpointError(f"cannot unpack {path} in {folder}: {error.strerror}") from error
    except BaseException:
        target.close()
        raise
    return target


def _tar_members(path: Path, file: IO[bytes]) -> dict[str, Region]:
    """The regular files of a tar archive, checked as a whole before any is read."""
    region = _mapped(file, path)
    problems = Problems(f"the archive {path}")
    members: dict[str, Region] = {}
    file.seek(0)
    try:
        with open_tar(file) as tar:
            for member in tar_members(tar):
                name = _checked_name(member, members, problems)
                if member.offset_data + member.size > region.size:
                    raise ValueError(f"{member.name} ends beyond the file")
                if name is not None:
                    members[name] = region.part(member.offset_data, member.size)
            end = tar.offset
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no .nemo file (a tar archive), is damaged or was cut short: {error}"
        ) from error
    if not _ends_properly(region, end):
        raise CheckpointError(f"{path} was cut short: the archive has no end mark")
    problems.raise_if_any(CheckpointError)
    return members


def _ends_properly(region: Region, end: int) -> bool:
    """Return whether the block of zeros that ends a tar archive is there.

    tarfile's offset is behind that block or in front of it, as its versions please.
    """
    offsets = (end, end - _BLOCK)
    zeros = bytes(_BLOCK)
    return any(
        offset >= 0 and region.part(offset, _BLOCK).bytes() == zeros
        for offset in offsets
        if offset + _BLOCK <= region.size
    )


def _checked_name(
    member: tarfile.TarInfo, members: dict[str, Region], problems: Problems
) -> str | None:
    """The member's plain name; None for a folder or for what is refused (a problem is noted)."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        problems.add("a member's name leads out of the archive", got=member.name)
    elif member.isdir():
        return None
    elif not member.isreg() or member.issparse():
        problems.add("a member is a link or no plain file", got=member.name)
    elif str(name) in members:
        problems.add("two members have one name", got=member.name)
    else:
        return str(name)
    return None
