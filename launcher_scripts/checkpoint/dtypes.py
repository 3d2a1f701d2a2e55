"""Element types of checkpoints, bfloat16 among them, and exact conversion between them."""

from __future__ import annotations

import numpy as np

# numpy has no bfloat16: its bits travel under this name, so that they are not taken for integers.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

FLOATS = (np.dtype("<f8"), np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)


def dtype_name(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def plain(array: np.ndarray) -> np.ndarray:
    """The array with a dtype numpy can copy fast: bfloat16 as its bits."""
    return array.view("<u2") if array.dtype == BFLOAT16 else array


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Floats rounded to the nearest bfloat16, ties to even; values beyond its range to infinity."""
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(values, "<f4")
    bits = wide.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    halves = rounded.view("<u2").reshape(*wide.shape, 2)[..., 1].copy()
    no_number = np.isnan(wide)
    if no_number.any():  # the carry above may have made an infinity of it, or a zero
        halves[no_number] = (bits[no_number] >> 16) | 0x40
    return halves.view(BFLOAT16)


def widened(array: np.ndarray) -> np.ndarray:
    """bfloat16 as float32, exactly; any other array as it is."""
    if array.dtype != BFLOAT16:
        return array
    wide = array.view("<u2").astype("<u4")
    wide <<= 16
    return wide.view("<f4")
