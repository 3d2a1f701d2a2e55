"""Read .safetensors files in place: an 8-byte little-endian header size, a JSON header, the data.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.archive import Region
from launcher_scripts.checkpoint.formats.dtypes import BFLOAT16, E8M0, FLOAT8
from launcher_scripts.checkpoint.formats.source_tensor import check_axes
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.untrusted import parse_json

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
_SIZE = struct.Struct("<Q")


def load(region: Region, origin: str) -> dict[str, NDArray[Any]]:
    """Name -> read-only view of the mapped file.

    Raises CheckpointError when the header is damaged, a dtype unknown, or the file cut short or
    longer than its tensors.
    """
    if region.size < _SIZE.size:
        raise CheckpointError(f"{origin} is not a safetensors file, or was cut short")
    (size,) = _SIZE.unpack(region.part(0, _SIZE.size).bytes())
    if size > region.size - _SIZE.size:
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
        header = parse_json(region.part(_SIZE.size, size).bytes())
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"it has {len(header)} tensors, more than {MAX_TENSORS}")
        start = _SIZE.size + size
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
