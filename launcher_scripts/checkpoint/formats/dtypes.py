"""Element types of checkpoints, bfloat16 among them, and conversion between them.

numpy converts to float16 one value at a time, and knows no bfloat16: both conversions work on the
bits of float32 here, with operations that numpy runs on whole vectors. They give the bits that
rounding to nearest even gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.workspace import Workspace

# numpy has no bfloat16: its bits travel under this name, so that they are not taken for integers.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

FLOATS: tuple[np.dtype[Any], ...] = (np.dtype("<f8"), np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)

_Cast = Callable[[NDArray[Any], NDArray[Any], Workspace], None]

_U2, _U4 = np.dtype("<u2"), np.dtype("<u4")
# Fields of float32's bits, shifted left by one to be rid of the sign.
_SMALLEST_NORMAL_HALF = np.uint32(113 << 24)  # 2^-14
_TOO_LARGE_HALF = np.uint32(0x477FF000 << 1)  # 65520, which rounds to infinity
# Values that are converted at a time: what that takes fits the processor's second cache.
_CHUNK = 1 << 16
# float32's exponents begin 112 below float16's.
_HALF_BIAS = np.uint16((112 << 10) & 0xFFFF)


def dtype_name(dtype: np.dtype[Any]) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """The array with a dtype numpy can copy fast: bfloat16 as its bits."""
    return array.view("<u2") if array.dtype == BFLOAT16 else array


def converted(
    values: NDArray[Any], dtype: np.dtype[Any], workspace: Workspace | None = None
) -> NDArray[Any]:
    """Contiguous values as `dtype`: exact to a wider type, rounded to nearest even to a narrower.

    A value beyond float16's range becomes infinite. The same array where nothing is to do; else
    one that is valid until the workspace's next conversion.
    """
    if values.dtype == dtype:
        return values
    memory = workspace or Workspace()
    found = memory.array("converted", values.shape, dtype)
    source, target = plain(values.reshape(-1)), plain(found.reshape(-1))
    cast = _CASTS.get((values.dtype, dtype), _cast)
    for first in range(0, source.size, _CHUNK):
        cast(source[first : first + _CHUNK], target[first : first + _CHUNK], memory)
    return found


def _widen_bfloat16(bits: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    np.left_shift(bits, 16, out=target.view("<u4"), dtype=_U4)


def _bfloat16_to_float16(bits: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    np.take(_bfloat16_as_float16(), bits, out=target, mode="wrap")  # "raise" would copy


def _float32_to_float16(values: NDArray[Any], target: NDArray[Any], memory: Workspace) -> None:
    target[...] = to_float16(values, memory)


def _to_bfloat16(values: NDArray[Any], target: NDArray[Any], memory: Workspace) -> None:
    target[...] = to_bfloat16(values, memory).view("<u2")


def _cast(values: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="same_kind")


@cache
def _bfloat16_as_float16() -> NDArray[Any]:
    """The float16 next to every bfloat16, by its bits."""
    every = np.arange(1 << 16, dtype=_U2).view(BFLOAT16)
    with np.errstate(over="ignore"):
        return widened(every).astype("<f2")


# (from, to) -> what converts contiguous values, bfloat16 as its bits, in `memory`.
_CASTS: dict[tuple[np.dtype[Any], np.dtype[Any]], _Cast] = {
    (BFLOAT16, np.dtype("<f4")): _widen_bfloat16,
    (BFLOAT16, np.dtype("<f2")): _bfloat16_to_float16,
    (np.dtype("<f4"), np.dtype("<f2")): _float32_to_float16,
    **{(dtype, BFLOAT16): _to_bfloat16 for dtype in FLOATS if dtype != BFLOAT16},
}


def to_float16(values: NDArray[Any], workspace: Workspace | None = None) -> NDArray[Any]:
    """Contiguous float32 values rounded to the nearest float16, ties to even."""
    memory = workspace or Workspace()
    bits = values.view("<u4")
    rounded = _rounded(bits, 13, memory)
    upper = np.right_shift(rounded, 16, out=memory.array("upper", bits.shape, _U4))
    signs = _narrowed(upper, "signs", memory)
    signs &= 0x8000
    # The shift leaves the lower bits of float32's exponent, from which the bias goes by wrapping.
    rounded >>= 13
    halves = _narrowed(rounded, "halves", memory)
    halves -= _HALF_BIAS
    halves |= signs
    found: NDArray[Any] = halves.view("<f2")
    magnitudes = np.left_shift(bits, 1, out=rounded)
    if magnitudes.size and magnitudes.max() >= _TOO_LARGE_HALF:
        with np.errstate(over="ignore"):
            return values.astype("<f2")
    small = np.flatnonzero(magnitudes < _SMALLEST_NORMAL_HALF)
    if small.size:  # zeros, and what float16 holds with fewer digits
        found.reshape(-1)[small] = values.reshape(-1)[small].astype("<f2")
    return found


def to_bfloat16(values: NDArray[Any], workspace: Workspace | None = None) -> NDArray[Any]:
    """Floats rounded to the nearest bfloat16, ties to even; values beyond its range to infinity."""
    memory = workspace or Workspace()
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(values, "<f4")
    bits = wide.view("<u4")
    rounded = _rounded(bits, 16, memory)
    rounded >>= 16
    halves = _narrowed(rounded, "halves", memory)
    if wide.size and np.isnan(wide.max()):
        # The carry of rounding may have made an infinity of what is no number, or a zero.
        no_number = np.isnan(wide)
        halves[no_number] = (bits[no_number] >> 16) | 0x40
    return halves.view(BFLOAT16)


def _rounded(bits: NDArray[Any], lost: int, memory: Workspace) -> NDArray[Any]:
    """float32's bits, to be cut by the lowest `lost`: half of what goes is added, ties to even."""
    rounded = np.right_shift(bits, lost, out=memory.array("rounded", bits.shape, _U4))
    rounded &= 1
    rounded += bits
    rounded += (1 << (lost - 1)) - 1
    return rounded


def _narrowed(bits: NDArray[Any], name: str, memory: Workspace) -> NDArray[Any]:
    """The lower halves of 32-bit integers."""
    halves = memory.array(name, bits.shape, _U2)
    np.copyto(halves, bits, casting="unsafe")
    return halves


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 as float32, exactly; any other array as it is."""
    if array.dtype != BFLOAT16:
        return array
    wide = array.view("<u2").astype("<u4")
    wide <<= 16
    return wide.view("<f4")
