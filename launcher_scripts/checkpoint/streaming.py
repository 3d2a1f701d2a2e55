"""Turning views of source tensors into the bytes of a file, a few megabytes at a time.

A transposed matrix is read across its rows. Going through it in strips, and through a strip in
tiles that fit the processor's caches, costs a fraction of copying it in one step, and only a strip
is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher_scripts.checkpoint.dtypes import converted, plain, widened
from launcher_scripts.checkpoint.workspace import Workspace
from launcher_scripts.errors import CheckpointError

STRIP_BYTES = 1 << 21
_TILE = 256
# Between the rows of a tile: at a power of two they would push each other out of the cache.
_GAP = 16
_LEAST_ROWS = 16


def strips(
    columns: Sequence[np.ndarray], dtype: np.dtype, name: str, workspace: Workspace | None = None
) -> Iterator[np.ndarray]:
    """Consecutive row-major pieces of the arrays standing side by side, converted to `dtype`.

    columns:   arrays [rows, any] with equal rows and one dtype, or vectors; at least one
    name:      the tensor's name, for errors
    workspace: the thread's memory for strips and tiles

    A strip is valid until the next is asked for. Conversion is exact to a wider type, rounded to
    nearest even to a narrower one. Raises CheckpointError when a finite value is beyond float16's
    range.
    """
    convert = _Conversion(dtype, name, workspace or Workspace())
    matrices = [column.reshape(-1, column.shape[-1]) for column in columns]
    if len(matrices) == 1 and matrices[0].flags.c_contiguous:
        yield from _flat_strips(matrices[0].reshape(-1), convert)
        return
    rows = len(matrices[0])
    width = sum(matrix.shape[1] for matrix in matrices)
    source = matrices[0].dtype
    strip_rows = max(STRIP_BYTES // max(width * source.itemsize, 1), _LEAST_ROWS)
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


def _flat_strips(values: np.ndarray, convert: _Conversion) -> Iterator[np.ndarray]:
    count = STRIP_BYTES // values.itemsize
    for first in range(0, max(values.size, 1), count):
        yield convert(values[first : first + count])


def _fill(target: np.ndarray, source: np.ndarray, memory: Workspace) -> None:
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
    """Of contiguous values to `dtype`; the result is valid until the next.

    name: the tensor's name, for errors
    """

    dtype: np.dtype
    name: str
    memory: Workspace

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Raises CheckpointError when a finite value is beyond float16's range."""
        found = converted(values, self.dtype, self.memory)
        narrower = self.dtype == np.float16 and values.dtype != self.dtype
        if narrower and _has_infinity(found):
            wide = widened(values)
            finite = wide[np.isfinite(wide)]
            most = float(np.abs(finite).max()) if finite.size else 0.0
            if most > np.finfo(self.dtype).max:
                raise CheckpointError(
                    f"{self.name} does not fit fp16: its values reach {most:g}, fp16 holds "
                    f"{np.finfo(self.dtype).max:g}; set export.model.weight_data_type to bf16 or "
                    "fp32"
                )
        return found


def _has_infinity(halves: np.ndarray) -> bool:
    """Whether any float16 is infinite or no number, by its bits, which isfinite is slow at.

    The exponent is all ones from 0x7c00 up among positive numbers (the largest of the bits as
    signed) and from 0xfc00 up among negative ones (the largest as unsigned).
    """
    if not halves.size:
        return False
    return bool(halves.view("<i2").max() >= 0x7C00 or halves.view("<u2").max() >= 0xFC00)
