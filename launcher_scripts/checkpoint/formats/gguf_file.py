"""GGUF files: a reader with bounds, and metadata with the types that they must have.

The metadata of a GGUF file's architecture, each value with the type it must have.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Which of them llama.cpp reads, and
what absent ones mean, is in `load_hparams` of its src/llama-model.cpp and in src/models/.

gguf's reader of files, with bounds: it takes the lengths and places in a file as they come.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import glob
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    ReaderTensor,
    dequantize,
)
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.source_tensor import check_axes
from launcher_scripts.common.errors import CheckpointError, Problems, problem

_REQUIRED = object()
# Fields that say nothing about what a decoder computes, or nothing that tensors do not say.
IRRELEVANT = frozenset(
    {
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "pooling_type",
    }
)
# Fields that may change the model, and the values with which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}


class Fields:
    """The fields `<architecture>.*` of an open file; wrong and missing ones are reported at once.

    problems: what is wrong with the file so far
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self.reader = reader
        self.problems = Problems(f"the GGUF file {path}")
        self._read: set[str] = set()
        self.architecture = str(self.value("general.architecture", ""))

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a whole key."""
        entry = self.reader.get_field(key)
        if entry is None:
            if default is _REQUIRED:
                self.problems.add(f"missing field {key}")
                return 1
            return default
        try:
            return entry.contents()
        except UnicodeDecodeError:
            self.problems.add(f"field {key} is not text")
            return 1

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of `<architecture>.<name>`."""
        self._read.add(name)
        return self.value(f"{self.architecture}.{name}", default)

    def size(self, name: str, default: Any = _REQUIRED, *, largest: bool = False) -> int:
        """A whole number from 1 on; of a list with one value per layer, the one that all share.

        largest: of a list the largest one
        """
        result = self.get(name, default)
        is_list = isinstance(result, list) and len(result) > 0
        if is_list and largest and all(type(one) is int for one in result):
            result = max(result)
        elif is_list and all(one == result[0] for one in result):
            result = result[0]
        if type(result) is int and result > 0:
            return result
        self.problems.add(f"{name} must be a whole number from 1 on", got=result)
        return 1

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A number: the shortest decimal that gives the float32 that is stored."""
        result = self.get(name, default)
        if type(result) in (int, float):
            return float(str(np.float32(result)))
        self.problems.add(f"{name} must be a number", got=result)
        return 1.0

    def of_layer(self, name: str, layer: int, default: int) -> int:
        """A number of a layer, of all layers together, or the default."""
        result = self.get(name, default)
        if isinstance(result, list):
            result = result[layer] if layer < len(result) else default
        return result if type(result) is int else default

    def text(self, name: str, default: str) -> str:
        result = self.get(name, default)
        if isinstance(result, str):
            return result
        self.problems.add(f"{name} must be a text", got=result)
        return default

    def reject_others(self) -> None:
        """Report every field of the architecture that was not read and may change the model."""
        prefix = f"{self.architecture}."
        for key in sorted(self.reader.fields):
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in self._read or name in IRRELEVANT:
                continue
            value = self.value(key)
            if value not in NEUTRAL.get(name, ()):
                self.problems.add(f"field {key} is not supported", got=value)

    def raise_problems(self) -> None:
        """Raise CheckpointError for all that was wrong."""
        self.problems.raise_if_any(CheckpointError)


# Items of all arrays of a file. The largest vocabularies have a few 100,000 tokens and merges, and
# every item becomes an object of its own.
_MAX_ITEMS = 1 << 22
# Files have some 50 fields, and up to a few thousand tensors.
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 16


class _BoundedReader(GGUFReader):
    """A GGUF file in which nothing is larger than the file, and no two tensors share a place."""

    _items_left = _MAX_ITEMS

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, and a value of it at byte {end}")
        return super()._get(int(offset), dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) == GGUFValueType.ARRAY:
            if GGUFValueType(self._get(orig_offs, np.uint32)[0]) == GGUFValueType.ARRAY:
                raise ValueError("it has arrays of arrays")
            self._items_left -= int(self._get(orig_offs + 4, np.uint64)[0])
            if self._items_left < 0:
                raise ValueError(f"its arrays have more than {_MAX_ITEMS} items")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        if count > _MAX_FIELDS:
            raise ValueError(f"it has {count} fields, more than {_MAX_FIELDS}")
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > _MAX_TENSORS:
            raise ValueError(f"it has {count} tensors, more than {_MAX_TENSORS}")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        if self.byte_order != "I":
            raise ValueError("its numbers are of the other byte order")
        _check_types(fields)
        super()._build_tensors(start_offs, fields)
        end = start_offs
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end:
                raise ValueError(f"{tensor.name} lies in another tensor or in the header")
            end = tensor.data_offset + tensor.n_bytes


def readable_types() -> dict[int, str]:
    """Number -> name of every type of tensors whose values gguf can give back."""
    result = {}
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros(size, np.uint8), kind)
        except NotImplementedError:
            continue
        result[int(kind)] = kind.name
    return result


def read_tensor(
    tensor: ReaderTensor, index: int | None = None, columns: slice | None = None
) -> NDArray[Any]:
    """The values as float32, rows as output features: a view of the file where it has them so.

    index: the one that is wanted along the first axis; default: all
    columns: of a matrix; where blocks begin and end with them, no other one is dequantised
    """
    data = tensor.data if index is None else tensor.data[index]
    block, size = GGML_QUANT_SIZES[tensor.tensor_type]
    if data.dtype != np.uint8:
        size = 1
    if columns is not None and columns.start % block == columns.stop % block == 0:
        data = data[:, columns.start // block * size : columns.stop // block * size]
        columns = None
    values = dequantize(data, tensor.tensor_type).astype(np.float32, copy=False)
    values = values if columns is None else values[:, columns]
    if tensor.data_offset + tensor.n_bytes > _file_size(tensor.data):
        raise CheckpointError(f"the GGUF file became shorter while {tensor.name} was read")
    return values


def _file_size(values: NDArray[Any]) -> int:
    """Bytes of the file that a view of a memory map belongs to, as long as it is."""
    base: Any = values
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base.size()


def _check_types(fields: Any) -> None:
    """Raise ValueError for tensors of types that cannot be read, the first of each by its name."""
    first: dict[int, str] = {}
    for field in fields:
        _, name, _, sizes, kind, _ = field.parts
        check_axes(sizes, str(bytes(name), "utf-8"))
        first.setdefault(int(kind[0]), str(bytes(name), "utf-8"))
    readable = readable_types()
    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    got = [
        f"{tensor}: {names.get(kind, f'type {kind}')}"
        for kind, tensor in first.items()
        if kind not in readable
    ]
    if got:
        raise ValueError(
            problem("it has tensors of types that are not read", got=got, choices=readable.values())
        )


# llama.cpp's names of the parts of a split file, and the fields that every part has.
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def split_files(path: Path) -> list[Path]:
    """Return the parts of the split GGUF file of which `path` is one, by their names, in order;
    `path` alone where its name is not a part's."""
    name = _PART_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    files = path.parent.glob(f"{glob.escape(name[1])}-?????-of-{name[3]}.gguf")
    return sorted(file for file in files if _PART_NAME.fullmatch(file.name))


def open_gguf(path: Path) -> GGUFReader:
    """The file, whose tensors can all be read; of one that llama.cpp split, any part opens all.

    The first part has the fields of the model, every part has tensors. Raises CheckpointError.
    """
    reader = _opened(path)
    count = _split_field(reader, _COUNT)
    if count in (None, 0, 1):
        return reader
    files = split_files(path)
    names = [re.sub(r"-\d{5}-of-", f"-{n:05d}-of-", path.name) for n in range(1, len(files) + 1)]
    if len(files) != count or [file.name for file in files] != names:
        raise CheckpointError(
            problem(
                f"{path} is one of {count} parts of a GGUF file, and the others are not beside it",
                got=[file.name for file in files],
                choices=["NAME-00001-of-0000N.gguf and so on, as llama.cpp names them"],
            )
        )
    readers = [reader if file == path else _opened(file) for file in files]
    return _joined(files, readers)


def _joined(files: list[Path], readers: list[GGUFReader]) -> GGUFReader:
    """The first part with the tensors of all; raises CheckpointError for parts of other files."""
    first, problems = readers[0], Problems(f"the GGUF file {files[0]}")
    for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
        expected = {
            _NUMBER: number,
            _COUNT: len(files),
            _TENSORS: _split_field(first, _TENSORS),
        }
        for key, value in expected.items():
            if _split_field(reader, key) != value:
                problems.add(
                    f"{file.name} is a part of another file: {key}",
                    got=_split_field(reader, key),
                    choices=[value],
                )
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    if len({tensor.name for tensor in tensors}) < len(tensors):
        problems.add("two of its parts have tensors of one name")
    expected_count = _split_field(first, _TENSORS)
    if len(tensors) != expected_count:
        problems.add(
            "its parts have another number of tensors", got=len(tensors), choices=[expected_count]
        )
    problems.raise_if_any(CheckpointError)
    first.tensors = tensors
    return first


def _split_field(reader: GGUFReader, key: str) -> Any:
    """The number in a field, None where there is none; of a field of another type its type."""
    field = reader.get_field(key)
    if field is None or field.types[0] in (GGUFValueType.STRING, GGUFValueType.ARRAY):
        return field and field.types
    return field.contents()


def _opened(path: Path) -> GGUFReader:
    try:
        with np.errstate(over="raise"):
            return _BoundedReader(path)
    except Exception as error:  # the reader checks little, so anything may go wrong in it
        raise CheckpointError(f"cannot read {path} as a GGUF file: {error}") from error
