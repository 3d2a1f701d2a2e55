"""Megatron-LM core's distributed checkpoints: one folder of global tensors, in two backends.

zarr:       a folder per tensor with `.zarray` (zarr version 2) and one raw file per chunk
torch_dist: `.metadata`, a pickle that says which part of which tensor lies at which place of
            which `.distcp` file; each part is a torch.save file

Layers of one kind are stacked along a leading axis, and a layer's experts along the next one; here
every one is a tensor of its own again, under the name it has where the core does not stack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive, Region
from launcher_scripts.checkpoint.formats.pickles import PickledObject
from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    Piece,
    SourceTensor,
    check_axes,
)
from launcher_scripts.common.errors import CheckpointError, Problems, lookup, problem
from launcher_scripts.common.files import parse_json

METADATA = "metadata.json"
EXTRA_STATE = "_extra_state"
_MAX_LISTED = 20
# More than any model has.
_MAX_LAYERS = 1 << 14
_MAX_TENSORS = 1 << 18
# A training's checkpoint also holds its optimizers' tensors; of several there is a chain.
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")

_LAYERS = re.compile(r"(?P<stem>(?:.*\.)?layers\.)(?P<rest>\D.*)")
_EXPERTS = re.compile(r"(?P<stem>(?:.*\.)?layers\.\d+\.mlp\.experts\.experts\.)(?P<rest>\D.*)")
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"


class Stored(NamedTuple):
    """The tensors and objects of a distributed checkpoint.

    find_object: name -> the torch.save file of an object that is not a tensor; None without such
    """

    tensors: dict[str, SourceTensor]
    find_object: Callable[[str], Region | None]


def read_saved_tensors(archive: Archive, folder: str) -> dict[str, SourceTensor]:
    """The tensors alone, by name; see read_stored."""
    return read_stored(archive, folder).tensors


def read_stored(archive: Archive, folder: str) -> Stored:
    """Read the distributed checkpoint below `folder` (which ends in `/`).

    Raises CheckpointError for an unknown backend and for missing or damaged parts.
    """
    try:
        metadata = parse_json(archive.read(folder + METADATA))
        backend = str(metadata["sharded_backend"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}{METADATA} of {archive.path} is damaged") from error
    read = lookup(_BACKENDS, backend, "sharded_backend")
    stored = read(archive, folder)
    layers = _unstacked(stored.tensors, _LAYERS, "layers")
    return stored._replace(tensors=_unstacked(layers, _EXPERTS, "experts"))


def _unstacked(
    tensors: Mapping[str, SourceTensor], stack: re.Pattern[str], message: str
) -> dict[str, SourceTensor]:
    """Tensors whose names match `stack` as one for each place on their first axis."""
    result: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        match = stack.fullmatch(name)
        if match is None or not tensor.shape:
            result[name] = tensor
            continue
        max_layers = min(_MAX_LAYERS, _MAX_TENSORS - len(result))
        if tensor.shape[0] > max_layers:
            raise CheckpointError(
                problem(
                    f"{name} has more {message} than a model can have",
                    got=tensor.shape[0],
                    choices=[f"at most {max_layers}"],
                )
            )
        for index in range(tensor.shape[0]):
            result[f"{match['stem']}{index}.{match['rest']}"] = tensor.layer(index)
    return result


def _read_zarr(archive: Archive, folder: str) -> Stored:
    suffix = "/.zarray"
    problems = Problems(f"the distributed checkpoint {archive.path}")
    names = set(archive.names())
    tensors = {}
    for path in sorted(names):
        if not (path.startswith(folder) and path.endswith(suffix)):
            continue
        name = path[len(folder) : -len(suffix)]
        if _OPTIMIZER.match(name):
            continue
        try:
            tensors[name] = _zarr_tensor(archive, path, name, names, problems)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.add(f"{path} is damaged: {error}")
    problems.raise_if_any(CheckpointError)
    return Stored(tensors, lambda _: None)


def _zarr_tensor(
    archive: Archive, path: str, name: str, names: set[str], problems: Problems
) -> SourceTensor:
    values = parse_json(archive.read(path))
    shape, chunks = tuple(values["shape"]), tuple(values["chunks"])
    check_axes(shape, name)
    for key, plain in (("compressor", None), ("filters", None), ("order", "C")):
        if values.get(key) != plain:
            raise ValueError(f"{key} {values[key]!r} is not supported, only {plain!r}")
    is_integer = all(type(number) is int for number in (*shape, *chunks))
    if not is_integer or len(shape) != len(chunks) or min((*shape, 0)) < 0 or min((*chunks, 1)) < 1:
        raise ValueError(f"impossible chunks {chunks} of shape {shape}")
    if values["dtype"] not in _ZARR_DTYPES:
        raise ValueError(problem("unknown dtype", got=values["dtype"], choices=_ZARR_DTYPES))
    dtype = _ZARR_DTYPES[values["dtype"]]
    separator = values.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise ValueError(problem("unknown dimension_separator", got=separator, choices="./"))
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    if math.prod(counts) > len(names):
        raise ValueError(f"its shape {shape} needs {math.prod(counts)} chunks of {chunks}")
    pieces = []
    for index in product(*map(range, counts)):
        if len(problems.messages) > _MAX_LISTED:
            break
        file = path.removesuffix(".zarray") + (separator.join(map(str, index)) or "0")
        if file not in names:
            problems.add("a chunk is missing", got=file)
            continue
        region = archive.region(file)
        if region.size != math.prod(chunks) * dtype.itemsize:
            problems.add("a chunk has another size", got=f"{file}: {region.size} bytes")
            continue
        chunk_values = region.array(dtype, math.prod(chunks)).reshape(chunks)
        start = tuple(i * chunk for i, chunk in zip(index, chunks, strict=True))
        bounds = tuple(slice(0, size - at) for size, at in zip(shape, start, strict=True))
        pieces.append(Piece(start, chunk_values[bounds]))
    if problems.messages:
        return SourceTensor(shape, dtype, ())
    return SourceTensor.of_pieces(shape, pieces, name)


# zarr's names of the types; numpy has no bfloat16.
_ZARR_DTYPES = {dtype.str: dtype for dtype in torch_file.STORAGES.values() if dtype != BFLOAT16}
_ZARR_DTYPES["bfloat16"] = BFLOAT16


def _read_torch_dist(archive: Archive, folder: str) -> Stored:
    path = f"{folder}.metadata"
    origin = f"{path} of {archive.path}"
    metadata = pickles.load_pickle(archive.read(path), origin, _METADATA_GLOBALS)
    pieces: dict[str, list[Piece]] = {}
    objects: dict[str, Any] = {}
    try:
        pickles.check_readable(metadata, origin)
        for key in ("state_dict_metadata", "storage_data"):
            for name, entry in metadata[key].items():
                pickles.check_readable(name, f"a key of {key} in {origin}")
                pickles.check_readable(entry, f"{name} in {key} of {origin}")
        shapes = {
            name: tuple(entry["size"])
            for name, entry in metadata["state_dict_metadata"].items()
            if isinstance(entry, _TensorEntry) and not _OPTIMIZER.match(name)
        }
        _reject_overlaps(metadata["storage_data"], origin)
        for index, location in metadata["storage_data"].items():
            name = index["fqn"]
            if name in shapes and EXTRA_STATE not in name:
                start = index["offset"] if index["offset"] is not None else (0,) * len(shapes[name])
                values = _stored_part(archive, folder, location, name)
                pieces.setdefault(name, []).append(Piece(tuple(start), values))
            elif name not in shapes:
                objects[name] = location
        missing = sorted(name for name in shapes.keys() - pieces.keys() if EXTRA_STATE not in name)
        if missing:
            raise CheckpointError(problem(f"{origin} says no place for some tensors", got=missing))
        tensors = {
            name: SourceTensor.of_pieces(shapes[name], parts, name)
            for name, parts in pieces.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{origin} is damaged: {error!r}") from error

    def find_object(name: str) -> Region | None:
        return _stored(archive, folder, objects[name], name) if name in objects else None

    return Stored(tensors, find_object)


def _reject_overlaps(storage_data: Mapping[Any, Any], origin: str) -> None:
    """Two parts of tensors in one place would be the same values twice."""
    locations = sorted(
        (
            str(location["relative_path"]),
            int(location["offset"]),
            int(location["length"]),
            index["fqn"],
        )
        for index, location in storage_data.items()
    )
    for (file, first, size, name), (other, start, _, second) in pairwise(locations):
        if file == other and start < first + size:
            raise CheckpointError(f"{origin} puts {name} and {second} in one place of {file}")


def _stored_part(archive: Archive, folder: str, location: Any, name: str) -> NDArray[Any]:
    origin = f"{name} in {folder}{location['relative_path']}"
    values = torch_file.load_torch_file(_stored(archive, folder, location, name), origin)
    if not isinstance(values, np.ndarray):
        raise CheckpointError(f"{origin} is not a tensor")
    return values


def _stored(archive: Archive, folder: str, location: Any, name: str) -> Region:
    if location.get("transform_descriptors"):
        raise CheckpointError(f"{name} is stored compressed or encrypted, which is not supported")
    file = folder + str(location["relative_path"])
    return archive.region(file).part(int(location["offset"]), int(location["length"]))


_BACKENDS = {"zarr": _read_zarr, "torch_dist": _read_torch_dist}


class _TensorEntry(PickledObject):
    """torch's TensorStorageMetadata: `size`, the whole shape."""


class _Index(PickledObject):
    """torch's MetadataIndex: `fqn`, `offset`. Is a key, so it is hashed as the object it is."""


_METADATA_GLOBALS: pickles.Globals = {
    (_METADATA_MODULE, "Metadata"): PickledObject,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorEntry,
    (_METADATA_MODULE, "BytesStorageMetadata"): PickledObject,
    (_METADATA_MODULE, "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): PickledObject,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): PickledObject,
    ("torch", "Size"): torch_file.record_shape,
}
