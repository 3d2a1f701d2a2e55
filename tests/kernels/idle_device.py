"""A Hopper GPU, as far as Triton looks, that loads kernels and never runs them.

Launches on CPU tensors compile what the same launches compile on the GPU, and fail like them where
a kernel needs more shared memory or threads than there are. Their outputs stay as they were.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from launcher_scripts.engine import loading
from launcher_scripts.kernels import dot_products, kernels_for, row_products

SHARED_BYTES = 227 << 10  # of a program on an H100 or H200
MOST_THREADS = 1024


class IdleDriver:
    """What Triton asks of a driver when a kernel is launched."""

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "idle"  # Triton keeps what it compiled by this name

    def get_current_stream(self, _device: str) -> int:
        return 0

    def get_device_properties(self, _device: str) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers and spills of a thread, and the most threads."""
        self.loaded.append(name)
        return 1, 1, 0, 0, MOST_THREADS

    def launcher_cls(self, *_: object) -> Any:
        return lambda *_: None


@pytest.fixture
def idle_device(monkeypatch: pytest.MonkeyPatch) -> IdleDriver:
    """The CPU goes through the kernels for GPUs."""
    idle = IdleDriver()
    monkeypatch.setattr(driver, "_active", idle)
    monkeypatch.setattr(loading, "kernels_for", lambda _: kernels_for("cuda"))
    monkeypatch.setattr(row_products, "_overlaps", lambda _: True)
    monkeypatch.setattr(dot_products, "shared_bytes", lambda _: SHARED_BYTES)
    return idle
