"""A pytest plugin for kernel checks under the interpreter, which takes most of its time away.

With --share N every check runs with one of N of its parameters; their names tell which.

The interpreter replaces the language's builtins at every launch and call of a helper, describes
the shape of every value anew, and adds tuples of numbers one after the other. None of that changes
what a kernel computes, but for the order of those sums, which the language leaves open.
"""

from __future__ import annotations

import zlib
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=int, default=1, metavar="N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    seen: set[str] = set()
    kept = []
    for item in items:
        check = item.nodeid.partition("[")[0]
        if check not in seen or not zlib.crc32(item.nodeid.encode()) % share:
            seen.add(check)
            kept.append(item)
    items[:] = kept


def pytest_configure() -> None:
    interpreter._patch_lang(pytest_configure)  # stays as long as the process
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    # Overflows are looked for at every sum and product of integers, and never told of.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    numpy_types = interpreter._get_np_dtype
    found: dict[str, np.dtype] = {}

    def numpy_type(dtype: tl.dtype) -> np.dtype:
        if dtype.name not in found:
            found[dtype.name] = numpy_types(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = numpy_type
    interpreter.ReduceOps.generic_reduce = reduce_in_halves
    core.tuple.__init__ = begin_tuple
    core.tuple.type = cached_property(lambda values: core._type_for_tuple_values(values.values))
    core.tuple.type.__set_name__(core.tuple, "type")
    core.block_type.__init__ = begin_block_type
    core.tensor.__init__ = begin_tensor
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    semantic.TritonSemantic.broadcast_impl_value = lambda *values: (
        values[1:] if alike(*values[1:]) else broadcast(*values)
    )


class Shape(NamedTuple):
    """What types and values of a shape have in common."""

    sizes: core.tuple
    constants: core.tuple
    numel: int
    name: str


@cache
def shape_of(*sizes: int) -> Shape:
    numel = core.validate_block_shape(sizes)
    constants = core.tuple([core.constexpr(size) for size in sizes])
    return Shape(core.tuple(sizes), constants, numel, f"({', '.join(map(str, sizes))})")


NO_BLOCK = shape_of()


def begin_tuple(self: core.tuple, values: Any, kind: Any = None) -> None:
    """Without its type, which is hardly ever asked for."""
    self.values = list(values)
    if kind is not None:
        self.type = kind if isinstance(kind, core.tuple_type) else core.tuple_type(kind)


def begin_block_type(self: core.block_type, element_ty: tl.dtype, sizes: Any) -> None:
    self.element_ty = element_ty
    shape = shape_of(*(core._unwrap_if_constexpr(size) for size in sizes))
    if not shape.sizes.values:
        raise TypeError("a block has at least one dimension")
    self.described = shape
    self.shape, self.numel = shape.sizes, shape.numel
    self.name = f"<{shape.name}, {element_ty.name}>"


def begin_tensor(self: core.tensor, handle: Any, kind: tl.dtype) -> None:
    shape = kind.described if kind.is_block() else NO_BLOCK
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = shape.constants, core.constexpr(shape.numel)


def alike(first: core.tensor, second: core.tensor) -> bool:
    return first.shape is second.shape


def reduce_in_halves(self: interpreter.ReduceOps, given: Any) -> list[core.tensor]:
    """Neighbours are combined, all at once, until one is left."""
    values, axis = self.unravel(given, self.axis)
    while (size := values[0].handle.data.shape[axis]) > 1:
        halves = [
            [
                self.to_tensor(value.handle.data.take(range(first, size, 2), axis), value.dtype)
                for value in values
            ]
            for first in (0, 1)
        ]
        values = self.combine_fn.fn(*halves[0], *halves[1])
        if isinstance(values, core.tensor):
            values = (values,)
    found = [value.handle.data for value in values]
    if not self.keep_dims:
        found = [data.squeeze(axis) for data in found]
    return [self.to_tensor(data, value.dtype) for data, value in zip(found, values, strict=True)]
