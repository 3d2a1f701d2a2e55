"""Sources and places that cannot be used: one error that says what and where, and nothing left."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.tiny_models import DECODERS

EMPTY_TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder of Hugging Face."""
    DECODERS["gpt2"].make().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {}, {3: "text"}, {"state_dict": {}}])
def test_a_torch_file_of_something_else(folder: Path, tmp_path: Path, content: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    refused_export(folder, tmp_path, r"pytorch_model\.bin of .*hf holds no state dict")


def test_a_safetensors_file_longer_than_its_tensors(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(4))
    refused_export(folder, tmp_path, r"header of model\.safetensors of .* does not fit its data")


@pytest.mark.parametrize("target", ["model.safetensors", "nowhere"])
def test_a_link_that_leads_nowhere(folder: Path, tmp_path: Path, target: str) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(target)
    refused_export(folder, tmp_path, rf"a link leads out of the folder, or nowhere; got '{path}'")


def test_a_folder_that_may_not_be_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a part of the checkpoint. No mode of a folder stops root, who may run this."""
    for name in ("closed", "lost+found"):
        (folder / name).mkdir()
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name in ("closed", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    message = (
        f"1 problem in .*\n- a folder cannot be read: Permission denied; got '{folder}/closed'"
    )
    refused_export(folder, tmp_path, message)


def test_shards_are_found_by_other_spellings(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a b.safetensors")
    index = {"weight_map": {"transformer.wte.weight": "./a b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (export_folder(folder, tmp_path) / "model.wte.bin").is_file()


def test_a_folder_that_contains_itself_and_a_name_beyond_ascii(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "loop").symlink_to(".")
    renamed = folder.rename(tmp_path / "модель ü")
    assert (export_folder(renamed, tmp_path) / "model.wte.bin").is_file()


def test_an_empty_tokenizer(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(EMPTY_TOKENIZER))
    refused_export(
        folder,
        tmp_path,
        r"the tokenizer has no tokens; got .*'tokenizer\.json'\]; change export\.model\.tokenizer",
        tokenizer=TokenizerSettings("auto"),
    )


def below_a_file(path: Path) -> Path:
    path.write_text("")
    return path / "out"


PLACES: dict[str, Callable[[Path], Path]] = {
    "below a file": below_a_file,
    "too long a name": lambda path: path / ("x" * 300),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path, place: str) -> None:
    target = PLACES[place](tmp_path / "place")
    with pytest.raises(CheckpointError, match=f"cannot write {target}"):
        export_folder(folder, target)
