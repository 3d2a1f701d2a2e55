"""Turning views of source tensors into the bytes of a file, a few megabytes at a time.

A transposed matrix is read across its rows. Going through it in strips that fit the processor's
caches, and through a strip in tiles, costs a fraction of copying it in one step, and only a strip
is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from launcher_scripts.checkpoint.dtypes import BFLOAT16, plain, to_bfloat16, widened
from launcher_scripts.errors import CheckpointError

STRIP_BYTES = 1 << 21
_TILE_ROWS = 256
_TILE_COLUMNS = 16
_LEAST_ROWS = 16


def strips(columns: Sequence[np.ndarray], dtype: np.dtype, name: str) -> Iterator[np.ndarray]:
    """Consecutive row-major pieces of the arrays standing side by side, converted to `dtype`.

    columns: arrays [rows, any] with equal rows, or vectors; at least one
    name:    the tensor's name, for errors

    A strip is valid until the next is asked for. Conversion is numpy's: exact to a wider type,
    rounded to nearest even to a narrower one. Raises CheckpointError when a finite value is
    beyond float16's range.
    """
    matrices = [column.reshape(-1, column.shape[-1]) for column in columns]
    rows = len(matrices[0])
    width = sum(matrix.shape[1] for matrix in matrices)
    source = matrices[0].dtype
    if len(matrices) == 1 and matrices[0].flags.c_contiguous:
        yield from _flat_strips(matrices[0].reshape(-1), dtype, name)
        return
    strip_rows = max(STRIP_BYTES // max(width * source.itemsize, 1), _LEAST_ROWS)
    strip = np.empty((min(strip_rows, rows), width), source)
    for first in range(0, rows, strip_rows):
        part = strip[: min(strip_rows, rows - first)]
        at = 0
        for matrix in matrices:
            stop = at + matrix.shape[1]
            _copy(plain(part[:, at:stop]), plain(matrix[first : first + len(part)]))
            at = stop
        yield _converted(part, dtype, name)


def _flat_strips(values: np.ndarray, dtype: np.dtype, name: str) -> Iterator[np.ndarray]:
    count = STRIP_BYTES // values.itemsize
    for first in range(0, max(values.size, 1), count):
        yield _converted(values[first : first + count], dtype, name)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, by tiles where they run through memory in different directions."""
    if abs(source.strides[1]) <= abs(source.strides[0]):
        target[...] = source
        return
    rows, width = target.shape
    for row in range(0, rows, _TILE_ROWS):
        for column in range(0, width, _TILE_COLUMNS):
            box = (slice(row, row + _TILE_ROWS), slice(column, column + _TILE_COLUMNS))
            target[box] = source[box]


def _converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Contiguous values of another type; the same array where nothing is to do."""
    if values.dtype == dtype:
        return values
    if values.dtype == BFLOAT16:
        values = widened(values)
    if values.dtype == dtype:
        return values
    if dtype == BFLOAT16:
        return to_bfloat16(values)
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if dtype == np.float16 and _has_infinity(converted):
        finite = values[np.isfinite(values)]
        most = float(np.abs(finite).max()) if finite.size else 0.0
        if most > np.finfo(dtype).max:
            raise CheckpointError(
                f"{name} does not fit fp16: its values reach {most:g}, fp16 holds "
                f"{np.finfo(dtype).max:g}; set export.model.weight_data_type to bf16 or fp32"
            )
    return converted


def _has_infinity(halves: np.ndarray) -> bool:
    """Whether any float16 is infinite or no number, by its bits, which isfinite is slow at.

    The exponent is all ones from 0x7c00 up among positive numbers (the largest of the bits as
    signed) and from 0xfc00 up among negative ones (the largest as unsigned).
    """
    if not halves.size:
        return False
    return bool(halves.view("<i2").max() >= 0x7C00 or halves.view("<u2").max() >= 0xFC00)
