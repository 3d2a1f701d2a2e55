"""Digests that tell whether two things are the same: BLAKE2b with 256 bits."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BYTES = 32
_PIECE = 1 << 20


def file_digest(path: Path) -> str:
    """What `b2sum -l 256` prints of the file, in hexadecimal. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def value_digest(value: Any) -> str:
    """Of a plain value, whatever the order of its keys, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).hexdigest()


def block_digests(ids: Sequence[int], size: int, digest: bytes) -> Iterator[bytes]:
    """Of each whole block of `size` ids, over it and the digest before: each says everything that
    stands up to the end of its block.

    digest: of what stands before the ids
    """
    for first in range(0, len(ids) - size + 1, size):
        block = array("q", ids[first : first + size])
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=_BYTES).digest()
        yield digest
