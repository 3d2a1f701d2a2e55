"""Modules that few tests use, and that take seconds to import in every process that collects."""

from __future__ import annotations

from typing import Any

import pytest


class LazyModule:
    """A module that is imported at its first use, which skips the test where it is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked of everything in a file of tests, when these are collected
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name), name)
