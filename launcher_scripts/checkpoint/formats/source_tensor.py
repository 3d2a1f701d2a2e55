"""A tensor of a source checkpoint, whole, however many pieces it is stored in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.dtypes import Workspace, plain
from launcher_scripts.common.errors import CheckpointError, problem

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
            plain(array)[box] = plain(piece.values)
        return array

    def layer(self, number: int) -> SourceTensor:
        """One place on the first axis, which counts layers or experts."""
        pieces = tuple(
            Piece(piece.start[1:], piece.values[number - piece.start[0]])
            for piece in self.pieces
            if piece.start[0] <= number < piece.start[0] + len(piece.values)
        )
        return SourceTensor(self.shape[1:], self.dtype, pieces)


def same_values(one: SourceTensor, other: SourceTensor) -> bool:
    """True if two tensors hold the same values; one storage is recognized without reading it."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = plain(one.read()), plain(other.read())
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
