"""Experts of Megatron-LM core: stacks in pieces, of wrong depth and of impossible size, and LoRA.

The stacks are a fixture's, read by torch and written as the zarr folders of older cores.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.distributed import read_saved_tensors
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder, refused_export

STEP = "bridge_qwen2moe_a/checkpoint/iter_0000000"
UP = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
QKV = "decoder.layers.1.self_attention.linear_qkv"
PEFT = {"_target_": "megatron.bridge.peft.lora.LoRA", "alpha": 8, "dim": 4}
Tensors = dict[str, np.ndarray]


def values_of(step: Path) -> Tensors:
    """The tensors of a checkpoint, read by torch."""
    reader = FileSystemReader(step)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size) for name, entry in entries.items() if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(found, storage_reader=reader, no_dist=True)
    return {name: values.numpy() for name, values in found.items()}


def write_zarr(
    folder: Path, tensors: Tensors, chunks: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
) -> Path:
    """Returns the folder; chunks: shape of a tensor -> of its chunks"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    for name, values in tensors.items():
        sizes = chunks(values.shape)
        header = {"shape": values.shape, "chunks": sizes, "dtype": "<f4", "compressor": None}
        (folder / name).mkdir()
        (folder / name / ".zarray").write_text(json.dumps(header | {"filters": None, "order": "C"}))
        starts = [range(0, size, step) for size, step in zip(values.shape, sizes, strict=True)]
        for start in itertools.product(*starts):
            box = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
            number = ".".join(str(at // size) for at, size in zip(start, sizes, strict=True))
            (folder / name / number).write_bytes(np.ascontiguousarray(values[box]).tobytes())
    return folder


@pytest.fixture
def qwen(data_dir: Path, tmp_path: Path) -> tuple[Path, Tensors]:
    """A folder with what describes the model, still without its tensors, and these."""
    return described(data_dir / "core" / STEP, tmp_path / "source")


def described(source: Path, folder: Path) -> tuple[Path, Tensors]:
    folder.mkdir()
    shutil.copy(source / "run_config.yaml", folder)
    return folder, values_of(source)


def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Chunks as two expert-parallel ranks and two tensor-parallel ones save them: half of the
    experts, half of the rows."""
    return (*(1 for _ in shape[:-3]), 2, shape[-2] // 2, shape[-1]) if len(shape) > 2 else shape


def test_each_expert_of_a_stack_is_a_tensor_of_its_own(qwen, tmp_path: Path) -> None:
    _, stored = qwen
    experts = {key: values for key, values in stored.items() if ".experts.experts." in key}
    write_zarr(tmp_path / "a_layer_each", experts, halves)
    first = [key for key in experts if ".layers.0." in key]
    stacks = {
        key.replace("layers.0", "layers"): np.stack(
            [experts[key], experts[key.replace("layers.0", "layers.1")]]
        )
        for key in first
    }
    write_zarr(tmp_path / "stacked", stacks, halves)
    for form in ("a_layer_each", "stacked"):
        tensors = read_saved_tensors(Archive(tmp_path / form), "")
        assert len(tensors) == 2 * 4 * len(first)
        for key, values in experts.items():
            for number, expert in enumerate(values):
                name = key.replace("experts.experts.", f"experts.experts.{number}.")
                assert np.array_equal(tensors[name].read(), expert)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, r"decoder\.layers\.1\.mlp\.experts\.experts\.3\.linear_fc1\.weight is missing"),
        (5, r"experts\.4\.linear_fc1\.weight is a tensor this model should not have"),
    ],
)
def test_every_expert_is_claimed(qwen, count: int, message: str, tmp_path: Path) -> None:
    folder, tensors = qwen
    tensors[UP] = np.concatenate([tensors[UP]] * 2)[:count]
    write_zarr(folder, tensors)
    refused_export(folder, tmp_path, message)


def test_more_experts_than_any_model_has(tmp_path: Path) -> None:
    stack = np.zeros((1 << 14, 64, 1), np.float32)
    write_zarr(tmp_path / "zarr", {UP.replace("layers.1", "layers"): stack})
    with pytest.raises(CheckpointError, match="has more experts than a model can have; got 64"):
        read_saved_tensors(Archive(tmp_path / "zarr"), "")


@pytest.mark.parametrize("name", ["bridge_qwen2moe_a", "bridge_dense_a"])
def test_norms_may_be_stored_as_their_distance_from_one(
    data_dir: Path, tmp_path: Path, name: str
) -> None:
    """Those of layers without experts lie at other places."""
    source = data_dir / "core" / name / "checkpoint" / "iter_0000000"
    folder, tensors = described(source, tmp_path / "source")
    plain = export_folder(write_zarr(folder, tensors), tmp_path / "plain")
    said = yaml.safe_load((folder / "run_config.yaml").read_text())
    said["model"]["layernorm_zero_centered_gamma"] = True
    changed = {
        name: values - 1 if re.search("norm[._]weight$", name) else values
        for name, values in tensors.items()
    }
    other = write_zarr(tmp_path / "other", changed)
    (other / "run_config.yaml").write_text(yaml.safe_dump(said))
    exported = export_folder(other, tmp_path)
    files = [path.name for path in plain.glob("*.bin")]
    assert len(files) > 40
    for name in files:
        both = [np.fromfile(each / name, np.float32) for each in (plain, exported)]
        np.testing.assert_allclose(*both, atol=1e-6)


@pytest.mark.parametrize("form", ["zarr", "torch_dist"])
def test_the_optimizers_of_experts_are_skipped(form: str, tmp_path: Path) -> None:
    """With expert parallelism a training has two, in a chain."""
    moments = [f"chained_{number}.optimizer.state.exp_avg.{UP}" for number in range(2)]
    tensors = {name: np.ones((4, 2), np.float32) for name in [UP, *moments]}
    if form == "zarr":
        write_zarr(tmp_path, tensors)
    else:
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        writer = FileSystemWriter(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            own = {name: torch.from_numpy(values) for name, values in tensors.items()}
            save(own, storage_writer=writer, no_dist=True)
    assert len(read_saved_tensors(Archive(tmp_path), "")) == 4


def lora(module: str, rows: int) -> Tensors:
    generator = np.random.default_rng(3)
    shapes = {"linear_in": (4, 16), "linear_out": (rows, 4)}
    return {
        f"{module}.adapter.{side}.weight": generator.standard_normal(shape, np.float32)
        for side, shape in shapes.items()
    }


def test_lora_of_attention_is_merged_into_a_model_with_experts(qwen, tmp_path: Path) -> None:
    folder, tensors = qwen
    said = yaml.safe_load((folder / "run_config.yaml").read_text())
    said["peft"] = {**PEFT, "target_modules": ["*.layers.1.*.linear_qkv"]}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(said))
    parts = lora(QKV, 48)
    write_zarr(folder, tensors | parts)
    merged = export_folder(folder, tmp_path)
    shutil.rmtree(folder)
    down, up = parts.values()
    write_zarr(folder, tensors | {f"{QKV}.weight": tensors[f"{QKV}.weight"] + 2 * up @ down})
    del said["peft"]
    (folder / "run_config.yaml").write_text(yaml.safe_dump(said))
    plain = export_folder(folder, tmp_path / "plain")
    name = "model.layers.1.attention.query_key_value.weight.0.bin"
    both = [np.fromfile(each / name, np.float32) for each in (merged, plain)]
    np.testing.assert_allclose(*both, atol=1e-6)


def test_lora_of_experts_is_refused(qwen, tmp_path: Path) -> None:
    folder, tensors = qwen
    said = yaml.safe_load((folder / "run_config.yaml").read_text())
    said["peft"] = {**PEFT, "target_modules": ["linear_fc1"]}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(said))
    module = "decoder.layers.1.mlp.experts.linear_fc1"
    write_zarr(folder, tensors | lora(module, 24))
    refused_export(folder, tmp_path, r"layers\.1\.mlp\.experts\.linear_fc1")


def test_layers_that_predict_more_tokens_are_left_out(qwen, tmp_path: Path) -> None:
    """Only where the training says that there may be such."""
    folder, tensors = qwen
    plain = export_folder(write_zarr(folder, tensors), tmp_path / "plain")
    config = (folder / "run_config.yaml").read_text()
    more = tensors | {"mtp.layers.0.enorm.weight": np.ones(16, np.float32)}
    other = write_zarr(tmp_path / "other", more)
    (other / "run_config.yaml").write_text(config)
    refused_export(other, tmp_path, "mtp.layers.0.enorm.weight is a tensor this model should not")
    assert "mtp_num_layers: null" in config
    (other / "run_config.yaml").write_text(
        config.replace("mtp_num_layers: null", "mtp_num_layers: 1")
    )
    exported = export_folder(other, tmp_path)
    notes = json.loads((exported / "manifest.json").read_text())["source"]["notes"]
    assert notes == ["the layers for multi-token prediction are left out"]
    for path in plain.glob("*.bin"):
        assert path.read_bytes() == (exported / path.name).read_bytes()
