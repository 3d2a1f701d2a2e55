"""When kernels of the Triton language are compiled, and what decides what comes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import Any


def tell_of_compilation(begins: Callable[[], None], ended: Callable[[], None]) -> bool:
    """Call `begins` before every compilation in this process and `ended` after it.

    Returns whether this Triton can tell. The latest caller is told.
    """
    if find_spec("triton") is None:
        return True  # there is nothing to compile
    if find_spec("triton.knobs") is None:
        return False
    from triton import knobs

    def before(**_: object) -> bool:
        begins()
        return False  # Triton is to compile

    def after(**_: object) -> bool:
        ended()
        return False

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after
    return True


def settle_keys(package: str) -> None:
    """Have all processes find the same kernels in Triton's cache, whichever they launch first.

    Triton's key of a function depends on which of the functions it calls had theirs before. So
    those of a package's imported modules get them in one order, before anything is launched.
    """
    from triton.runtime.jit import JITFunction

    for name in sorted(name for name in sys.modules if name.startswith(f"{package}.")):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018 (kept by the function)


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """kernel[grid], for launches whose first argument is a tensor.

    On the meta device, whose tensors have no values, a launch only compiles the kernel.
    """

    def launch(first: Any, *others: Any, **options: Any) -> None:
        if first.is_meta:
            kernel.warmup(first, *others, grid=grid, **options)
        else:
            kernel[grid](first, *others, **options)

    return launch


class _Compilers(ThreadPoolExecutor):
    """Threads that load what they have compiled, so that its first launch need not."""

    def submit(  # type: ignore[override]  # Triton passes a function alone
        self, compile_kernel: Callable[[], Any], /
    ) -> Future[Any]:
        return super().submit(self._compile, compile_kernel)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        kernel.run  # noqa: B018 (loads it, which raises where it does not fit)
        return kernel


@contextmanager
def compiling_in(threads: int) -> Iterator[None]:
    """In the block, so many threads compile what this one launches on the meta device.

    The block ends when they have. A kernel that fails is left to the first launch that needs it.
    """
    from triton import AsyncCompileMode

    with (
        launchers_kept_apart(),
        _Compilers(threads, "compiler") as compilers,
        AsyncCompileMode(compilers, ignore_errors=True),
    ):
        yield


@contextmanager
def launchers_kept_apart() -> Iterator[None]:
    """In the block, what Triton loads for one kernel is not changed by what it loads for another.

    The modules that launch kernels have one name. Where one is loaded a second time, Python gives
    the module of that name that was loaded last, with the contents of the one that is wanted:
    another thread may have that module in its hands, and would launch the wrong kernel.
    """
    from triton.runtime import build

    load, lock = build._load_module_from_path, Lock()

    def load_apart(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load
