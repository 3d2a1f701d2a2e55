"""When kernels of the Triton language are compiled, and what decides what comes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


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


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)


def compiler_details() -> tuple[object, ...]:
    """What the result of a compilation depends on beside the kernel and the device."""
    import torch
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    tools = triton.knobs.nvidia.ptxas.path
    variables = sorted(get_cache_invalidating_env_vars().items())
    return triton.__version__, torch.__version__, tools, variables
