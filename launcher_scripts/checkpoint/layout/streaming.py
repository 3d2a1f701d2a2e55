"""Turning views of source tensors into the bytes of a file, a few megabytes at a time.

A transposed matrix is read across its rows. Going through it in strips, and through a strip in
tiles that fit the processor's caches, costs a fraction of copying it in one step, and only a strip
is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    Workspace,
    converted,
    plain,
    widened,
)
from launcher_scripts.common.errors import CheckpointError

STRIP_BYTES = 1 << 21
_TILE = 256
# Between the rows of a tile: at a power of two they would push each other out of the cache.
_GAP = 16
_MIN_ROWS = 16


class UnfitValues(CheckpointError):
    """A tensor has values that its file cannot hold."""


class NonfiniteValues(UnfitValues):
    """A tensor has values that are NaN or infinite."""


@dataclass(frozen=True)
class _Kind:
    """A type of files. most: its largest value;  wider: the types that hold more"""

    name: str
    maximum: float
    wider: str


_KINDS = {
    np.dtype("<f2"): _Kind("fp16", 65504, "bf16 or fp32"),
    BFLOAT16: _Kind("bf16", 3.38953e38, "fp32"),
    np.dtype("<f4"): _Kind("fp32", 3.40282e38, ""),
}


def strips(
    columns: Sequence[NDArray[Any]],
    dtype: np.dtype[Any],
    name: str,
    workspace: Workspace | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Iterator[NDArray[Any]]:
    """Consecutive row-major pieces of the arrays standing side by side, converted to `dtype`.

    columns:   arrays [rows, any] with equal rows and one dtype, or vectors; at least one
    name:      the tensor's name, for errors
    workspace: the thread's memory for strips and tiles

    A strip is valid until the next is asked for. Conversion is exact to a wider type, rounded to
    nearest even to a narrower one. Raises UnfitValues for a finite value beyond the range of
    `dtype` and, unless allow_nonfinite, NonfiniteValues.
    """
    convert = _Conversion(dtype, name, workspace or Workspace(), allow_nonfinite)
    matrices = [column.reshape(-1, column.shape[-1]) for column in columns]
    if len(matrices) == 1 and matrices[0].flags.c_contiguous:
        yield from _flat_strips(matrices[0].reshape(-1), convert)
        return
    rows = len(matrices[0])
    width = sum(matrix.shape[1] for matrix in matrices)
    source = matrices[0].dtype
    strip_rows = max(STRIP_BYTES // max(width * source.itemsize, 1), _MIN_ROWS)
    strip_rows = min(strip_rows - strip_rows % _TILE or strip_rows, rows)
    strip = convert.memory.array("strip", (strip_rows, width), source)
    for first in range(0, rows, strip_rows):
        part = strip[: rows - first]
        at = 0
        for matrix in matrices:
            stop = at + matrix.shape[1]
            _fill(part[:, at:stop], matrix[first : first + len(part)], convert.memory)
            at = stop
        yield convert(part)


def _flat_strips(values: NDArray[Any], convert: _Conversion) -> Iterator[NDArray[Any]]:
    count = STRIP_BYTES // values.itemsize
    for first in range(0, max(values.size, 1), count):
        yield convert(values[first : first + count])


def _fill(target: NDArray[Any], source: NDArray[Any], memory: Workspace) -> None:
    """target[...] = source, by tiles where they run through memory in different directions."""
    target, source = plain(target), plain(source)
    if abs(source.strides[1]) <= abs(source.strides[0]):
        target[...] = source
        return
    # A tile holds its values in the source's order, so that only steps in the cache change it.
    rows, width = target.shape
    for row in range(0, rows, _TILE):
        for column in range(0, width, _TILE):
            box = (slice(row, row + _TILE), slice(column, column + _TILE))
            part = source[box].T
            high, wide = part.shape
            tile = memory.array("tile", (high, wide + _GAP), source.dtype)[:, :wide]
            tile[...] = part
            target[box] = tile.T


@dataclass(frozen=True)
class _Conversion:
    """Conversion of contiguous values to `dtype`; the result is valid until the next.

    name: the tensor's name, for errors
    """

    dtype: np.dtype[Any]
    name: str
    memory: Workspace
    allow_nonfinite: bool

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        result = converted(values, self.dtype, self.memory)
        is_unchanged = values.dtype == self.dtype and self.allow_nonfinite
        if not is_unchanged and not _all_finite(result):
            self._judge(widened(values), result)
        return result

    def _judge(self, values: NDArray[Any], result: NDArray[Any]) -> None:
        """Raises UnfitValues where what is not finite in `result` may not be."""
        finite = np.isfinite(values)
        if not self.allow_nonfinite and not finite.all():
            raise NonfiniteValues(f"{self.name} has NaN or infinite values")
        lost = values[finite & ~np.isfinite(widened(result))]
        if lost.size:
            kind = _KINDS[self.dtype]
            wider = f"; set export.model.weight_data_type to {kind.wider}" if kind.wider else ""
            raise UnfitValues(
                f"{self.name} does not fit {kind.name}: its values reach {np.abs(lost).max():g}, "
                f"{kind.name} holds {kind.maximum:g}{wider}"
            )


def _all_finite(values: NDArray[Any]) -> bool:
    """Return whether no value is NaN or infinite, of two bytes by the bits, which isfinite is slow
    at.

    The exponent is all ones from its own bits up among positive numbers (the largest of the bits
    as signed) and from those with the sign up among negative ones (the largest as unsigned).
    """
    if values.dtype == np.float32 or not values.size:
        return bool(np.isfinite(values).all())
    exponent = 0x7F80 if values.dtype == BFLOAT16 else 0x7C00
    max_signed, unsigned = values.view("<i2").max(), values.view("<u2").max()
    return bool(max_signed < exponent and unsigned < exponent | 0x8000)
