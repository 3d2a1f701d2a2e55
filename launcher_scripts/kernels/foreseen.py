"""Kernels that launches will need: found by launching on an idle device, compiled one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime.jit import JITFunction


class ForeseenKernel(NamedTuple):
    """A kernel for arguments of certain types and constants.

    details: the arguments and launch options, as Triton writes them down
    """

    function: JITFunction
    details: str

    def compile(self) -> None:
        """Have it in Triton's cache, with what launches it; raises what the compiler finds."""
        compiled = self.function.preload(self.details)
        compiled.run  # noqa: B018 (makes the launcher, and looks whether the kernel fits)


class ForeseenKernels:
    """The kernels of launches that were made, each once, in the order of their first use."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], ForeseenKernel] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[ForeseenKernel]:
        return iter(self._found.values())

    @property
    def names(self) -> set[tuple[str, str]]:
        """What tells each from all others: function, and types, constants and launch options."""
        return set(self._found)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the block, kernels that launches need are added and not compiled."""
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._note
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before

    def _note(self, *, key: str, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        function = fn.jit_function
        kernel = ForeseenKernel(function, compile["specialization_data"])
        self._found.setdefault((function.__name__, key), kernel)
        return True  # Triton is not to compile it
