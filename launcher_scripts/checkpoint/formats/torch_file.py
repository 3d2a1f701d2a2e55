"""Files of torch.save, read in place and without torch.

Since torch 1.6 such a file is a zip archive of uncompressed entries: `<root>/data.pkl` describes
the object, and `<root>/data/<key>` holds the bytes of one storage. Files from before are
torch_legacy's. Every tensor becomes a read-only view of the file. bfloat16, which numpy lacks, is
carried as the dtype BFLOAT16. What the archive knows of its bytes (CRC-32) is noted beside the
region, for whoever reads them (see archive.py).

Files that torch.save wrote before version 1.6, read in place and without torch.

Such a file is a row of pickles, a magic number, the protocol version, a description of the
machine, the object and the keys of its storages, and then one storage after the other: the number
of elements in 8 bytes and the elements. Older checkpoints of Hugging Face and Megatron-LM's 345M
release have this form.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats import pickles
from launcher_scripts.checkpoint.formats.archive import Checksum, Region
from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, FLOAT8, check_axes
from launcher_scripts.common.errors import CheckpointError, problem

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
PROTOCOL = 1001
# A class with its source code, which old files keep of a model's modules.
_MODULE = "module"
_COUNT = struct.Struct("<q")
# pickletools needs a file; the pickles before the storages are small beside them.
_DESCRIPTION_BYTES = 1 << 26


def load_legacy(region: Region, origin: str, allowed: pickles.Globals) -> Any:
    """The object in the file; tensors are read-only arrays on the mapped file.

    The object refers to storages by key only, and where a storage lies is known once the keys
    behind the object are read. So the pickles are found first and the object is built last.
    """
    head = region.part(0, min(region.size, _DESCRIPTION_BYTES)).bytes()
    spans = _spans(head, origin, count=5)
    protocol = pickles.load_pickle(head[slice(*spans[1])], origin, {})
    machine = pickles.load_pickle(head[slice(*spans[2])], origin, {})
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

    pickles.load_pickle(content, origin, _unbuilt(allowed), note)
    keys = pickles.load_pickle(head[slice(*spans[4])], origin, {})
    if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
        raise CheckpointError(f"{origin} is damaged: it does not list its storages")
    storages = _storages(region, spans[4][1], map(str, keys), dtypes, origin)
    return pickles.load_pickle(content, origin, allowed, lambda pid: _part(storages, pid, origin))


def _unbuilt(allowed: pickles.Globals) -> pickles.Globals:
    """The names of a first pass, in which nothing is built: dtypes and classes keep their meaning,
    functions have none."""
    return {
        name: value if isinstance(value, np.dtype | type) else pickles.Opaque(".".join(name))
        for name, value in allowed.items()
    }


def _spans(data: bytes, origin: str, count: int) -> list[tuple[int, int]]:
    """Return start and end of the first `count` pickles of `data`; nothing is executed."""
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
    kind, dtype, key, *location = pid
    result = (kind, pickles.meaning(dtype), key, *location)
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


STORAGES: dict[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "UntypedStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": BFLOAT16,
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
    "float8_e4m3fn": FLOAT8,
}
# The largest files of torch have some 10,000 entries of 100 bytes.
_MAX_DIRECTORY_BYTES = 16 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def load_torch_file(region: Region, origin: str, allowed: pickles.Globals | None = None) -> Any:
    """The object in a torch.save file; tensors are read-only arrays on the mapped file.

    Objects of other classes are pickles.Opaque; see pickles.check_readable.

    allowed: names that have a meaning besides those of tensors and plain containers

    Raises CheckpointError when the file is damaged, compressed, or names an attack.
    """
    names = {**_GLOBALS, **(allowed or {})}
    magic = MAGIC
    if region.size >= len(magic) and region.part(0, len(magic)).bytes() == magic:
        return load_legacy(region, origin, names)
    return _TorchFile(region, origin).load(names)


def load_state(
    region: Region, origin: str, allowed: pickles.Globals | None = None
) -> dict[Any, Any]:
    """The dictionary in a torch.save file; see load. Raises CheckpointError for another object."""
    state = load_torch_file(region, origin, allowed)
    pickles.check_readable(state, origin)
    if not isinstance(state, dict):
        raise CheckpointError(f"{origin} holds no state dict")
    return state


def tensors_of(items: Iterable[tuple[Any, Any]], origin: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of the tensors among the items of a state dict.

    Raises CheckpointError for one of a class that nothing here reads. A tensor's name has dots;
    an object's without may be left out, and so may a module's `_extra_state`.
    """
    for key, value in items:
        name = str(key)
        if isinstance(value, np.ndarray):
            yield name, value
        elif "." in name and "_extra_state" not in name:
            pickles.check_readable(value, f"{name} of {origin}")


class _TorchFile:
    def __init__(self, region: Region, origin: str) -> None:
        self._region = region
        self._origin = origin
        try:
            with zipfile.ZipFile(_RegionFile(region)) as file:
                self._entries = {entry.filename: entry for entry in file.infolist()}
                if len(self._entries) < len(file.infolist()):
                    raise CheckpointError(f"{origin} is damaged: two entries have one name")
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            OSError,
            ValueError,
            struct.error,
        ) as error:
            raise CheckpointError(f"{origin} is damaged or was cut short: {error}") from error
        _reject_overlaps(self._entries.values(), origin)
        roots = [name.removesuffix("data.pkl") for name in self._entries if _is_root(name)]
        if len(roots) != 1:
            raise CheckpointError(f"{origin} is not a file of torch.save")
        self._root = roots[0]
        # torch can leave checksums out (set_crc32_options), and then writes zeros everywhere.
        self._checked = any(entry.CRC for entry in self._entries.values())

    def load(self, names: pickles.Globals) -> Any:
        if f"{self._root}byteorder" in self._entries:
            order = self._content("byteorder")
            if order != b"little":
                raise CheckpointError(
                    problem(f"{self._origin}: unknown byte order", got=order, choices=["little"])
                )
        return pickles.load_pickle(self._content("data.pkl"), self._origin, names, self._storage)

    def _content(self, name: str) -> bytes:
        """The bytes of one small entry, compared with their checksum."""
        region = self._entry(name)
        region.checksums.check(region.offset, region.offset + region.size, name)
        return region.bytes()

    def _entry(self, name: str) -> Region:
        """The bytes of one entry, in place; what is known of them is noted."""
        entry = self._entries.get(self._root + name)
        if entry is None:
            raise CheckpointError(f"{self._origin} is damaged: it lacks {name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(f"{self._origin}: {name} is compressed, which torch never does")
        header = self._region.part(entry.header_offset, _LOCAL_HEADER.size).bytes()
        magic, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise CheckpointError(f"{self._origin} is damaged at {name}")
        start = entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        result = self._region.part(start, entry.file_size)
        if self._checked:
            noted = Checksum(result.offset, result.size, entry.CRC, self._origin)
            result.checksums.add(noted)
        return result

    def _storage(self, pid: Any) -> NDArray[Any] | pickles.Opaque:
        """The flat array a persistent id ("storage", type, key, location, numel) stands for."""
        _, dtype, key, _, count = checked_id(pid, self._origin)
        if isinstance(dtype, pickles.Opaque):
            return dtype
        return self._entry(f"data/{key}").array(dtype, int(count))


class _RegionFile(io.RawIOBase):
    """A region as a seekable file, for zipfile."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._region.size}
        self._position = base[whence] + offset
        if self._position < 0:
            raise ValueError("a position before the start")
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._region.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MAX_DIRECTORY_BYTES:  # zipfile reads its directory in one piece
            raise ValueError(f"its directory has {size} bytes, more than {_MAX_DIRECTORY_BYTES}")
        data = self._region.part(min(self._position, self._region.size), size).bytes()
        self._position += size
        return data


def _reject_overlaps(entries: Iterable[zipfile.ZipInfo], origin: str) -> None:
    """Two entries that lie in one place would be two tensors of the same bytes."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            raise CheckpointError(f"{origin} is damaged: {entry.filename} lies in another entry")
        end = entry.header_offset + _LOCAL_HEADER.size + entry.compress_size


def _is_root(name: str) -> bool:
    return name == "data.pkl" or (name.endswith("/data.pkl") and name.count("/") == 1)


def rebuild_tensor(
    storage: NDArray[Any] | pickles.Opaque,
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    *_: object,
) -> NDArray[Any] | pickles.Opaque:
    """torch._utils._rebuild_tensor_v2 on a numpy array: a view, its bounds checked.

    Of a storage of a type that numpy lacks: that type, an Opaque.
    """
    if isinstance(storage, pickles.Opaque):
        return storage
    shape, steps = tuple(size), tuple(stride)
    check_axes(shape, "a tensor")
    if storage.ndim != 1 or not storage.flags.c_contiguous:
        raise CheckpointError("a tensor is said to be the storage of another")
    if len(shape) != len(steps) or any(number < 0 for number in (*shape, *steps, offset)):
        raise CheckpointError(problem("a tensor has an impossible shape", got=(shape, steps)))
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if 0 in shape:
        return np.empty(shape, storage.dtype)
    if last >= storage.size or math.prod(shape) > storage.size:
        raise CheckpointError(problem("a tensor is larger than its storage", got=(shape, steps)))
    return np.lib.stride_tricks.as_strided(
        storage[offset:],
        shape,
        [step * storage.itemsize for step in steps],
        writeable=False,
    )


def _rebuild_typed_tensor(
    storage: NDArray[Any] | pickles.Opaque,
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    _gradient: object,
    _hooks: object,
    dtype: Any,
    *_: object,
) -> NDArray[Any] | pickles.Opaque:
    """torch._utils._rebuild_tensor_v3: of types without a storage of their own, such as FP8."""
    kind = pickles.meaning(dtype)
    if isinstance(kind, np.dtype) and isinstance(storage, np.ndarray) and storage.ndim == 1:
        return rebuild_tensor(storage.view(kind), offset, size, stride)
    return kind if isinstance(kind, pickles.Opaque) else pickles.Opaque("torch._rebuild_tensor_v3")


def _rebuild_parameter(data: Any, *_: object) -> Any:
    return data


def _rebuild_from_type(function: Any, kind: Any, args: Any, *_: object) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor of a class, or one with Python attributes."""
    build, name = pickles.meaning(function), getattr(kind, "name", "?")
    if name not in _TENSOR_CLASSES or build not in _REBUILDERS or not isinstance(args, tuple):
        return pickles.Opaque(name)
    return build(*args)


def record_shape(numbers: Iterable[int] = ()) -> tuple[int, ...]:
    """torch.Size."""
    return tuple(numbers)


_REBUILDERS = (rebuild_tensor, _rebuild_typed_tensor, _rebuild_parameter)
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): record_shape,
    ("torch.storage", "UntypedStorage"): STORAGES["UntypedStorage"],
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    **{("torch", name): dtype for name, dtype in TORCH_DTYPES.items()},
}
