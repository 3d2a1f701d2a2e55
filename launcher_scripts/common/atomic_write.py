"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


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
