"""When kernels of the Triton language are compiled: whoever waits for that should know."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec


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
