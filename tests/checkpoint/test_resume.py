"""An interrupted export leaves its finished files, and only what is missing is written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint, FTWriter, WeightFile
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    JOURNAL_NAME,
    ExportJournal,
    FileEntry,
)
from launcher_scripts.checkpoint.layout import tasks
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.test_export_failures import edited
from tests.checkpoint_maker import Variant, make_nemo, rebuilt, small_config

Write = Callable[..., None]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that are written, in order."""
    names: list[str] = []
    write = FTWriter.write_file

    def noted(self: FTWriter, file: WeightFile, chunks: Any) -> FileEntry:
        names.append(file.name)
        return write(self, file, chunks)

    monkeypatch.setattr(FTWriter, "write_file", noted)
    return names


def interrupted(source: Path, target: Path, after: int, **more: Any) -> Path:
    """Stop an export after some files, as Ctrl-C does; the partial folder it leaves."""
    write, count = FTWriter.write_file, [0]

    def stopping(self: FTWriter, file: WeightFile, chunks: Any) -> FileEntry:
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        return write(self, file, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FTWriter, "write_file", stopping)
        with pytest.raises(KeyboardInterrupt):
            export_folder(source, target, 2, **{"processes": 1, **more})
    folder = target / "m" / "1" / "2-gpu.partial"
    assert folder.is_dir() and not folder.with_suffix("").exists()
    return folder


def test_only_what_is_missing_is_written(source: Path, tmp_path: Path, written: list[str]) -> None:
    whole = export_folder(source, tmp_path / "whole", 2)
    everything = sorted(written)
    written.clear()
    partial = interrupted(source, tmp_path, 20)
    first = sorted(written)
    assert len(first) == 20
    written.clear()
    folder = export_folder(source, tmp_path, 2, verify=True)
    assert sorted(first + written) == everything
    assert not partial.exists()
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (whole, folder)]
    assert manifests[0]["files"] == manifests[1]["files"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in whole.iterdir())


def test_an_altered_file_is_written_again(source: Path, tmp_path: Path, written: list[str]) -> None:
    partial = interrupted(source, tmp_path, 20)
    short, altered, kept = sorted(written)[:3]
    (partial / short).write_bytes(b"short")
    content = bytearray((partial / altered).read_bytes())
    content[0] ^= 1
    (partial / altered).write_bytes(content)
    (partial / "stray.bin").write_bytes(b"from nowhere")
    with (partial / JOURNAL_NAME).open("a") as journal:
        journal.write('{"name": "model.wte.b')
    written.clear()
    folder = export_folder(source, tmp_path, 2)
    assert {short, altered} <= set(written)
    assert kept not in written
    FTCheckpoint.open(folder)
    assert not (folder / "stray.bin").exists()


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "other weights": lambda source: make_nemo(source, small_config(), seed=1) and {},
    "another type": lambda _: {"data_type": "bf16"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_export_starts_anew(
    change: str, source: Path, tmp_path: Path, written: list[str]
) -> None:
    interrupted(source, tmp_path, 20)
    first = set(written)
    written.clear()
    folder = export_folder(source, tmp_path, 2, **CHANGES[change](source))
    assert first <= set(written)
    FTCheckpoint.open(folder)


def test_an_error_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path, 20)
    monkeypatch.setattr(tasks, "strips", lambda *_, **__: iter(()))
    with pytest.raises(CheckpointError, match="has another size"):
        export_folder(source, tmp_path, 2)
    assert not (tmp_path / "m" / "1" / "2-gpu.partial").exists()


def test_two_exports_into_one_folder(source: Path, tmp_path: Path) -> None:
    partial = interrupted(source, tmp_path, 20)
    files = sorted(path.name for path in partial.iterdir())
    journal = ExportJournal(partial, "another")
    with pytest.raises(CheckpointError, match="another export is writing here"):
        export_folder(source, tmp_path, 2)
    journal.close(remove=False)
    assert sorted(path.name for path in partial.iterdir()) == files


VERIFIED = {
    "tp2 fp16": (Variant(tp_size=2), {}, 2, "fp16"),
    "copied heads": (
        Variant("mcore"),
        {"num_kv_heads": 2, "gated": True, "position_embedding": "rope"},
        4,
        "bf16",
    ),
}


@pytest.mark.parametrize("case", VERIFIED)
def test_verified_exports(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    variant, changes, tp_size, data_type = VERIFIED[case]
    make_nemo(tmp_path / "s.nemo", small_config(**changes), variant)
    folder = export_folder(tmp_path / "s.nemo", tmp_path, tp_size, data_type, verify=True)
    assert "tensors against" in capfd.readouterr().out
    assert rebuilt(FTCheckpoint.open(folder))


def test_verification_finds_a_wrong_shard(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks written in the wrong order have the right sizes and digests, and still are wrong."""
    right = tasks.rank_columns

    def wrong(spec: Any, config: Any, tp_size: int, tp_rank: int, blocks: Any) -> list[np.ndarray]:
        if spec.name == "layers.*.mlp.dense_4h_to_h.weight":
            tp_rank = tp_size - 1 - tp_rank
        return right(spec, config, tp_size, tp_rank, blocks)

    monkeypatch.setattr(tasks, "rank_columns", wrong)
    with pytest.raises(CheckpointError, match="4 problems") as caught:
        export_folder(source, tmp_path, 2, verify=True)
    assert "layers.3.mlp.dense_4h_to_h.weight is not what the source holds" in str(caught.value)
    assert not (tmp_path / "m").exists()
    export_folder(source, tmp_path, 2)


def test_what_was_allowed_before_is_looked_at_again(tmp_path: Path, written: list[str]) -> None:
    """NaN weights of an interrupted export that allowed them are not taken over."""
    source = tmp_path / "source.nemo"
    make_nemo(source, small_config())

    def change(state: dict[str, Any]) -> None:
        for layer in range(small_config().num_layers):
            key = f"encoder.layers.{layer}.self_attention.query_key_value.weight"
            state[f"model.language_model.{key}"][0] = np.nan

    edited(source, change)
    interrupted(source, tmp_path, 2, allow_nonfinite=True)
    assert all("query_key_value.weight" in name for name in written)
    with pytest.raises(CheckpointError, match="4 problems in the weights"):
        export_folder(source, tmp_path, 2)
