"""Read .safetensors files in place: an 8-byte little-endian header size, a JSON header, the data.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher_scripts.errors import CheckpointError, problem

# bfloat16 has no numpy type: its bits are read as uint16.
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
MAX_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: where its bytes are, and what they mean."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """A read-only view of the file; bfloat16 as its bits in uint16."""
        if 0 in self.shape:
            return np.empty(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.offset, self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of a .safetensors file, checked against its length.

    Raises CheckpointError when the header is damaged, a dtype unknown, or the file cut short.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= size <= min(MAX_HEADER, length - 8):
            raise CheckpointError(f"{path} is no safetensors file, or was cut short")
        try:
            header = json.loads(file.read(size))
        except ValueError as error:
            raise CheckpointError(f"the header of {path} is damaged: {error}") from error
    header.pop("__metadata__", None)
    return {name: _tensor(path, 8 + size, length, name, entry) for name, entry in header.items()}


def _tensor(path: Path, start: int, length: int, name: str, entry: dict) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(
            problem(f"{name} of {path} has an unknown dtype", got=dtype, choices=DTYPES)
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if last - first != expected or start + last > length:
        raise CheckpointError(
            problem(f"{path} was cut short or damaged at {name}", got=f"{length} bytes")
        )
    return StoredTensor(path, start + first, dtype, shape)
