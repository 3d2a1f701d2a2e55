"""torch.save files: every dtype and stride as torch reads them, and nothing but tensors."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive, Region
from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, widened
from launcher_scripts.common.errors import CheckpointError


def region_of(content: bytes, folder: Path) -> Region:
    folder.mkdir(exist_ok=True)
    (folder / "file").write_bytes(content)
    return Archive(folder).region("file")


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.randn(3, 5) * 50).to(dtype)
    found = torch_file.load_torch_file(region_of(saved({"a": values}), tmp_path / "f"), "file")["a"]
    assert (found.dtype == BFLOAT16) == (dtype is torch.bfloat16)
    expected = values.float() if dtype is torch.bfloat16 else values
    np.testing.assert_array_equal(widened(found), expected.numpy())
    assert not found.flags.writeable


def test_views_share_their_storage(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    state = OrderedDict(
        full=base.view(4, 6),
        transposed=base.view(4, 6).t(),
        slice=base[3:9],
        strided=base[::5],
        scalar=base[7],
        parameter=torch.nn.Parameter(base.view(2, 12)),
        empty=torch.empty(0, 3),
        nothing=None,
        sizes=torch.Size([1, 2]),
        nested={"list": [base[:2], 1.5, "text"]},
    )
    found = torch_file.load_torch_file(region_of(saved(state), tmp_path / "f"), "file")
    for name in ("full", "transposed", "slice", "strided", "scalar", "empty"):
        np.testing.assert_array_equal(found[name], state[name].numpy(), err_msg=name)
    np.testing.assert_array_equal(found["parameter"], base.view(2, 12).numpy())
    assert found["nothing"] is None
    assert found["sizes"] == (1, 2)
    assert found["nested"]["list"][1:] == [1.5, "text"]


class Evil:
    """Runs a command when it is unpickled by the book."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Nested:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ([("inner", Evil(self.marker))],)


class Builtin:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('os').getpid()",)


class Loader:
    """torch's own way back to an unrestricted unpickler."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (b"x",)


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    cases = {
        "posix.system": {"a": torch.ones(2), "b": Evil(marker)},
        "__builtin__.eval": Builtin(),
    }
    for name, value in cases.items():
        region = region_of(saved(value), tmp_path / name)
        with pytest.raises(CheckpointError, match=f"names {name}, which only an attack needs"):
            torch_file.load_torch_file(region, "file")
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        torch_file.load_torch_file(region_of(saved([Nested(marker)]), tmp_path / "nested"), "file")
    loaded = torch_file.load_torch_file(region_of(saved(Loader()), tmp_path / "loader"), "file")
    assert isinstance(loaded, pickles.Opaque)
    assert not marker.exists()


def rewritten(content: bytes, change: dict[str, bytes | None], method: int = 0) -> bytes:
    """The zip with some entries replaced or (None) left out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for entry in old.namelist():
            tail = entry.split("/", 1)[1]
            data = change.get(tail, old.read(entry))
            if data is not None:
                new.writestr(entry, data)
    return buffer.getvalue()


def needing_version(content: bytes, version: int) -> bytes:
    """A zip archive whose first entry asks for a reader of `version`."""
    at = content.index(b"PK\x01\x02") + 6
    return content[:at] + version.to_bytes(2, "little") + content[at + 2 :]


def test_damage_is_named(tmp_path: Path) -> None:
    content = saved({"a": torch.ones(100)})
    cases = {
        "cut": (content[: len(content) // 2], "damaged or was cut short"),
        "text": (b"hello", "damaged or was cut short"),
        "no storage": (rewritten(content, {"data/0": None}), "lacks data/0"),
        "short storage": (rewritten(content, {"data/0": b"1234"}), "outside of its file"),
        "no pickle": (rewritten(content, {"data.pkl": None}), "not a file of torch.save"),
        "half a pickle": (rewritten(content, {"data.pkl": b"\x80\x02}q\x00("}), "damaged"),
        "big endian": (rewritten(content, {"byteorder": b"big"}), "byte order"),
        "compressed": (rewritten(content, {}, zipfile.ZIP_DEFLATED), "compressed"),
        "a later zip": (needing_version(content, 200), "damaged or was cut short"),
    }
    for name, (damaged, message) in cases.items():
        with pytest.raises(CheckpointError, match=message):
            torch_file.load_torch_file(region_of(damaged, tmp_path / name), "file")


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (3, 4), (4, 1)), (9, (2,), (1,)), (-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,))],
)
def test_a_tensor_stays_inside_its_storage(offset: int, size: tuple, stride: tuple) -> None:
    with pytest.raises(CheckpointError, match=r"larger than its storage|impossible shape"):
        torch_file.rebuild_tensor(np.zeros(10, "<f4"), offset, size, stride)


def test_a_pickle_cannot_make_a_huge_memo(tmp_path: Path) -> None:
    bomb = b"\x80\x02" + b"N" + pickle.LONG_BINPUT + (2**31 - 1).to_bytes(4, "little") + b"."
    content = rewritten(saved({}), {"data.pkl": bomb[:-1] + b"("})
    with pytest.raises(CheckpointError, match="damaged"):
        torch_file.load_torch_file(region_of(content, tmp_path / "f"), "file")
