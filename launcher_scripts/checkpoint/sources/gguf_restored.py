"""What undoes the changes that llama.cpp's converter makes to tensors.

Each takes a tensor as the file has it and gives it as transformers does: rows as output features.
The changes are those of `modify_tensors` in llama.cpp's conversion/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Heads:
    """How many heads of queries, and of keys and values, a layer has."""

    queries: int
    keys: int


@dataclass(frozen=True)
class Restored:
    """A row of a table of restored tensors.

    apply: (values, heads) -> the same values as transformers has them
    shape: what becomes of the shape
    """

    apply: Callable[[NDArray[Any], Heads], NDArray[Any]]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


def _halves(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows that rotate together are neighbours; transformers has them half a head apart."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _grouped(values: NDArray[Any], heads: Heads) -> NDArray[Any]:
    """Rows (all queries, all keys, all values); transformers has (the queries of a key/value head,
    its key, its value) for one such head after the other."""
    size = len(values) // (heads.queries + 2 * heads.keys)
    parts = np.split(values, [heads.queries * size, (heads.queries + heads.keys) * size])
    rows = [part.reshape(heads.keys, -1, *values.shape[1:]) for part in parts]
    whole: NDArray[Any] = np.concatenate(rows, axis=1)
    return whole.reshape(values.shape)


QUERY_HALVES = Restored(lambda values, heads: _halves(values, heads.queries))
KEY_HALVES = Restored(lambda values, heads: _halves(values, heads.keys))
GROUPED = Restored(_grouped)
LESS_ONE = Restored(lambda values, _: values - np.float32(1))
TRANSPOSED = Restored(lambda values, _: values.T, lambda shape: shape[::-1])
# A matrix of one row loses that axis in some files.
ONE_ROW = Restored(
    lambda values, _: values.reshape(1, -1),
    lambda shape: (1, *shape) if len(shape) == 1 else shape,
)
