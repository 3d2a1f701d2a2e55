"""Digests that tell whether two things are the same: BLAKE2b with 256 bits, in hexadecimal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_BYTES = 32
_PIECE = 1 << 20


def file_digest(path: Path) -> str:
    """What `b2sum -l 256` prints of the file. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def value_digest(value: Any) -> str:
    """Of a plain value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).hexdigest()
