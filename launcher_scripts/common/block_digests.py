"""Digests of the blocks of a text: each says everything that stands up to the end of its block."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b


def block_digests(ids: Sequence[int], size: int, digest: bytes) -> Iterator[bytes]:
    """Of each whole block of `size` ids, 256 bits of BLAKE2b over it and the digest before.

    digest: of what stands before the ids
    """
    for first in range(0, len(ids) - size + 1, size):
        block = array("q", ids[first : first + size])
        digest = blake2b(digest + block.tobytes(), digest_size=32).digest()
        yield digest
