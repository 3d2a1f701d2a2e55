"""A tensor of a source checkpoint, whole, however many pieces it is stored in.

Element types of checkpoints, bfloat16 and e4m3 among them, and conversion between them.

numpy knows neither: the conversion works on the bits of float32 here, with operations that
numpy runs on whole vectors. It gives the bits that rounding to nearest even gives.

Read .safetensors files in place: an 8-byte little-endian header size, a JSON header, the data.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import PARALLEL_BYTES, Region, memory_threads
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import parse_json


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


def copied(values: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory of its own. Several threads make a large one: to one of them the system
    gives fresh pages at a fraction of the rate at which it can copy.
    """
    threads = memory_threads()
    if threads == 1 or values.nbytes < PARALLEL_BYTES or not values.flags.c_contiguous:
        return np.array(values)
    result: NDArray[Any] = np.empty(values.shape, values.dtype)
    parts = (np.array_split(x.reshape(-1).view(np.uint8), threads) for x in (result, values))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.copyto, *parts))
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


def copyable(array: NDArray[Any]) -> NDArray[Any]:
    """The array with a dtype numpy can copy fast: bfloat16 as its bits."""
    return array.view("<u2") if array.dtype == BFLOAT16 else array


def as_dtype(
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
    source, target = copyable(values.reshape(-1)), copyable(result.reshape(-1))
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


_COMPARED_ROWS = 1024


# More than any weight has, and than numpy can have.
MAX_AXES = 32


def check_axes(shape: Sequence[object], name: str) -> None:
    """Raise CheckpointError for a shape so long that its product would take minutes."""
    if len(shape) > MAX_AXES:
        raise CheckpointError(
            problem(f"{name} has too many axes", got=len(shape), choices=[f"at most {MAX_AXES}"])
        )


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: where it starts, and its values (a view of the checkpoint)."""

    start: tuple[int, ...]
    values: NDArray[Any]


@dataclass(frozen=True)
class SourceTensor:
    """Pieces that fill `shape` completely and without overlap; all have one dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[Piece, ...]

    @classmethod
    def full(cls, values: NDArray[Any]) -> SourceTensor:
        return cls(values.shape, values.dtype, (Piece((0,) * values.ndim, values),))

    @classmethod
    def of_pieces(cls, shape: tuple[int, ...], pieces: Sequence[Piece], name: str) -> SourceTensor:
        """Checks that the pieces fill `shape`, each place once."""
        check_axes(shape, name)
        dtypes = {piece.values.dtype for piece in pieces}
        if len(dtypes) != 1:
            raise CheckpointError(problem(f"{name} is stored in {len(dtypes)} data types"))
        count = 0
        for piece in pieces:
            fits = len(piece.start) == piece.values.ndim == len(shape) and all(
                start >= 0 and start + size <= limit
                for start, size, limit in zip(piece.start, piece.values.shape, shape, strict=True)
            )
            if not fits:
                raise CheckpointError(problem(f"a piece of {name} lies outside of it", got=shape))
            count += piece.values.size
        if count != math.prod(shape) or _overlap(pieces):
            raise CheckpointError(f"the pieces of {name} do not fill its shape {shape} exactly")
        return cls(tuple(shape), dtypes.pop(), tuple(pieces))

    @property
    def stored_dtype(self) -> np.dtype[Any] | None:
        """The type of the values in the checkpoint's files; None if they are computed."""
        return self.pieces[0].values.dtype if self.pieces else None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        """The values: a view of the checkpoint where one piece holds all, else a copy.

        workspace: memory for the copy, which is called `name` there
        """
        if len(self.pieces) == 1:
            return self.pieces[0].values
        array = (workspace or Workspace()).array(name, self.shape, self.dtype)
        for piece in self.pieces:
            box = tuple(
                slice(start, start + size)
                for start, size in zip(piece.start, piece.values.shape, strict=True)
            )
            copyable(array)[box] = copyable(piece.values)
        return array

    def layer(self, number: int) -> SourceTensor:
        """One place on the first axis, which counts layers or experts."""
        pieces = tuple(
            Piece(piece.start[1:], piece.values[number - piece.start[0]])
            for piece in self.pieces
            if piece.start[0] <= number < piece.start[0] + len(piece.values)
        )
        return SourceTensor(self.shape[1:], self.dtype, pieces)

    def columns(self, part: slice) -> SourceTensor:
        """Some columns of a matrix."""
        return SourceTensor.full(self.read()[:, part])


def same_values(one: SourceTensor, other: SourceTensor) -> bool:
    """True if two tensors hold the same values; one storage is recognized without reading it."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = copyable(one.read()), copyable(other.read())
    if first.__array_interface__["data"] == second.__array_interface__["data"]:
        return True
    if not first.shape:
        return bool(first == second)
    rows = range(0, len(first), _COMPARED_ROWS)
    return all(
        np.array_equal(first[row : row + _COMPARED_ROWS], second[row : row + _COMPARED_ROWS])
        for row in rows
    )


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Return whether two pieces share a place. They are compared with those that they meet on the
    axis that tells most of them apart."""
    boxes = [
        [(start, start + size) for start, size in zip(piece.start, piece.values.shape, strict=True)]
        for piece in pieces
        if piece.values.size
    ]
    if not boxes or not boxes[0]:
        return len(boxes) > 1
    axis = max(range(len(boxes[0])), key=lambda axis: len({box[axis] for box in boxes}))
    met: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[axis]):
        met = [other for other in met if other[axis][1] > box[axis][0]]
        if any(
            all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in met
        ):
            return True
        met.append(box)
    return False


def concatenated(
    tensors: Sequence[SourceTensor], axis: int, sections: int | Sequence[int] = 1
) -> SourceTensor:
    """Shards of tensor-parallel ranks side by side, `sections` stacked matrices each.

    Every shard holds its part of every section; the result holds the sections one after another.
    sections: how many, or the size of each in the result
    """
    if len(tensors) == 1:
        return tensors[0]
    flat = any(len(tensor.shape) <= axis for tensor in tensors)
    shapes = set() if flat else {tuple(np.delete(tensor.shape, axis)) for tensor in tensors}
    dtypes = {tensor.dtype for tensor in tensors}
    sizes = [1] * sections if isinstance(sections, int) else list(sections)
    total = sum(sizes)
    uneven = flat or any(tensor.shape[axis] * size % total for tensor in tensors for size in sizes)
    if len(shapes) != 1 or len(dtypes) != 1 or uneven:
        raise CheckpointError(
            problem("shards do not fit together", got=[tensor.shape for tensor in tensors])
        )
    pieces: list[Piece] = []
    start = 0
    for section, size in enumerate(sizes):
        before = sum(sizes[:section])
        for tensor in tensors:
            rows = tensor.shape[axis] * size // total
            first = tensor.shape[axis] * before // total
            for piece in tensor.pieces:
                pieces += _moved(piece, axis, first, rows, start)
            start += rows
    shape = list(tensors[0].shape)
    shape[axis] = start
    return SourceTensor(tuple(shape), tensors[0].dtype, tuple(pieces))


def _moved(piece: Piece, axis: int, start: int, size: int, new_start: int) -> list[Piece]:
    """The part of a piece between start and start + size on `axis`, as if that began at place."""
    first = max(start, piece.start[axis])
    last = min(start + size, piece.start[axis] + piece.values.shape[axis])
    if first >= last:
        return []
    box = [slice(None)] * piece.values.ndim
    box[axis] = slice(first - piece.start[axis], last - piece.start[axis])
    target = list(piece.start)
    target[axis] = new_start + first - start
    return [Piece(tuple(target), piece.values[tuple(box)])]


DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8,
    "F8_E8M0": E8M0,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
# DeepSeek V3 has 90,000 tensors in all of its files, each of some 120 bytes of header.
MAX_TENSORS = 1 << 18
MAX_HEADER_BYTES = 32 << 20
HEADER_LENGTH = struct.Struct("<Q")  # what a file begins with


def load_safetensors(region: Region, origin: str) -> dict[str, NDArray[Any]]:
    """Name -> read-only view of the mapped file.

    Raises CheckpointError when the header is damaged, a dtype unknown, or the file cut short or
    longer than its tensors.
    """
    if region.size < HEADER_LENGTH.size:
        raise CheckpointError(f"{origin} is not a safetensors file, or was cut short")
    (size,) = HEADER_LENGTH.unpack(region.part(0, HEADER_LENGTH.size).bytes())
    if size > region.size - HEADER_LENGTH.size:
        raise CheckpointError(f"{origin} is not a safetensors file, or was cut short")
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            problem(
                f"the header of {origin} is too long",
                got=f"{size} bytes",
                choices=[f"at most {MAX_HEADER_BYTES}"],
            )
        )
    try:
        header, _ = parse_header(region.part(HEADER_LENGTH.size, size).bytes())
        start = HEADER_LENGTH.size + size
        data = region.part(start, region.size - start)
        result = {name: _tensor(data, name, entry, origin) for name, entry in header.items()}
        spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {origin} is damaged: {error}") from error
    end = 0
    for first, last in [*spans, (data.size, data.size)]:  # the format allows no holes
        if first != end:
            raise CheckpointError(
                problem(
                    f"the header of {origin} does not fit its data",
                    got=f"a tensor or the end at byte {first}",
                    choices=[f"byte {end}, where the tensors before it end"],
                )
            )
        end = last
    return result


def parse_header(content: bytes) -> tuple[dict[str, dict[str, Any]], Any]:
    """Return the entries of a safetensors header by the tensors' names, and the metadata.

    Raises ValueError or AttributeError; entries are not checked.
    """
    header = parse_json(content)
    metadata = header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"it has {len(header)} tensors, more than {MAX_TENSORS}")
    return header, metadata


def _tensor(data: Region, name: str, entry: dict[str, Any], origin: str) -> NDArray[Any]:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    check_axes(shape, f"{name} of {origin}")
    first, last = entry["data_offsets"]
    if not all(type(number) is int for number in (*shape, first, last)):
        raise ValueError(f"{name} has sizes that are not whole numbers")
    if dtype not in DTYPES:
        raise CheckpointError(
            problem(f"{name} of {origin} has an unknown dtype", got=dtype, choices=DTYPES)
        )
    count = math.prod(shape)
    fits = 0 <= first <= last <= data.size and min(shape, default=0) >= 0
    if not fits or last - first != count * DTYPES[dtype].itemsize:
        raise CheckpointError(
            problem(f"{origin} was cut short or damaged at {name}", got=f"{data.size} bytes")
        )
    return data.part(first, last - first).array(DTYPES[dtype], count).reshape(shape)
