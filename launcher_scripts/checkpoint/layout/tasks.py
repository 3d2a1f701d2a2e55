"""Tasks of an export, one per tensor: all are planned before anything is written.

Every row of the weight table claims its source tensors. A required row whose tensors are not
there, a source tensor no row claims, and a shape that does not fit are all reported at once.

Tasks are independent, so that several processes share them. Each process holds one strip of one
file in memory, and a copy of a tensor only where the source has it in pieces.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, WeightFile
from launcher_scripts.checkpoint.fastertransformer.manifest import FileEntry
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    FLOATS,
    SourceTensor,
    Workspace,
    copyable,
    dtype_name,
    float32,
    widened,
)
from launcher_scripts.checkpoint.layout.inverses import Blocks
from launcher_scripts.checkpoint.layout.layouts import (
    LAYOUTS,
    Layout,
    full_blocks,
    rank_columns,
)
from launcher_scripts.checkpoint.layout.source_checkpoint import SourceCheckpoint
from launcher_scripts.checkpoint.layout.writing import (
    NonfiniteValues,
    OnResult,
    Progress,
    UnfitValues,
    run_all,
    strips,
)
from launcher_scripts.common.errors import CheckpointError, Problems, lookup
from launcher_scripts.common.hosts import Gpu
from launcher_scripts.config.settings import AUTO, ExportSettings
from launcher_scripts.models.family import ModelConfig, Partition, Source, WeightSpec

# The dialect of tensors that have the table's own names and are as stored.
STORED = "stored"
MAX_PROCESSES = 8
MIN_BYTES = 128 << 20  # of the files, for which processes are worth their start
_MAX_LISTED = 20
_CHUNK = 1 << 20


class Change(Protocol):
    """A learned change of a stored tensor, applied when that is read."""

    def apply(self, blocks: Blocks) -> Blocks:
        """The blocks (see layouts.py), changed in float32."""
        ...

    def sources(self) -> Iterable[tuple[str, SourceTensor]]:
        """Return the tensors that it is made of, by names for errors."""
        ...


@dataclass(frozen=True)
class Scale:
    """A vector that multiplies a stored tensor: one block of its columns, or its rows.

    block: which block of the columns (see layouts.py); None: the rows
    """

    vector: SourceTensor
    block: int | None

    def sources(self) -> Iterable[tuple[str, SourceTensor]]:
        return [("a vector of IA3", self.vector)]

    def apply(self, blocks: Blocks) -> Blocks:
        """The blocks, scaled in float32."""
        values = float32(self.vector.read())
        if self.block is None:
            return [[float32(unit) * values[:, None] for unit in block] for block in blocks]
        scaled, start = [], 0
        for unit in blocks[self.block]:
            stop = start + unit.shape[-1]
            scaled.append(float32(unit) * values[start:stop])
            start = stop
        # Columns that stand side by side in one file have one type.
        return [
            scaled if number == self.block else [float32(unit) for unit in block]
            for number, block in enumerate(blocks)
        ]


@dataclass(frozen=True)
class Task:
    """One tensor to export: a row of the table, its layer, and the source tensors it is made of.

    keys:    the names of these in the source
    changes: what learning left for the stored form, in order
    """

    spec: WeightSpec
    layer: int | None
    config: ModelConfig
    layout: Layout
    keys: tuple[str, ...]
    tensors: tuple[SourceTensor, ...]
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.tensor_name(self.layer)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def views(self) -> Iterator[NDArray[Any]]:
        """Iterate over the pieces of the tensor in the source's files."""
        for tensor in self.tensors:
            for piece in tensor.pieces:
                yield piece.values

    def files(self, tp_size: int) -> list[WeightFile]:
        """The files that it becomes for `tp_size` ranks."""
        return [WeightFile(self.spec, self.layer, rank) for rank in self.spec.tp_ranks(tp_size)]

    def blocks(self, workspace: Workspace | None = None) -> Blocks:
        """The stored form, still whole, as views of the source where possible.

        workspace: memory for tensors that the source has in pieces
        """
        tensors = enumerate(self.tensors)
        blocks = self._applied([tensor.read(workspace, f"source {n}") for n, tensor in tensors])
        for change in self.changes:
            blocks = change.apply(blocks)
        return blocks

    def check(self, problems: Problems) -> None:
        """Note source tensors that are not floats, and a stored form of another shape."""
        for tensor in self.tensors:
            if tensor.dtype not in FLOATS:
                problems.add(f"{self.name} is made of {dtype_name(tensor.dtype)} values")
                return
        # The layout is tried on arrays of the same shapes that take no memory.
        hollow = [np.broadcast_to(np.zeros((), t.dtype), t.shape) for t in self.tensors]
        try:
            if fits_spec(self._applied(hollow), self.spec, self.config):
                return
        except (ValueError, IndexError):
            pass  # the layout cannot take the shapes apart
        expected = self.spec.shape_on(self.config, 1)
        message = "{} has another shape than the hyperparameters say"
        for key, tensor, shape in self._unfit_blocks(expected):
            problems.add(message.format(key), got=tensor.shape, choices=[shape])
        if not self._unfit_blocks(expected):
            problems.add(
                message.format(", ".join(self.keys) or self.name),
                got=[tensor.shape for tensor in self.tensors],
                choices=[f"what makes {expected}"],
            )

    def _unfit_blocks(
        self, expected: tuple[int, ...]
    ) -> list[tuple[str, SourceTensor, tuple[int, ...]]]:
        """Name, tensor and right shape of the sources that do not fit, where each is one block."""
        axes = self.spec.blocks
        if len(axes) != len(self.tensors):
            return []
        shapes = [(int(getattr(self.config, axis)), *reversed(expected[:-1])) for axis in axes]
        sources = zip(self.keys, self.tensors, shapes, strict=True)
        return [source for source in sources if source[1].shape != source[2]]

    def _applied(self, values: Sequence[NDArray[Any]]) -> Blocks:
        return stored_blocks(self.layout, values, self.spec, self.config)


def stored_blocks(
    layout: Layout, values: Sequence[NDArray[Any]], spec: WeightSpec, config: ModelConfig
) -> Blocks:
    """The stored form of the source tensors of one row, which lie as `layout` says."""
    result = layout.apply(values, config)
    return full_blocks(spec, config, result) if isinstance(result, np.ndarray) else result


def fits_spec(blocks: Blocks, spec: WeightSpec, config: ModelConfig) -> bool:
    """True if the blocks are the row's, each of its own size along the last axis and of the row's
    sizes along the others: nothing is repeated to fill a row.

    Raises IndexError for a block that has no axis.
    """
    expected = spec.shape_on(config, 1)
    sizes = [sum(unit.shape[-1] for unit in block) for block in blocks]
    sides = {unit.shape[:-1] for block in blocks for unit in block}
    if spec.blocks and sizes != [int(getattr(config, axis)) for axis in spec.blocks]:
        return False
    return sides == {expected[:-1]} and sum(sizes) == expected[-1]


def plan_tasks(
    checkpoint: SourceCheckpoint, specs: Iterable[WeightSpec], origin: str
) -> list[Task]:
    """One task per tensor to write.

    origin: what the checkpoint is, for errors
    Raises CheckpointError with every tensor that is missing, unclaimed or of a wrong shape.
    """
    specs = list(specs)
    names = checkpoint.names()
    problems = Problems(origin)
    _note_impossible_depth(specs, checkpoint.config, names, problems)
    tasks: list[Task] = []
    claimed: set[str] = set()
    unread: list[str] = []
    for spec in specs:
        source = source_of(spec, checkpoint.dialects)
        if source is None:
            unread += [spec.name] if spec.required else []
            continue
        for layer in spec.layer_numbers(checkpoint.config):
            task, keys = _task(checkpoint, spec, layer, source, problems)
            claimed.update(keys)
            if task is not None:
                task.check(problems)
                tasks.append(task)
    for name in unread:
        problems.add(f"{'/'.join(checkpoint.dialects)} has no row for {name}")
    unclaimed = sorted({checkpoint.stored_name(name) for name in names - claimed})
    problems.add_first(
        [f"{name} is a tensor this model should not have" for name in unclaimed], _MAX_LISTED
    )
    problems.raise_if_any(CheckpointError)
    return tasks


def _note_impossible_depth(
    specs: Sequence[WeightSpec], config: ModelConfig, names: set[str], problems: Problems
) -> None:
    """Raise at once where there are fewer tensors than layers: a list of all that is missing
    would fill the memory."""
    for key in {spec.layers for spec in specs if spec.per_layer}:
        if getattr(config, key) > len(names):
            problems.add(
                f"{key} is more than there are tensors",
                got=getattr(config, key),
                choices=[f"at most {len(names)}"],
            )
    problems.raise_if_any(CheckpointError)


def source_of(spec: WeightSpec, dialects: Sequence[str]) -> Source | None:
    """Return the source of a row's tensors: the first of the dialects that has one."""
    if STORED in dialects:
        return Source((spec.name,))
    return next((spec.sources[name] for name in dialects if name in spec.sources), None)


def _task(
    checkpoint: SourceCheckpoint,
    spec: WeightSpec,
    layer: int | None,
    source: Source,
    problems: Problems,
) -> tuple[Task | None, list[str]]:
    layout = lookup(LAYOUTS, source.layout, "layout")
    keys = [key if layer is None else key.replace("*", str(layer)) for key in source.keys]
    stored = tuple(checkpoint.stored_name(key) for key in keys)
    sources = []
    for key in keys:
        try:
            partition = Partition.REPLICATED if layout.full else spec.partition
            sources.append(checkpoint.find(key, partition, layout.sections))
        except CheckpointError as error:
            problems.add(f"{key}: {error}")
            return None, keys
    missing = [name for name, tensor in zip(stored, sources, strict=True) if tensor is None]
    if missing and (spec.required or len(missing) < len(keys)):
        problems.add(f"{', '.join(missing)} is missing")
    if missing:
        return None, keys
    tensors = tuple(tensor for tensor in sources if tensor is not None)
    config = checkpoint.config.of_layer(layer)
    return Task(spec, layer, config, layout, stored, tensors), keys


def write_all(
    tasks: Sequence[Task],
    writer: FTWriter,
    archive: Archive,
    progress: Progress,
    settings: ExportSettings,
) -> dict[str, UnfitValues]:
    """Largest tensors first, in no more processes than there are processors, or help.

    Returns by name what is wrong with the tensors whose values cannot be written.
    """
    ordered = sorted(tasks, key=lambda task: task.nbytes, reverse=True)
    work = _Work(writer, archive, allow_nonfinite=settings.allow_nonfinite)
    unfit: dict[str, UnfitValues] = {}

    def on_result(result: FileEntry | _Unfit | int) -> None:
        if isinstance(result, _Unfit):
            unfit[result.name] = result.error
        elif isinstance(result, FileEntry):
            writer.add(result)
            progress.add(result.bytes)
        else:
            progress.add(result)

    count = min(settings.processes, MAX_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    # Also one process alone: a read beyond the end of a file that was cut ends it, not this one.
    run_all(ordered, work.run, on_result, 0 if progress.total < MIN_BYTES else count)
    return unfit


@dataclass(frozen=True)
class _Unfit:
    """A tensor whose values cannot be written."""

    name: str
    error: UnfitValues


@dataclass(frozen=True)
class _Work:
    """A queue of tasks, shared by processes."""

    writer: FTWriter
    archive: Archive
    allow_nonfinite: bool
    workspace: Workspace = field(default_factory=Workspace)

    def run(self, task: Task, on_result: OnResult[FileEntry | _Unfit | int]) -> None:
        """Write a tensor's files; `on_result` gets each, and the bytes of those that are there."""
        try:
            self._write(task, on_result)
        except UnfitValues as error:
            on_result(_Unfit(task.name, error.with_traceback(None)))  # which holds the tensor
        for values in task.views():
            self.archive.check_size(values)
            self.archive.forget(values)

    def _write(self, task: Task, on_result: OnResult[FileEntry | _Unfit | int]) -> None:
        spec, writer = task.spec, self.writer
        files = task.files(writer.tp_size)
        missing = [file for file in files if not writer.holds(file)]
        shape = spec.shape_on(task.config, writer.tp_size)
        on_result(int(np.prod(shape)) * writer.dtype.itemsize * (len(files) - len(missing)))
        if not missing:
            return
        for values in task.views():
            self.archive.check(values, task.name)
        blocks = task.blocks(self.workspace)
        for file in missing:
            columns = rank_columns(spec, task.config, writer.tp_size, file.tp_rank, blocks)
            pieces = strips(
                columns,
                writer.dtype,
                task.name,
                self.workspace,
                allow_nonfinite=self.allow_nonfinite,
            )
            on_result(writer.write_file(file, pieces))


def reject_unfit(tasks: Sequence[Task], unfit: Mapping[str, UnfitValues], origin: str) -> None:
    """Raise one CheckpointError for all of `unfit`, if there are any.

    unfit:  name of a task -> what is wrong with its values
    origin: what the tasks are of
    """
    lines: dict[str, str | None] = {}  # with the key to change; a tensor may have several tasks
    for task in tasks:
        error = unfit.get(task.name)
        result = list(_nonfinite(task)) if isinstance(error, NonfiniteValues) else []
        lines |= dict.fromkeys(result, "export.model.allow_nonfinite")
        if error is not None and not result:
            lines[str(error)] = None
    problems = Problems(origin)
    for line, change in list(lines.items())[:_MAX_LISTED]:
        problems.add(line, change=change)
    if len(lines) > _MAX_LISTED:
        problems.add(f"and {len(lines) - _MAX_LISTED} more tensors")
    problems.raise_if_any(CheckpointError)


def _nonfinite(task: Task) -> Iterator[str]:
    """A line per source tensor with values that are NaN or infinite; none if they become so."""
    changed = [source for change in task.changes for source in change.sources()]
    for key, tensor in [*zip(task.keys, task.tensors, strict=True), *changed]:
        values = tensor.read()
        if count := _count(values):
            yield f"{key} has {count} NaN or infinite values of {values.size}"


def _count(values: NDArray[Any]) -> int:
    """Count the values that are not finite; only a part of them is copied at a time."""
    rows = copyable(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    step = max(_CHUNK // max(rows.shape[1], 1), 1)
    count = 0
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step]).view(values.dtype)
        count += part.size - int(np.isfinite(widened(part)).sum())
    return count


_TYPES = {np.dtype("<f8"): "fp32", np.dtype("<f4"): "fp32", np.dtype("<f2"): "fp16"}
_TYPES[BFLOAT16] = "bf16"
T5_OVERFLOW = (
    "T5 is known to overflow in fp16: activations above 65,504 become infinite, and answers empty "
    "or wrong; {key}=bf16 (or fp32) has the range"
)


def checkpoint_type(tasks: Iterable[Task]) -> str:
    """Returns fp32, fp16 or bf16: the type of most stored values.

    Quantized values have no such type; the values beside them decide. Without any, it is fp32.
    """
    counts: Counter[str] = Counter()
    for task in tasks:
        for tensor in task.tensors:
            name = _TYPES.get(tensor.stored_dtype) if tensor.stored_dtype is not None else None
            if name is not None:
                counts[name] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default="fp32")


def compute_type(settings: ExportSettings, weight_data_type: str, gpus: Iterable[Gpu]) -> str:
    """Returns the type that the engine computes in; `auto` is the type of the weights.

    float32 becomes bf16 where every GPU has it, which a printed note says.
    """
    if settings.data_type != AUTO:
        return settings.data_type
    gpus = tuple(gpus)
    on_gpu = bool(gpus) and settings.device != "cpu"
    if weight_data_type == "fp32" and on_gpu and all(gpu.has_bf16 for gpu in gpus):
        print(
            "note: the weights are float32, and the GPUs compute in bf16; "
            "export.triton_deployment.data_type=fp32 computes as the checkpoint is stored",
            flush=True,
        )
        return "bf16"
    return weight_data_type


def range_notes(settings: ExportSettings, stored: str, *, is_t5: bool) -> list[str]:
    """Returns notes on types that were set by hand, or that T5 overflows in.

    stored: the checkpoint's own type
    """
    notes = []
    for name in ("weight_data_type", "data_type"):
        value, key = getattr(settings, name), settings.key_of(name)
        if value == "fp16" and stored == "bf16":
            notes.append(
                f"{key} is fp16 and the checkpoint is bf16: values above 65,504 do not fit; "
                f"{key}=auto keeps bf16"
            )
        computed = stored if value == AUTO else value
        if name == "data_type" and computed == "fp16" and is_t5:
            notes.append(T5_OVERFLOW.format(key=key))
    return notes
