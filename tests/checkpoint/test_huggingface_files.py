"""Weight files of Hugging Face: safetensors, and what torch.save wrote before version 1.6."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from launcher_scripts.checkpoint.formats import pickles, source_tensor, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, widened
from launcher_scripts.common.errors import CheckpointError

torch.manual_seed(3)
TENSORS = {
    "matrix": torch.randn(5, 7),
    "half": torch.randn(4).half(),
    "bfloat": torch.randn(3, 2).bfloat16(),
    "double": torch.randn(2, dtype=torch.float64),
    "long": torch.arange(3),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}


def read(folder: Path, load: Any, name: str) -> Any:
    return load(Archive(folder).region(name), name)


def check(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tuple(tensor.shape)
        assert np.array_equal(widened(found[name]), widened_torch(tensor)), name
        assert not found[name].flags.writeable


def widened_torch(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def test_safetensors_are_read_as_views(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read(tmp_path, source_tensor.load_safetensors, "model.safetensors")
    check({name: array for name, array in found.items() if array.size}, without_empty(TENSORS))
    assert found["bfloat"].dtype == BFLOAT16
    assert found["empty"].shape == (0, 3)


def without_empty(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


@pytest.mark.parametrize("kept", [0, 7, 40, -1, -20])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    save_file({"a": torch.ones(4, 4)}, tmp_path / "whole")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "whole").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cut short|damaged"):
        read(tmp_path, source_tensor.load_safetensors, "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [0, 2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"shape": [2], "data_offsets": [0, 8]},
        7,
    ],
)
def test_impossible_entries_are_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(tmp_path, source_tensor.load_safetensors, "model.safetensors")


def test_the_old_format_of_torch_is_read_as_views(tmp_path: Path) -> None:
    tensors = without_empty(TENSORS)
    shared = tensors["matrix"]
    state = {**tensors, "transposed": shared.T, "rows": shared[1:3], "again": shared}
    state["parameter"] = torch.nn.Parameter(torch.randn(3))
    torch.save(state, tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    check(read(tmp_path, torch_file.load_torch_file, "a.bin"), state)


def test_an_old_file_cut_short_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(9)}, tmp_path / "a", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a").read_bytes()
    for size in (20, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.bin").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read(tmp_path, torch_file.load_torch_file, "a.bin")


class Malicious:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


def test_an_old_file_can_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Malicious(), tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    assert isinstance(read(tmp_path, torch_file.load_torch_file, "a.bin"), pickles.Opaque)
    assert capsys.readouterr().out == ""
