"""Which files of a Hugging Face folder hold its weights: one set, or an error that names both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of one model with their index, and no other weights."""
    torch.manual_seed(1)
    DECODERS["llama"].make().save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    return tmp_path / "hf"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    shards = folder.glob("model-*.safetensors")
    return {name: value for shard in shards for name, value in load_file(shard).items()}


def binary_shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    files = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    names = sorted(state)
    for file, keys in zip(files, (names[:5], names[5:]), strict=True):
        torch.save({key: state[key] for key in keys}, folder / file)
    weight_map = {name: files[names.index(name) >= 5] for name in names}
    (folder / BIN_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_next_to_an_index_with_shards(folder: Path, tmp_path: Path) -> None:
    save_file(state_of(folder), folder / SINGLE)
    text = refused_export(folder, tmp_path, "holds two sets of weights")
    assert f"{SINGLE}, and {INDEX} with model-00001-of-0000" in text
    next(folder.glob("model-*")).unlink()
    refused_export(folder, tmp_path, "holds two sets of weights")


def test_a_single_torch_file_next_to_an_index_with_shards(folder: Path, tmp_path: Path) -> None:
    state = state_of(folder)
    binary_shards(folder, state)
    torch.save(state, folder / BIN)
    expected = weight_bytes(export_folder(folder, tmp_path / "a"))  # from the safetensors
    for path in (*folder.glob("model-*"), folder / INDEX):
        path.unlink()
    refused_export(folder, tmp_path, rf"two sets of weights: {BIN}, and {BIN_INDEX}")
    (folder / BIN).unlink()
    assert weight_bytes(export_folder(folder, tmp_path / "b")) == expected


def test_an_index_of_which_no_file_exists_is_ignored(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = weight_bytes(export_folder(folder, tmp_path / "a"))
    state = state_of(folder)
    for path in folder.glob("model-*"):
        path.unlink()
    refused_export(folder, tmp_path, r"a shard is missing, as are all; got 'model-00001-of-")
    for file in (SINGLE, BIN):
        save_file(state, folder / file) if file == SINGLE else torch.save(state, folder / file)
        capsys.readouterr()
        found = export_folder(folder, tmp_path / file)
        assert f"note: {INDEX} is ignored: none of its files" in capsys.readouterr().out
        assert weight_bytes(found) == expected
        (folder / file).unlink()


def test_an_index_of_the_single_file_is_no_second_set(folder: Path, tmp_path: Path) -> None:
    state = state_of(folder)
    for path in folder.glob("model-*"):
        path.unlink()
    save_file(state, folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, SINGLE)}))
    export_folder(folder, tmp_path)


def test_what_is_not_read_is_noted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary_shards(folder, {name: value + 1 for name, value in state_of(folder).items()})
    (folder / "consolidated.safetensors").write_bytes(b"")
    export_folder(folder, tmp_path)
    out = capsys.readouterr().out
    assert "not read: consolidated.safetensors, pytorch_model-00001-of-00002.bin" in out


FOREIGN = {
    "consolidated.safetensors": "Mistral's and Meta's own form",
    "consolidated.00.pth": "Mistral's and Meta's own form",
    "model-00001-of-00002.safetensors": "fetch model.safetensors.index.json",
    "pytorch_model-00001-of-00002.bin": "fetch pytorch_model.bin.index.json",
    "adapter_model.safetensors": "export.model.adapter_checkpoints",
    "model-Q4_K_M.gguf": "name the file itself",
    "tf_model.h5": "save_pretrained",
    "flax_model.msgpack": "save_pretrained",
    "global_step9/mp_rank_00_model_states.pt": "zero_to_fp32",
    "pytorch_model_fsdp_0/__0_0.distcp": "accelerate merge-weights",
    "model.safetensors.incomplete": "a download that has not ended",
    "weights.safetensors": "rename the file to model.safetensors",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_in_another_form_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    for path in (*folder.glob("model-*"), folder / INDEX):
        path.unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    text = refused_export(folder, tmp_path, "1 problem in the weights")
    assert name in text
    assert FOREIGN[name] in text


def test_a_pointer_of_git_lfs(folder: Path, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    next(folder.glob("model-*")).write_bytes(pointer)
    refused_export(folder, tmp_path, "git lfs pull")


def test_files_of_ranks_next_to_a_distributed_checkpoint(tmp_path: Path) -> None:
    make_nemo(tmp_path / "a", small_config(), Variant("zarr", container="folder"))
    (tmp_path / "a" / "mp_rank_00").mkdir()
    (tmp_path / "a" / "mp_rank_00" / "model_weights.ckpt").write_bytes(b"")
    refused_export(tmp_path / "a", tmp_path, r"two sets of weights: mp_rank_00/model_weights\.ckpt")


def test_the_iteration_of_the_tracker_file_or_none(tmp_path: Path) -> None:
    Maker().write(tmp_path / "a" / "iter_0000001")
    tracker = tmp_path / "a" / "latest_checkpointed_iteration.txt"
    tracker.write_text("2\n")
    export_folder(tmp_path / "a", tmp_path)  # only the one was copied
    (tmp_path / "a" / "iter_0000002").mkdir()
    (tmp_path / "a" / "iter_0000002" / ".metadata").write_bytes(b"")
    refused_export(tmp_path / "a", tmp_path, "names iter_0000002/, whose checkpoint is incomplete")
