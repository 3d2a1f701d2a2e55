"""Files that readers see whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there; what stood there is replaced.

    Raises:
        OSError: it could not be written; what stood there still stands
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
