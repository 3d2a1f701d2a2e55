"""A Hopper GPU for tests on machines without one: kernels are compiled for it and never run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from launcher_scripts.kernels.cuda.compiling import traits_of

SHARED_BYTES = 227 << 10  # of a program on an H100 or H200
MAX_THREADS = 1024


class Hopper:
    """What Triton asks of a driver.

    loaded: the names of the kernels that are compiled and fit
    """

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> Hopper:
        return self  # Triton keeps what it has compiled by this

    def get_current_stream(self, _device: Hopper) -> int:
        return 0

    def get_device_properties(self, _device: Hopper) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 1, 1, 0, 0, MAX_THREADS

    def launcher_cls(self, _source: object, _metadata: object) -> Any:
        return lambda *_: None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    """Launches on the meta device compile for it, and raise where a kernel does not fit."""
    gpu = Hopper()
    properties = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", load)
    traits_of.cache_clear()
    yield gpu
    traits_of.cache_clear()


def load(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> None:
    """Load a kernel that was compiled."""
    kernel_cache, *_ = fn.jit_function.device_caches[compile["device"]]
    kernel_cache[key].run  # noqa: B018 (loads it)
