"""Weights of a training for the model that is served: a folder, or tensors in the memory of GPUs.

Their names are transformers'. A rank reads its part as an export of the folder would have it. Of
tensors on GPUs the folder's file has names and places without values: the readers of files make
views of it, and each view is the same view of the other process's memory.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import identity
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import (
    BFLOAT16,
    HEADER_LENGTH,
    parse_header,
)
from launcher_scripts.checkpoint.layout.layouts import rank_columns
from launcher_scripts.checkpoint.layout.tasks import Task, plan_tasks
from launcher_scripts.checkpoint.layout.writing import strips
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems
from launcher_scripts.common.files import parse_json
from launcher_scripts.contract.requests import HANDLES
from launcher_scripts.engine.model.weight_loader import Stored
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import DIALECT
from launcher_scripts.models.family import WeightSpec

REFIT_FILE = "model.safetensors"  # of tensors that came by a socket
VIEWED = {
    BFLOAT16: torch.bfloat16,
    np.dtype("<f2"): torch.float16,
    np.dtype("<f4"): torch.float32,
}


@dataclass(frozen=True)
class RefitSource:
    """A transformers folder of the model that is served.

    served: the export that the server was started with: types of values, and adapters beside the
            weights, are its own;  tasks: by the names of their tensors
    memory: where the folder's file lacks the values
    """

    folder: Path
    served: FTCheckpoint
    tasks: Mapping[str, Task]
    memory: SharedTensors | None = None

    @classmethod
    def of(
        cls, folder: Path, served: FTCheckpoint, memory: SharedTensors | None = None
    ) -> RefitSource:
        """Open the folder; memory: that it names, where it is open already.

        Raises CheckpointError with every tensor that is missing, unknown or of another shape, and
        ConfigError where it is another model.
        """
        # The readers of all formats are loaded when they are needed.
        from launcher_scripts.checkpoint.export import open_source
        from launcher_scripts.checkpoint.huggingface.config_json import config_differences

        checkpoint = open_source(Archive(folder), "huggingface")
        problems = Problems(f"the weights of {folder} for the model that is served")
        for difference in config_differences(checkpoint.config, served.config):
            problems.add(difference)
        problems.raise_if_any(ConfigError)
        rows = family_of(checkpoint.config).weights(checkpoint.config)
        tasks = plan_tasks(checkpoint, rows, f"the weights of {folder}")
        memory = memory or SharedTensors.of(folder)
        return cls(folder, served, {task.name: task for task in tasks}, memory)

    def complete(self) -> None:
        """Give the folder's file the values that are not read as views of other memory."""
        if self.memory is None:
            return
        units = (unit for task in self.tasks.values() for block in task.blocks() for unit in block)
        if any(self.memory.view(unit) is None for unit in units):
            self.memory.write(max(item.nbytes for item in self.memory.memory))

    @property
    def identity(self) -> str:
        """Returns the digest of the names, sizes and times of the files."""
        return identity({}, [self.folder])

    def read(self, spec: WeightSpec, layer: int | None, tp_size: int, tp_rank: int) -> Stored:
        """Return a rank's part of a tensor, as an export of the folder would have it."""
        name = spec.tensor_name(layer)
        if DIALECT in spec.sources:
            return self.served.read(spec, layer, tp_rank)
        if (task := self.tasks.get(name)) is None:
            raise CheckpointError(f"{self.folder} has nothing that {name} is made of")
        config = task.config.of_layer(layer)
        shape = spec.shape_on(config, tp_size)
        columns = rank_columns(spec, config, tp_size, tp_rank, task.blocks())
        views = [None if self.memory is None else self.memory.view(item) for item in columns]
        present = [view for view in views if view is not None]
        dtype = self.served.dtype
        if present and len(present) == len(views):
            # Copies, since what is exchanged with them is not the other process's.
            turned = present[0].dim() == 2  # as the rows stand in memory
            parts = [view.t() if turned else view for view in present]
            full = torch.cat(parts, dim=0 if turned else -1).to(VIEWED[dtype])
            return (full.t() if turned else full).reshape(shape)
        part = in_file_order(columns, dtype)
        if part is not None:
            return part.reshape(shape)
        values = [np.array(strip).reshape(-1) for strip in strips(columns, dtype, name)]
        result: Stored = np.concatenate(values).reshape(shape)
        return result


class SharedTensors:
    """Tensors of another process in the memory of GPUs, of which a safetensors file has the names.

    path: the file;  offsets, memory: of each tensor its first byte in the file, and its bytes
    """

    def __init__(self, path: Path, memory: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError where they do not fit the file's header."""
        self.path = path
        header, _, start = read_header(path)
        problems = Problems("the tensors in the memory of GPUs")
        for name in sorted(memory.keys() ^ header.keys()):
            problems.add(f"{name} is in the memory or in the header alone")
        spans: dict[int, Tensor] = {}
        for name in memory.keys() & header.keys():
            first, last = header[name]["data_offsets"]
            if memory[name].nbytes != last - first:
                got, choices = memory[name].nbytes, [f"{last - first} bytes"]
                problems.add(f"{name} has another size", got=got, choices=choices)
            spans[start + first] = memory[name]
        problems.raise_if_any(CheckpointError)
        self.offsets = sorted(spans)
        self.memory = [spans[offset] for offset in self.offsets]

    @classmethod
    def of(cls, folder: Path) -> SharedTensors | None:
        """Return those that a refit's folder names; None where its file has the values itself.

        Raises CheckpointError where their memory cannot be opened.
        """
        path = folder / REFIT_FILE
        metadata = read_header(path)[1] if path.is_file() else {}
        handles = metadata.get(HANDLES) if isinstance(metadata, dict) else None
        return None if handles is None else cls(path, opened_memory(handles))

    def view(self, array: NDArray[Any]) -> Tensor | None:
        """Return the view of the device's memory for one of the mapped file; None for an array
        that is none, or of a type that torch lacks.
        """
        mapping: Any = array
        while mapping is not None and not isinstance(mapping, mmap.mmap):
            mapping = getattr(mapping, "obj", None) or getattr(mapping, "base", None)
        dtype = VIEWED.get(array.dtype)
        if mapping is None or dtype is None or not array.size:
            return None
        offset = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
        index = bisect_right(self.offsets, offset) - 1
        first = offset - self.offsets[index]
        steps = [stride // array.itemsize for stride in array.strides]
        full = self.memory[index].view(dtype)
        return full.as_strided(array.shape, steps, first // array.itemsize)

    def write(self, count: int) -> None:
        """Give the file the first `count` bytes of each tensor.

        They come from a device in one copy, which does not wait for the steps there: one by one
        each would wait for the step under way.
        """
        with self.path.open("r+b") as file:
            for device, items in self._by_device().items():
                parts = [memory[:count] for _, memory in items]
                with on_side_stream(device):
                    together = torch.cat(parts).cpu()
                values = together.split([part.numel() for part in parts])
                for (offset, _), part in zip(items, values, strict=True):
                    file.seek(offset)
                    file.write(part.numpy())

    def _by_device(self) -> dict[torch.device, list[tuple[int, Tensor]]]:
        result: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for offset, memory in zip(self.offsets, self.memory, strict=True):
            result.setdefault(memory.device, []).append((offset, memory))
        return result


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], Any, int]:
    """Return entries and metadata of a safetensors file, and the offset of its values."""
    with path.open("rb") as file:
        (length,) = HEADER_LENGTH.unpack(file.read(HEADER_LENGTH.size))
        return *parse_header(file.read(length)), HEADER_LENGTH.size + length


def opened_memory(text: str) -> dict[str, Tensor]:
    """Return tensors of another process by their names, uint8 on the devices where they are.

    text: JSON, see HANDLES of the client.  Raises CheckpointError.
    """
    result, numbers = {}, cache(device_of)
    try:
        for name, entry in parse_json(text.encode()).items():
            uuid, handle, size, offset, counter, number, event, waits, first, count = entry
            storage = torch.UntypedStorage._new_shared_cuda(
                numbers(uuid),
                bytes.fromhex(handle),
                size,
                offset,
                bytes.fromhex(counter),
                number,
                bytes.fromhex(event),
                waits,
            )
            full = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            result[name] = full[first : first + count]
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        message = f"the tensors in the memory of GPUs cannot be opened: {error}"
        raise CheckpointError(message) from error
    return result


def device_of(uuid: str) -> int:
    """Return the number that a GPU has in this process. Raises ValueError where it is not seen."""
    present = [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    return present.index(uuid)


def in_file_order(columns: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> Stored | None:
    """Return arrays side by side with as few copies as their order in memory allows, and turned
    where all of them are transposed matrices; None where `strips` has to bring them into order.
    """
    if any(column.dtype != dtype or column.ndim != 2 for column in columns):
        return None
    if len(columns) == 1 and columns[0].flags.c_contiguous:
        return columns[0]
    rows = [column.T for column in columns]
    if any(part.strides[1] != dtype.itemsize for part in rows):
        return None
    parts = [rows[0]]
    for part in rows[1:]:
        last = parts[-1]
        follows = last.flags.c_contiguous and last.ctypes.data + last.nbytes == part.ctypes.data
        if follows and part.flags.c_contiguous:
            shape = len(last) + len(part), last.shape[1]
            parts[-1] = np.lib.stride_tricks.as_strided(last, shape, writeable=False)
        else:
            parts.append(part)
    result: Stored = np.concatenate(parts).T if len(parts) > 1 else np.ascontiguousarray(*parts).T
    return result


def on_side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what this thread has a GPU do does not wait for steps; at the end it is done."""
    return _SideStream(device) if device.type == "cuda" else nullcontext()


class _SideStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._context.__exit__(*error)
