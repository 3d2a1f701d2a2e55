"""Tensors that lie where they must not, or are larger than their files: one error each."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import Metadata

from launcher_scripts.checkpoint.formats.source_tensor import Piece, SourceTensor
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import change_json, refused_export
from tests.checkpoint.small_memory import small_memory
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config

Box = tuple[tuple[int, ...], tuple[int, ...]]
COVERS: dict[str, tuple[tuple[int, ...], list[Box], bool]] = {
    "one piece": ((4, 4), [((0, 0), (4, 4))], True),
    "columns": ((4, 4), [((0, 2), (4, 2)), ((0, 0), (4, 2))], True),
    "rows and columns": ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))], True),
    "a number": ((), [((), ())], True),
    "two numbers for one": ((), [((), ()), ((), ())], False),
    "an overlap and a hole": ((4,), [((0,), (2,)), ((1,), (2,))], False),
    "an overlap and a hole in columns": ((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 2))], False),
    "a corner twice": ((4, 4), [((0, 0), (2, 4)), ((1, 3), (1, 1)), ((2, 0), (1, 7))], False),
    "one inside of another": ((4,), [((0,), (3,)), ((1,), (1,))], False),
    "a hole": ((4,), [((0,), (2,)), ((3,), (1,))], False),
    "the same place twice": ((4,), [((0,), (2,)), ((0,), (2,))], False),
    "outside": ((4,), [((2,), (4,))], False),
    "nothing": ((4,), [((0,), (0,))], False),
}


@pytest.mark.parametrize("case", COVERS)
def test_pieces_fill_a_tensor_exactly(case: str) -> None:
    shape, boxes, sound = COVERS[case]
    pieces = [Piece(start, np.ones(size, np.float32)) for start, size in boxes]
    if sound:
        assert (SourceTensor.of_pieces(shape, pieces, "a").read() == 1).all()
        return
    with pytest.raises(CheckpointError, match=r"do not fill its shape|lies outside"):
        SourceTensor.of_pieces(shape, pieces, "a")


def safetensors(**entries: Any) -> bytes:
    """A file with four bytes of data."""
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def entry(first: int, last: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


# The long ones are made where they are read.
SAFETENSORS: dict[str, bytes | Callable[[], bytes]] = {
    "an overlap and a hole": safetensors(a=entry(0, 2, [2]), b=entry(1, 3, [2])),
    "one place twice": safetensors(a=entry(0, 2, [2]), b=entry(0, 2, [2])),
    "a hole": safetensors(a=entry(0, 2, [2]), b=entry(3, 4, [1])),
    "a hole at the start": safetensors(a=entry(1, 4, [3])),
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + bytes(100),
    "a header of 1 TB": struct.pack("<Q", 1 << 40) + bytes(100),
    "a nested header": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "sizes without end": safetensors(a=entry(0, 4, [1 << 62, 1 << 62])),
    "sizes that make 4": safetensors(a=entry(0, 4, [-2, -2])),
    "an empty axis": safetensors(a=entry(0, 0, [0, 1 << 63]), b=entry(0, 4, [4])),
    "a broken size": safetensors(a=entry(0, 4, [4.0])),
    "true": safetensors(a=entry(0, 4, [4, True])),
    "a text": safetensors(a=entry(0, 4, ["4"])),
    "a list": safetensors(a=[]),
    "an unknown type": safetensors(a=entry(0, 4, [4], ["U8"])),
    "300,000 axes": lambda: safetensors(a=entry(0, 4, [(1 << 63) - 1] * 300_000)),
    "300,000 empty axes": lambda: safetensors(a=entry(0, 4, [(1 << 63) - 1] * 300_000 + [0])),
    "300,000 tensors": lambda: safetensors(
        **dict.fromkeys(map(str, range(300_000)), entry(0, 0, [0])), a=entry(0, 4, [4])
    ),
    "a header of 40 MB": struct.pack("<Q", 40 << 20) + b" " * (40 << 20),
    "a name of 5,000 characters": safetensors(**{"x" * 5000: entry(0, 4, [4])}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", SAFETENSORS)
def test_harmful_safetensors(case: str, tmp_path: Path) -> None:
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    content = SAFETENSORS[case]
    content = content if isinstance(content, bytes) else content()
    (tmp_path / "hf" / "model.safetensors").write_bytes(content)
    with small_memory():
        text = refused_export(
            tmp_path / "hf", tmp_path, r"model\.safetensors of|num_layers is more"
        )
    assert "Error:" not in text


NAME = "model.decoder.layers.mlp.linear_fc2.weight"
ZARRAYS: dict[str, dict[str, Any]] = {
    "a billion chunks": {"shape": [10**9], "chunks": [1]},
    "a billion layers": {"shape": [10**9, 1], "chunks": [10**9, 1]},
    "10^12 chunks": {"shape": [10**6, 10**6], "chunks": [1, 1]},
    "one huge chunk": {"chunks": [10**9, 10**9, 10**9]},
    "2^64 values": {"shape": [1 << 32, 1 << 32], "chunks": [1 << 32, 1 << 32]},
    "no values": {"shape": [10**9, 0]},
    "negative": {"shape": [-1, 32, 40]},
    "no chunks": {"chunks": [0, 0, 0]},
    "broken": {"shape": [4.0, 32, 40]},
    "texts": {"shape": ["4", "32", "40"]},
    "300,000 axes": {"shape": [1 << 62] * 300_000, "chunks": [1 << 61] * 300_000},
    "no list": {"shape": 4},
    "objects": {"dtype": "|O"},
    "values of 1 GB": {"dtype": "|V1000000000"},
    "fields": {"dtype": [["a", "<f4"]]},
    "files that two chunks share": {"dimension_separator": ""},
    "a way out": {"dimension_separator": "/../"},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", ZARRAYS)
def test_harmful_zarr(case: str, tmp_path: Path) -> None:
    make_nemo(tmp_path / "a", small_config(), Variant("zarr", container="folder"))
    path = tmp_path / "a" / "model_weights" / NAME / ".zarray"
    change_json(path, **ZARRAYS[case])
    with small_memory():
        text = refused_export(tmp_path / "a", tmp_path, NAME)
    assert len(text) < 5000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", [f"{NAME}/.zarray", "metadata.json"])
def test_nested_json_of_zarr(file: str, tmp_path: Path) -> None:
    make_nemo(tmp_path / "a", small_config(), Variant("zarr", container="folder"))
    (tmp_path / "a" / "model_weights" / file).write_text("[" * 100_000)
    refused_export(tmp_path / "a", tmp_path, "damaged")


def one_place(metadata: Any) -> None:
    """All layers of a stack where its first one is."""
    places = [key for key in metadata.storage_data if key.fqn == NAME]
    for key in places:
        metadata.storage_data[key] = metadata.storage_data[places[0]]


def another_tensors(metadata: Any) -> None:
    key = next(key for key in metadata.storage_data if key.fqn == NAME)
    other = next(key for key in metadata.storage_data if "linear_proj" in key.fqn)
    metadata.storage_data[key] = metadata.storage_data[other]


def place(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        key = next(key for key in metadata.storage_data if key.fqn == NAME)
        vars(metadata.storage_data[key]).update(changes)

    return change


def size(*shape: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[NAME].size = shape

    return change


def renamed(metadata: Any) -> None:
    for key in metadata.storage_data:
        object.__setattr__(key, "fqn", (key.fqn, [key.fqn]))


METADATA: dict[str, Callable[[Any], None]] = {
    "two tensors in one place": another_tensors,
    "a negative length": place(length=-1),
    "1 TB": place(length=1 << 40),
    "a place beyond the file": place(offset=1 << 62),
    "a place that is none": place(offset="0"),
    "a way out": place(relative_path="../../a"),
    "a name of 5,000 characters": place(relative_path="x" * 5000),
    "a billion layers": size(10**9, 32, 40),
    "no values": size(10**9, 0),
    "10^1000 values": size(10**1000, 32, 40),
    "texts": size("4", "32", "40"),
    "300,000 axes": size(*[1 << 62] * 300_000),
    "no size": size(),
    "names that are lists": renamed,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", METADATA)
def test_harmful_torch_dist(case: str, tmp_path: Path) -> None:
    make_nemo(tmp_path / "a", small_config(), Variant("torch_dist", container="folder"))
    path = tmp_path / "a" / "model_weights" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    METADATA[case](metadata)
    path.write_bytes(pickle.dumps(metadata))
    with small_memory():
        text = refused_export(tmp_path / "a", tmp_path, "metadata|place|shape|file|outside|axes")
    assert "MemoryError" not in text and len(text) < 5000


def test_layers_in_one_place(tmp_path: Path) -> None:
    """Every piece has the right size, so nothing but its place tells."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    make_nemo(tmp_path / "a", small_config(), Variant("torch_dist", container="folder"))
    path = tmp_path / "a" / "model_weights" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry = metadata.state_dict_metadata[NAME]
    (whole,) = (key for key in metadata.storage_data if key.fqn == NAME)
    found = metadata.storage_data.pop(whole)
    layers, *rest = entry.size
    # The stored part is [layers, ...]; as pieces of a tensor with more layers it serves twice.
    metadata.state_dict_metadata[NAME].size = type(entry.size)((2 * layers, *rest))
    for start in (0, layers):
        offset = type(entry.size)((start, 0, 0))
        metadata.storage_data[MetadataIndex(NAME, offset)] = found
        entry.chunks.append(ChunkStorageMetadata(offset, entry.size))
    path.write_bytes(pickle.dumps(metadata))
    refused_export(tmp_path / "a", tmp_path, f"puts {NAME} and {NAME} in one place of .*distcp")
