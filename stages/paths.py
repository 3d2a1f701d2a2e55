"""Paths of the configuration."""

from __future__ import annotations

import os


def absolute(path: str) -> str:
    """A path of the configuration, which may be relative to the working directory."""
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
