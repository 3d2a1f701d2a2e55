"""Turning views of source tensors into the bytes of a file, a few megabytes at a time.

A transposed matrix is read across its rows. Going through it in strips, and through a strip in
tiles that fit the processor's caches, costs a fraction of copying it in one step, and only a strip
is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from launcher_scripts.checkpoint.dtypes import converted, plain, widened
from launcher_scripts.errors import CheckpointError

STRIP_BYTES = 1 << 21
_TILE = 256
# Rows of a tile lie this much apart: at a power of two they would push each other out of the cache.
_TILE_STRIDE = _TILE + 32
_LEAST_ROWS = 16


def strips(columns: Sequence[np.ndarray], dtype: np.dtype, name: str) -> Iterator[np.ndarray]:
    """Consecutive row-major pieces of the arrays standing side by side, converted to `dtype`.

    columns: arrays [rows, any] with equal rows and one dtype, or vectors; at least one
    name:    the tensor's name, for errors

    A strip is valid until the next is asked for. Conversion is exact to a wider type, rounded to
    nearest even to a narrower one. Raises CheckpointError when a finite value is beyond float16's
    range.
    """
    matrices = [column.reshape(-1, column.shape[-1]) for column in columns]
    rows = len(matrices[0])
    width = sum(matrix.shape[1] for matrix in matrices)
    source = matrices[0].dtype
    if len(matrices) == 1 and matrices[0].flags.c_contiguous:
        yield from _flat_strips(matrices[0].reshape(-1), dtype, name)
        return
    strip_rows = max(STRIP_BYTES // max(width * source.itemsize, 1), _LEAST_ROWS)
    strip = np.empty((min(strip_rows, rows), width), dtype)
    tile = np.zeros((_TILE, _TILE_STRIDE), source)
    for first in range(0, rows, strip_rows):
        part = strip[: min(strip_rows, rows - first)]
        at = 0
        for matrix in matrices:
            stop = at + matrix.shape[1]
            _fill(part[:, at:stop], matrix[first : first + len(part)], tile, name)
            at = stop
        yield part


def _flat_strips(values: np.ndarray, dtype: np.dtype, name: str) -> Iterator[np.ndarray]:
    count = STRIP_BYTES // values.itemsize
    for first in range(0, max(values.size, 1), count):
        yield _checked(values[first : first + count], dtype, name)


def _fill(target: np.ndarray, source: np.ndarray, tile: np.ndarray, name: str) -> None:
    """target[...] = source, by tiles where they run through memory in different directions."""
    if abs(source.strides[1]) <= abs(source.strides[0]):
        values = source
        if source.dtype != target.dtype:
            values = _checked(np.ascontiguousarray(source), target.dtype, name)
        plain(target)[...] = plain(values)
        return
    # A tile holds source values in the source's order, so that copying into it, conversion, and
    # the one step that changes the order all run along memory.
    rows, width = target.shape
    for row in range(0, rows, _TILE):
        for column in range(0, width, _TILE):
            box = (slice(row, row + _TILE), slice(column, column + _TILE))
            part = source[box].T
            held = tile[: len(part)]
            plain(held)[:, : part.shape[1]] = plain(part)
            values = _checked(held, target.dtype, name)
            plain(target)[box] = plain(values)[:, : part.shape[1]].T


def _checked(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Contiguous values as `dtype`; the same array where nothing is to do."""
    found = converted(values, dtype)
    if dtype == np.float16 and values.dtype != dtype and _has_infinity(found):
        wide = widened(values)
        finite = wide[np.isfinite(wide)]
        most = float(np.abs(finite).max()) if finite.size else 0.0
        if most > np.finfo(dtype).max:
            raise CheckpointError(
                f"{name} does not fit fp16: its values reach {most:g}, fp16 holds "
                f"{np.finfo(dtype).max:g}; set export.model.weight_data_type to bf16 or fp32"
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
