"""A transformers folder: safetensors shards with their index, config.json and what goes with it.

Shards are laid out before they are written, so that several processes can write tensors of one.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.folder import (
    DTYPES,
    WRITE_BYTES,
    FolderWriter,
    fresh_file,
    write_fully,
)
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    ALGORITHM,
    HUGGINGFACE_FORMAT,
    Digest,
    FileEntry,
    add_bytes,
    new_digest,
    stream_threads,
    writing,
)
from launcher_scripts.checkpoint.formats.archive import Archive, Crc32
from launcher_scripts.checkpoint.formats.source_tensor import DTYPES as SAFETENSORS
from launcher_scripts.checkpoint.formats.source_tensor import Workspace
from launcher_scripts.checkpoint.huggingface.tensors import TargetTensor
from launcher_scripts.checkpoint.layout.tasks import MAX_PROCESSES, MIN_BYTES
from launcher_scripts.checkpoint.layout.writing import (
    OnResult,
    Progress,
    UnfitValues,
    run_all,
    strips,
)
from launcher_scripts.checkpoint.sources.huggingface_architectures import CONFIG_NAME, WEIGHT_FILES
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.config.settings import ExportSettings

SHARD = "model-{:05d}-of-{:05d}.safetensors"
INDEX = f"{WEIGHT_FILES[0]}.index.json"
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
# Of a header, as the safetensors library writes it.
_ALIGNMENT = 8


@dataclass(frozen=True)
class ShardTensor:
    """A tensor with its type and its first byte in the file."""

    tensor: TargetTensor
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.tensor.size * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One safetensors file: header, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    tensors: tuple[ShardTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def of(cls, name: str, tensors: Sequence[tuple[TargetTensor, np.dtype[Any]]]) -> Shard:
        header = safetensors_header((tensor.name, tensor.shape, dtype) for tensor, dtype in tensors)
        placed, offset = [], len(header)
        for tensor, dtype in tensors:
            placed.append(ShardTensor(tensor, dtype, offset))
            offset += placed[-1].nbytes
        return cls(name, header, tuple(placed))


def safetensors_header(tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> bytes:
    """The start of a safetensors file with these names, shapes and types, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape, dtype in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def make_shards(
    tensors: Iterable[tuple[TargetTensor, np.dtype[Any]]], max_bytes: int
) -> list[Shard]:
    """Fill files in order; a tensor larger than max_bytes has a file of its own."""
    groups: list[list[tuple[TargetTensor, np.dtype[Any]]]] = [[]]
    filled = 0
    for tensor, dtype in tensors:
        size = tensor.size * dtype.itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, dtype))
        filled += size
    count = len(groups)
    names = [SHARD.format(number, count) for number in range(1, count + 1)]
    names = names if count > 1 else [WEIGHT_FILES[0]]
    return [Shard.of(name, group) for name, group in zip(names, groups, strict=True)]


class HuggingFaceWriter(FolderWriter):
    """Writes a transformers folder.

    config: config.json
    """

    format = HUGGINGFACE_FORMAT
    tp_size = 1

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        shards: Sequence[Shard],
        weight_data_type: str,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.config = config
        self.shards = tuple(shards)
        self.model_type = str(config["model_type"])
        self.weight_data_type = weight_data_type

    def expected_files(self) -> set[str]:
        return {shard.name for shard in self.shards}

    def write_config(self) -> None:
        """Write the index of several shards, and config.json."""
        if len(self.shards) > 1:
            placed = [(shard.name, item) for shard in self.shards for item in shard.tensors]
            index = {
                "metadata": {"total_size": sum(item.nbytes for _, item in placed)},
                "weight_map": {item.tensor.name: name for name, item in placed},
            }
            self.copy(json_bytes(index), INDEX)
        self.copy(json_bytes(self.config), CONFIG_NAME)

    def create(self, shard: Shard) -> ShardDigests:
        """Make a shard's file with its header."""
        path = self.partial / shard.name
        with writing(path), fresh_file(path) as out:
            write_fully(out.fileno(), memoryview(shard.header))
            out.truncate(shard.nbytes)
        return ShardDigests(shard, path)

    def count(self, digests: ShardDigests, position: int) -> None:
        """Count a tensor that is written, and with the last one its shard."""
        shard = digests.shard
        with writing(digests.path):
            digests.add(position)
        if digests.is_complete:
            values = [digest.hexdigest() for digest in digests.digests]
            entry = (values[0], None, None, ALGORITHM, values[1])
            self.add(FileEntry(shard.name, shard.nbytes, *entry))


@dataclass
class ShardDigests:
    """The digests of a shard, which follow the tensors that are written in the file's order.

    So they read what the system still holds in memory, while other processes write.

    written: positions of tensors that are written, but not in the digests
    count:   of the tensors in the digests
    """

    shard: Shard
    path: Path
    written: set[int] = field(default_factory=set)
    count: int = 0

    @cached_property
    def digests(self) -> tuple[Digest, ...]:
        """Begun with the first tensor: threads do not go along into processes that are forked."""
        return new_digest(threads=stream_threads()), Crc32()

    @property
    def is_complete(self) -> bool:
        return self.count == len(self.shard.tensors)

    def add(self, position: int) -> None:
        tensors, start = self.shard.tensors, self.count
        self.written.add(position)
        while self.count in self.written:
            self.written.remove(self.count)
            self.count += 1
        if self.count > start:
            last = tensors[self.count - 1]
            first = tensors[start].offset if start else 0
            end = last.offset + last.nbytes
            add_bytes(self.digests, self.path, first, end, stream_threads())


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """A file as transformers writes it: sorted, indented, ending in a new line."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class _Job:
    """A tensor to write, by the positions of its shard and in it."""

    shard: int
    position: int


@dataclass(frozen=True)
class _FolderWork:
    """Takes one job after the other in one process."""

    writer: HuggingFaceWriter
    archive: Archive
    allow_nonfinite: bool
    workspace: Workspace = field(default_factory=Workspace)
    files: dict[str, int] = field(default_factory=dict)

    def run(self, job: _Job, on_result: OnResult[_Job | UnfitValues]) -> None:
        """Write a tensor at its offset; `on_result` gets the job when it is done."""
        item = self.writer.shards[job.shard].tensors[job.position]
        tasks = [part.task for part in item.tensor.parts]
        for task in tasks:
            for values in task.views():
                self.archive.check(values, task.name)
        try:
            self._write(item, self.writer.partial / self.writer.shards[job.shard].name)
            on_result(job)
        except UnfitValues as error:
            on_result(error.with_traceback(None))
        for task in tasks:
            for values in task.views():
                self.archive.check_size(values)
                self.archive.forget(values)

    def _write(self, item: ShardTensor, path: Path) -> None:
        offset = item.offset
        with writing(path):
            if path.name not in self.files:
                self.files[path.name] = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            for strip in _strips(item, self.workspace, allow_nonfinite=self.allow_nonfinite):
                data = np.ascontiguousarray(strip).data.cast("B")
                while data:
                    count = os.pwrite(self.files[path.name], data[:WRITE_BYTES], offset)
                    data, offset = data[count:], offset + count
        if offset != item.offset + item.nbytes:
            raise CheckpointError(f"{item.tensor.name} has another size than its shape")


def _strips(
    item: ShardTensor, workspace: Workspace, *, allow_nonfinite: bool
) -> Iterator[NDArray[Any]]:
    """The bytes of a tensor as they are written, in pieces."""
    for group in item.tensor.groups(workspace):
        arrays = [np.atleast_1d(array) for array in group]
        name, dtype = item.tensor.name, item.dtype
        yield from strips(arrays, dtype, name, workspace, allow_nonfinite=allow_nonfinite)


def verify_shards(folder: Path, shards: Sequence[Shard], settings: ExportSettings) -> None:
    """Compare the files of a folder with what the source's tensors become, bit by bit.

    Raises CheckpointError with every tensor that differs.
    """
    problems = Problems(f"the exported checkpoint {folder}")
    per_thread = threading.local()

    def start() -> None:
        per_thread.workspace = Workspace()

    def same(shard: Shard, item: ShardTensor) -> bool:
        with (folder / shard.name).open("rb") as file:
            file.seek(item.offset)
            for strip in _strips(item, per_thread.workspace, allow_nonfinite=True):
                expected = np.ascontiguousarray(strip).data.cast("B")
                if file.read(len(expected)) != expected:
                    return False
            return file.tell() == item.offset + item.nbytes

    pairs = [(shard, item) for shard in shards for item in shard.tensors]
    for shard in shards:
        with (folder / shard.name).open("rb") as file:
            if file.read(len(shard.header)) != shard.header:
                problems.add(f"{shard.name} has another header")
    workers = min(settings.processes, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, initializer=start) as pool:
        for (_, item), sound in zip(pairs, pool.map(same, *zip(*pairs, strict=True)), strict=True):
            if not sound:
                problems.add(f"{item.tensor.name} differs from the source")
    problems.raise_if_any(CheckpointError)


def write_shards(
    writer: HuggingFaceWriter, archive: Archive, settings: ExportSettings, progress: Progress
) -> list[UnfitValues]:
    """Write all shards that an interrupted run has not; returns which values do not fit."""
    digests: dict[int, ShardDigests] = {}
    jobs: list[_Job] = []
    for number, shard in enumerate(writer.shards):
        if writer.holds_file(shard.name):
            progress.add(sum(item.nbytes for item in shard.tensors))
            continue
        digests[number] = writer.create(shard)
        # In the order of the files: digests follow, and an interruption leaves complete shards.
        jobs += [_Job(number, position) for position in range(len(shard.tensors))]
    unfit: list[UnfitValues] = []

    def on_result(result: _Job | UnfitValues) -> None:
        if isinstance(result, UnfitValues):
            unfit.append(result)
            return
        progress.add(writer.shards[result.shard].tensors[result.position].nbytes)
        writer.count(digests[result.shard], result.position)

    work = _FolderWork(writer, archive, settings.allow_nonfinite)
    count = min(settings.processes, MAX_PROCESSES, len(os.sched_getaffinity(0)), len(jobs))
    run_all(jobs, work.run, on_result, 0 if progress.total < MIN_BYTES else count)
    return unfit


def tensor_dtype(tensor: TargetTensor, weight_data_type: str, *, local: bool) -> np.dtype[Any]:
    """The type that a tensor is written in.

    local: as it is in the source's files, where that is a type of floats
    """
    if local and tensor.stored_dtype is not None:
        return np.dtype(tensor.stored_dtype)
    return DTYPES[weight_data_type]
