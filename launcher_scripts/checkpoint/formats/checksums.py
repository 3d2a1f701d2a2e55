"""Checksums that a file holds of its own parts, compared before what they cover is used.

torch.save notes the CRC-32 of every storage. Comparing it costs a pass over bytes that are about
to be read anyway: 0.03 s per GB with zlib-ng's vectors, 0.24 s where only zlib itself is there.
"""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass, field
from pathlib import Path

from launcher_scripts.common.errors import CheckpointError, problem

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32


@dataclass(frozen=True, order=True)
class Checksum:
    """The CRC-32 of `size` bytes from `start` of a file; origin names them in errors."""

    start: int
    size: int
    crc: int
    origin: str


@dataclass
class Checksums:
    """What is known of one mapped file. Every part is compared once, when it is first asked for.

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

    def check(self, first: int, last: int, what: str) -> None:
        """Compare all parts that have bytes in [first, last); `what` lies there, for the error.

        Raises CheckpointError when the bytes are not those that were written.
        """
        at = bisect.bisect_left(self._parts, last, key=lambda part: part.start)
        while at > 0:
            at -= 1
            part = self._parts[at]
            if part.start + part.size <= first:
                return
            if part not in self._sound:
                self._compare(part, what)
                self._sound.add(part)

    def _compare(self, part: Checksum, what: str) -> None:
        with memoryview(self.buffer) as whole, whole[part.start : part.start + part.size] as data:
            found = crc32(data)
        if found != part.crc:
            raise CheckpointError(
                problem(
                    f"{part.origin} is damaged: the bytes of {what} have another CRC-32",
                    got=f"{found:08x}",
                    choices=[f"{part.crc:08x}"],
                )
            )
