"""Tensors of the right shapes without their values, for a device that never computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VALUES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8)
COMPOSITE = DispatchKey.CompositeImplicitAutograd


class IdleArithmetic(TorchDispatchMode):
    """torch on the CPU that allocates what weights and hidden states need, and does not touch it.

    Memory that nobody touches is none. It leaves out what costs time in tensors of a model's sizes,
    the operations of RESULTS and those in place; integers that come of it are zeros. All others
    are done.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is traced, and importing what traces takes a second

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE.name):
            with self:  # its parts come here
                return func._op_dk(COMPOSITE, *args, **kwargs)
        if func._schema.is_mutable and _is_value(args[0]):
            return args[0]
        result = RESULTS.get(func._schema.name.removeprefix("aten::"))
        about_values = any(map(_is_value, tree_leaves((args, kwargs))))
        if result is None or not (about_values or kwargs.get("dtype") in VALUES):
            return func(*args, **kwargs)
        made = result(*args, **kwargs)
        return made if _is_value(made) else made.zero_()


def _is_value(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.dtype in VALUES


def _each(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Of operations on numbers of the same place in all tensors."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    first = tensors[0]
    if len(tensors) == 1:
        return torch.empty_like(first, dtype=dtype)
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    types = [tensor.dtype for tensor in tensors if tensor.dtype != torch.bool]
    return first.new_empty(shape, dtype=dtype or reduce(torch.promote_types, types))


def _compared(*args: Any) -> Tensor:
    return _each(*args, dtype=torch.bool)


def _contiguous(tensor: Tensor, **_: Any) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _made(shape: Sequence[int], *, dtype: torch.dtype, **_: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _product(first: Tensor, second: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Of matrices, or of a matrix and a vector."""
    shape = (*first.shape[:-1], *second.shape[second.dim() - 1 :][: second.dim() - 1])
    return first.new_empty(shape, dtype=out_dtype)


def _product_and_sum(_: Tensor, first: Tensor, second: Tensor, **__: Any) -> Tensor:
    return _product(first, second)


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _largest(tensor: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    gone = {each % tensor.dim() for each in ([dim] if isinstance(dim, int) else dim)}
    kept = [
        1 if place in gone else size
        for place, size in enumerate(tensor.shape)
        if keepdim or place not in gone
    ]
    return tensor.new_empty(kept)


def _place_of_largest(tensor: Tensor, dim: int = 0, keepdim: bool = False) -> Tensor:
    return _largest(tensor, dim, keepdim).long()


_EACH = ("gelu", "relu", "silu", "abs", "round", "clamp", "mul", "add", "sub", "div", "where")
RESULTS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys((*_EACH, "_to_copy", "pow", "log", "exp", "rsqrt"), _each),
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), _compared),
    **dict.fromkeys(("mm", "bmm", "mv"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _product_and_sum),
    "zeros": _made,
    "clone": _contiguous,
    "cat": _joined,
    "amax": _largest,
    "argmax": _place_of_largest,
}
