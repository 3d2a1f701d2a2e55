"""Paths that are near a checkpoint, or name none: which one is meant, or what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher_scripts.checkpoint.sources.locations import hub_advice
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.megatron_maker import Maker
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import make_nemo, small_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    DECODERS["llama"].make().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_above_checkpoints_names_them(model: Path, tmp_path: Path) -> None:
    above = tmp_path / "models"
    shutil.copytree(model, above / "first")
    shutil.copytree(model, above / "family" / "second")
    make_nemo(above / "third.nemo", small_config())
    (above / "notes").mkdir()
    (above / "notes" / "a.txt").write_text("a")
    text = refused_export(above, tmp_path, "it holds the checkpoints ")
    assert "third.nemo, first, family/second: name one of them" in text


def test_a_folder_above_iterations_names_them(tmp_path: Path) -> None:
    for name in ("iter_0000001", "iter_0000002"):
        Maker().write(tmp_path / "a" / name)
    text = refused_export(tmp_path / "a", tmp_path, "must hold one checkpoint")
    assert "'iter_0000001/', 'iter_0000002/'" in text


def test_a_model_in_the_cache_of_the_hub_is_its_snapshot(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b"
    snapshot = folder / "snapshots" / "0f3a"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for path in model.iterdir():
        shutil.copy(path, folder / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    for number, path in enumerate((folder, folder / "snapshots", snapshot)):
        export_folder(path, tmp_path / str(number))
    (folder / "snapshots" / "11").mkdir()
    text = refused_export(folder, tmp_path / "a", "with 2 snapshots; expected 1")
    assert "snapshots/0f3a" in text
    shutil.rmtree(folder / "snapshots" / "11")
    shutil.rmtree(snapshot)
    refused_export(folder, tmp_path / "a", "with 0 snapshots")


def test_weights_in_a_folder_without_a_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("consolidated.safetensors", "params.json", "tekken.json"):
        (folder / name).write_bytes(b"")
    refused_export(folder, tmp_path, r"it holds consolidated\.safetensors, Mistral's and Meta's")


def test_tokenizers_of_other_forms_are_named(model: Path, tmp_path: Path) -> None:
    for name in ("tekken_v2.json", "qwen.tiktoken"):
        (model / name).write_bytes(b"")
    auto = TokenizerSettings("auto")
    text = refused_export(model, tmp_path, "holds no tokenizer;", tokenizer=auto)
    assert "qwen.tiktoken, tekken_v2.json must be converted first" in text


@pytest.mark.parametrize("path", ["a/b", "meta-llama/Llama-3.2-1B"])
def test_a_name_on_the_hub(path: str, tmp_path: Path) -> None:
    assert f"hf download {path} --local-dir" in hub_advice(path)
    text = refused_export(Path(path), tmp_path, "the checkpoint does not exist; it looks like")
    assert "export.model.checkpoint_path" in text


@pytest.mark.parametrize("path", ["/a/b", "./a", "../b", "a", "a/b/c", "a b/c"])
def test_other_paths_are_no_names_on_the_hub(path: str) -> None:
    assert not hub_advice(path)
