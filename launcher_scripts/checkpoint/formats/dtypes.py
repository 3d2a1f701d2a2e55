"""Element types of checkpoints, bfloat16 and e4m3 among them, and conversion between them.

numpy knows neither: the conversion works on the bits of float32 here, with operations that
numpy runs on whole vectors. It gives the bits that rounding to nearest even gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Workspace:
    """Arrays by name, whose memory is kept.

    Fresh pages from the system cost several times what it takes to fill them, so an export asks
    for them once. Not for several threads.
    """

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any content; the last one of that name is no longer valid."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            self._memory.pop(name, None)
            memory = self._memory[name] = np.empty(size, np.uint8)
        result: NDArray[Any] = memory[:size].view(dtype).reshape(shape)
        return result


# numpy has none of them: their bits have these names, so that they are not taken for integers.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
FLOAT8 = np.dtype([("float8_e4m3fn", "u1")])
E8M0 = np.dtype([("float8_e8m0fnu", "u1")])  # powers of two, of scales

FLOATS: tuple[np.dtype[Any], ...] = (np.dtype("<f8"), np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)

_Cast = Callable[[NDArray[Any], NDArray[Any], Workspace], None]

_U2, _U4 = np.dtype("<u2"), np.dtype("<u4")
# Values that become bfloat16 at a time: what the steps of that take fits the second cache.
_CHUNK = 1 << 16


def dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.names[0] if dtype.names else dtype.name


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
    result = memory.array("converted", values.shape, dtype)
    source, target = plain(values.reshape(-1)), plain(result.reshape(-1))
    _CASTS.get((values.dtype, dtype), _cast)(source, target, memory)
    return result


def _widen_bfloat16(bits: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    np.left_shift(bits, 16, out=target.view("<u4"), dtype=_U4)


def _bfloat16_to_float16(bits: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    np.take(_bfloat16_as_float16(), bits, out=target, mode="wrap")  # "raise" would copy


def _to_bfloat16(values: NDArray[Any], target: NDArray[Any], memory: Workspace) -> None:
    for first in range(0, values.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        target[part] = to_bfloat16(values[part], memory).view("<u2")


def _cast(values: NDArray[Any], target: NDArray[Any], _memory: Workspace) -> None:
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="same_kind")


@cache
def _bfloat16_as_float16() -> NDArray[Any]:
    """The float16 next to every bfloat16, by its bits."""
    every = np.arange(1 << 16, dtype=_U2).view(BFLOAT16)
    with np.errstate(over="ignore"):
        return widened(every).astype("<f2")


@cache
def _float8_as_float32() -> NDArray[Any]:
    """Every e4m3 by its bits: a sign, 4 bits of exponent, 3 of mantissa; no infinity."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = np.ldexp((8.0 + mantissa) / 8, exponent - 7)
    magnitudes = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    magnitudes[bits & 127 == 127] = np.nan
    return np.where(bits < 128, magnitudes, -magnitudes).astype("<f4")


# (from, to) -> what converts contiguous values, bfloat16 as its bits, in `memory`.
_CASTS: dict[tuple[np.dtype[Any], np.dtype[Any]], _Cast] = {
    (BFLOAT16, np.dtype("<f4")): _widen_bfloat16,
    (BFLOAT16, np.dtype("<f2")): _bfloat16_to_float16,
    **{(dtype, BFLOAT16): _to_bfloat16 for dtype in FLOATS if dtype != BFLOAT16},
}


def to_bfloat16(values: NDArray[Any], workspace: Workspace | None = None) -> NDArray[Any]:
    """Floats rounded to the nearest bfloat16, ties to even; values beyond its range to infinity."""
    memory = workspace or Workspace()
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(values, "<f4")
    bits = wide.view("<u4")
    # Half of what goes is added before the lower half goes; ties to even.
    rounded = np.right_shift(bits, 16, out=memory.array("rounded", bits.shape, _U4))
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    halves = memory.array("halves", bits.shape, _U2)
    np.copyto(halves, rounded, casting="unsafe")
    if wide.size and np.isnan(wide.max()):
        # The carry of rounding may have made an infinity of what is not a number, or a zero.
        no_number = np.isnan(wide)
        halves[no_number] = (bits[no_number] >> 16) | 0x40
    return halves.view(BFLOAT16)


def float32(values: NDArray[Any]) -> NDArray[Any]:
    """Floats of any type as float32; the same array where they are."""
    return widened(values).astype(np.float32, copy=False)


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 and e4m3 as float32, exactly; any other array as it is."""
    if array.dtype == FLOAT8:
        return np.take(_float8_as_float32(), array.view("u1"))
    if array.dtype != BFLOAT16:
        return array
    wide = array.view("<u2").astype("<u4")
    wide <<= 16
    return wide.view("<f4")
