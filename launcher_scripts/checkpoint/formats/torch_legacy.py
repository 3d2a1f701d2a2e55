"""Files that torch.save wrote before version 1.6, read in place and without torch.

Such a file is a row of pickles, a magic number, the protocol version, a description of the
machine, the object and the keys of its storages, and then one storage after the other: the number
of elements in 8 bytes and the elements. Older checkpoints of Hugging Face and Megatron-LM's 345M
release have this form.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats import pickles
from launcher_scripts.checkpoint.formats.archive import Region
from launcher_scripts.common.errors import CheckpointError, problem

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
PROTOCOL = 1001
# A class with its source code, which old files keep of a model's modules.
_MODULE = "module"
_COUNT = struct.Struct("<q")
# pickletools needs a file; the pickles before the storages are small beside them.
_DESCRIPTION_BYTES = 1 << 26


def load(region: Region, origin: str, known: pickles.Globals) -> Any:
    """The object in the file; tensors are read-only arrays on the mapped file.

    The object refers to storages by key only, and where a storage lies is known once the keys
    behind the object are read. So the pickles are found first and the object is built last.
    """
    head = region.part(0, min(region.size, _DESCRIPTION_BYTES)).bytes()
    spans = _spans(head, origin, count=5)
    protocol = pickles.load(head[slice(*spans[1])], origin, {})
    machine = pickles.load(head[slice(*spans[2])], origin, {})
    little = isinstance(machine, dict) and machine.get("little_endian") is True
    if protocol != PROTOCOL or not little:
        raise CheckpointError(
            problem(f"{origin}: unknown protocol", got=(protocol, machine), choices=[PROTOCOL])
        )
    content = head[slice(*spans[3])]
    dtypes: dict[str, np.dtype[Any]] = {}

    def note(pid: Any) -> Any:
        if pid[0] == _MODULE:
            return pid[1]
        _, dtype, key, *_ = checked_id(pid, origin)
        # Of another type, where the next storage starts would be unknown.
        pickles.check_readable(dtype, origin)
        dtypes[str(key)] = dtype
        return np.empty(0, dtype)

    pickles.load(content, origin, _unbuilt(known), note)
    keys = pickles.load(head[slice(*spans[4])], origin, {})
    if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
        raise CheckpointError(f"{origin} is damaged: it does not list its storages")
    storages = _storages(region, spans[4][1], map(str, keys), dtypes, origin)
    return pickles.load(content, origin, known, lambda pid: _part(storages, pid, origin))


def _unbuilt(known: pickles.Globals) -> pickles.Globals:
    """The names of a first pass, in which nothing is built: dtypes and classes keep their meaning,
    functions have none."""
    return {
        name: value if isinstance(value, np.dtype | type) else pickles.Opaque(".".join(name))
        for name, value in known.items()
    }


def _spans(data: bytes, origin: str, count: int) -> list[tuple[int, int]]:
    """Where the first `count` pickles of `data` start and end; nothing is executed."""
    spans, stream = [], io.BytesIO(data)
    try:
        for _ in range(count):
            start = stream.tell()
            for _opcode in pickletools.genops(stream):
                pass  # up to the one that ends the pickle
            spans.append((start, stream.tell()))
    except Exception as error:
        raise CheckpointError(f"{origin} is damaged: {error}") from error
    return spans


def _storages(
    region: Region, start: int, keys: Iterable[str], dtypes: dict[str, np.dtype[Any]], origin: str
) -> dict[str, NDArray[Any]]:
    """Key -> flat array, read from where the storages begin."""
    result = {}
    for key in keys:
        if key not in dtypes:
            raise CheckpointError(f"{origin} is damaged: storage {key} belongs to no tensor")
        (count,) = _COUNT.unpack(region.part(start, _COUNT.size).bytes())
        size = count * dtypes[key].itemsize
        result[key] = region.part(start + _COUNT.size, size).array(dtypes[key], count)
        start += _COUNT.size + size
    return result


def checked_id(pid: Any, origin: str) -> tuple[Any, ...]:
    """The persistent id ("storage", dtype, key, location, count, ...) of a storage.

    dtype is an Opaque for a type that numpy lacks.
    """
    kind, dtype, key, *rest = pid
    result = (kind, pickles.meaning(dtype), key, *rest)
    plain = isinstance(result[1], np.dtype | pickles.Opaque) and isinstance(key, (str, int))
    if kind != "storage" or not plain:
        raise CheckpointError(f"{origin} refers to something that is not a storage")
    return result


def _part(storages: dict[str, NDArray[Any]], pid: Any, origin: str) -> Any:
    """A storage, or the part of one that a view (key, offset, count) names; or a class."""
    if pid[0] == _MODULE:
        return pid[1]
    _, _, key, _, _, *view = checked_id(pid, origin)
    storage = storages[str(key)]
    if view and view[0] is not None:
        _, offset, count = view[0]
        return storage[offset : offset + count]
    return storage
