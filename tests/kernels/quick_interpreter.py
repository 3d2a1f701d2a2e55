"""A pytest plugin for kernel checks under the interpreter, which takes half of its time away.

The interpreter replaces the language's builtins when a kernel is launched, until it is done, and
searches the language for them again at each call of a helper within the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(function: Callable[..., Any]) -> list[Any]:
    """The modules of the language that the function sees."""
    seen = function.__globals__.values()
    return [module for module in (tl, tl.core) if any(value is module for value in seen)]


def pytest_configure() -> None:
    replace = interpreter._patch_lang

    def replace_once(function: Callable[..., Any]) -> Any:
        """Do nothing within a kernel, where it is done."""
        if any(tl.core.is_builtin(module.load) for module in languages(function)):
            return replace(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
