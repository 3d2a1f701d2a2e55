"""Output folders and exported folders that were made to harm: no file of another is touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import JOURNAL_NAME as JOURNAL
from launcher_scripts.checkpoint.fastertransformer.manifest import ExportJournal
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.files import atomic_write
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.small_memory import small_memory
from tests.checkpoint_maker import make_nemo, small_config

CONTENT = b"somebody else's"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder of somebody else, to whose files the links lead."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("file", JOURNAL, "model.wte.bin", "manifest.json"):
        (folder / name).write_bytes(CONTENT)
    return folder


def untouched(folder: Path) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(
        ("file", JOURNAL, "model.wte.bin", "manifest.json"), CONTENT
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["1-gpu", "1-gpu.partial", "1-gpu.old"])
def test_a_linked_folder(name: str, overwrite: bool, source: Path, other: Path) -> None:
    version = other.parent / "m" / "1"
    version.mkdir(parents=True)
    for target in (other, version / "nowhere"):
        (version / name).symlink_to(target)
        with pytest.raises(CheckpointError, match=f"a link leads to; remove the link; got.*{name}"):
            export_folder(source, other.parent, overwrite=overwrite)
        (version / name).unlink()
    assert untouched(other)
    assert list(version.iterdir()) == []


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, target: path.symlink_to(target),
    "hard link": lambda path, target: path.hardlink_to(target),
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_linked_journal(kind: str, source: Path, other: Path) -> None:
    partial = other.parent / "m" / "1" / "1-gpu.partial"
    partial.mkdir(parents=True)
    LINKS[kind](partial / JOURNAL, other / JOURNAL)
    with pytest.raises(CheckpointError, match=r"cannot write .*1-gpu\.partial"):
        export_folder(source, other.parent)
    assert untouched(other)
    (partial / JOURNAL).unlink(missing_ok=True)
    FTCheckpoint.open(export_folder(source, other.parent))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe"])
@pytest.mark.parametrize("name", ["model.wte.bin", "manifest.json", "config.ini", "file"])
def test_what_lies_in_the_partial_folder(name: str, kind: str, source: Path, other: Path) -> None:
    partial = other.parent / "m" / "1" / "1-gpu.partial"
    partial.mkdir(parents=True)
    if kind == "folder":
        (partial / name / "below").mkdir(parents=True)
        (partial / name / "link").symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(partial / name)
    else:
        LINKS[kind](partial / name, other / "file")
    folder = export_folder(source, other.parent)
    assert untouched(other)
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())
    assert not (folder / "file").exists()
    FTCheckpoint.open(folder)


def test_a_finished_file_that_became_a_link(tmp_path: Path) -> None:
    """Its digest is right as long as the link's target is."""
    folder = tmp_path / "folder"
    folder.mkdir()
    journal = ExportJournal(folder, "name")
    (tmp_path / "elsewhere").write_bytes(b"")
    (folder / "a.bin").symlink_to(tmp_path / "elsewhere")
    digest = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    lines = [{"identity": "name"}, {"name": "a.bin", "bytes": 0, "blake3": digest}]
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert journal.restart() == {}
    journal.close(remove=False)
    assert (tmp_path / "elsewhere").exists() and not (folder / "a.bin").exists()


LINES = {
    "another folder": {"name": "../other/file", "bytes": len(CONTENT), "blake3": "0"},
    "a long name": {"name": "x" * 5000, "bytes": 0, "blake3": "0"},
    "bytes that are a text": {"name": "a", "bytes": "0", "blake3": "0"},
    "a list": [1],
    "a number": 1,
    "a name that is a list": {"name": ["a"], "bytes": 0, "blake3": "0"},
}


@pytest.mark.parametrize("case", [*LINES, "nested", "no text"])
def test_a_harmful_journal(case: str, tmp_path: Path, other: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    line = {"nested": b"[" * 100_000, "no text": b"\xff\xfe"}.get(case)
    line = json.dumps(LINES[case]).encode() if line is None else line
    (folder / JOURNAL).write_bytes(b'{"identity": "name"}\n' + line)
    journal = ExportJournal(folder, "name")
    assert journal.restart() == {}
    journal.close(remove=True)
    assert untouched(other)


def test_a_text_file_is_written_through_no_link(tmp_path: Path, other: Path) -> None:
    (tmp_path / "a.partial").symlink_to(other / "file")
    with pytest.raises(OSError):
        atomic_write(tmp_path / "a", "text")
    assert untouched(other)
    (tmp_path / "a.partial").unlink()
    (tmp_path / "a").symlink_to(other / "file")
    atomic_write(tmp_path / "a", "text")
    assert untouched(other)
    assert (tmp_path / "a").read_text() == "text"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    make_nemo(folder / "source.nemo", small_config())
    return export_folder(folder / "source.nemo", folder)


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "1-gpu"))


def named(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """The manifest with changes in the entry of a file."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "files": [{**values["files"][0], **changes}, *values["files"][1:]]}

    return change


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file outside": named(name="../x"),
    "a file far away": named(name="/etc/passwd"),
    "the folder": named(name=".."),
    "this folder": named(name="."),
    "no name": named(name=""),
    "a name of 5,000 characters": named(name="x" * 5000),
    "a name with NUL": named(name="a\0b"),
    "a name that is a list": named(name=["a"]),
    "bytes that are a text": named(bytes="5"),
    "fewer than no bytes": named(bytes=-1),
    "an unknown key": named(other=1),
    "a shape that is a number": named(shape=5),
    "a source that is a list": lambda values: values | {"source": [1]},
    "files that are a number": lambda values: values | {"files": 5},
    "a file that is a list": lambda values: values | {"files": [[]]},
    "an unknown format": lambda values: values | {"format": [1]},
    "a list": lambda _: [],
}


@pytest.mark.parametrize("case", [*MANIFESTS, "nested"])
def test_a_harmful_manifest(case: str, folder: Path) -> None:
    path = folder / "manifest.json"
    (folder.parent / "x").write_bytes(CONTENT)
    values = json.loads(path.read_text())
    text = "[" * 100_000 if case == "nested" else json.dumps(MANIFESTS[case](values))
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        FTCheckpoint.open(folder)


INI = {
    "a billion layers": ("num_layer = 4", "num_layer = 1000000000"),
    "no layers": ("num_layer = 4", "num_layer = 0"),
    "5,000 digits": ("num_layer = 4", "num_layer = " + "9" * 5000),
    "a billion ranks": ("tensor_para_size = 1", "tensor_para_size = 1000000000"),
    "no ranks": ("tensor_para_size = 1", "tensor_para_size = 0"),
    "fewer than no ranks": ("tensor_para_size = 1", "tensor_para_size = -1"),
    "ranks that do not divide": ("tensor_para_size = 1", "tensor_para_size = 3"),
    "10^18 heads": ("head_num = 4", "head_num = 1000000000000000000"),
    "a billion prompts": ("head_num = 4", "head_num = 4\nnum_tasks = 1000000000"),
    "a billion vectors": ("head_num = 4", "head_num = 4\nia3_num_tasks = 1000000000"),
    "fewer than no vectors": ("head_num = 4", "head_num = 4\nia3_num_tasks = -1"),
    "10^18 positions": ("max_pos_seq_len = 16", "max_pos_seq_len = 1000000000000000000"),
    "an endless scale": ("layernorm_eps = 1e-05", "layernorm_eps = inf"),
    "a section twice": ("[extension]", "[gpt]"),
    "no section": ("[gpt]", "gpt"),
    "a key twice": ("head_num = 4", "head_num = 4\nhead_num = 4"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", INI)
@pytest.mark.parametrize("manifest", [True, False], ids=["ours", "the original's"])
def test_a_harmful_config_ini(case: str, manifest: bool, folder: Path) -> None:
    path = folder / "config.ini"
    old, new = INI[case]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if not manifest:
        (folder / "manifest.json").unlink()
    with small_memory(), pytest.raises(CheckpointError) as caught:
        FTCheckpoint.open(folder)
    assert "MemoryError" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.ini", "manifest.json", "model.wte.bin"])
def test_a_pipe_in_an_exported_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}.*(not a plain file|missing)"):
        FTCheckpoint.open(folder)
