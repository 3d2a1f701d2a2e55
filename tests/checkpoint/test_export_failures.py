"""What must not be exported: one clear error, and nothing left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher_scripts.checkpoint import export as export_module
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import ExportJournal, FileEntry
from launcher_scripts.checkpoint.layout import tasks
from launcher_scripts.common.errors import CheckpointError, ConfigError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings, write_settings
from launcher_scripts.steps import convert_checkpoint, write_model_repository
from tests.checkpoint.exporting import export_folder, refused_export, weight_bytes
from tests.checkpoint.test_torch_file import Evil
from tests.checkpoint_maker import Variant, make_nemo, small_config

STEM = "model.language_model."
LAYER = f"{STEM}encoder.layers.1."


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The checkpoint of one rank with its state dict changed."""
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    name = next(name for name in members if name.endswith("model_weights.ckpt"))
    state = torch.load(io.BytesIO(members[name]), weights_only=True)
    state = change(state) or state
    buffer = io.BytesIO()
    torch.save(state, buffer)
    members[name] = buffer.getvalue()
    with tarfile.open(path, "w") as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_all_misses_come_in_one_error(source: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        del state[f"{LAYER}mlp.dense_h_to_4h.weight"]
        del state[f"{STEM}encoder.final_layernorm.bias"]
        state[f"{LAYER}self_attention.unknown.weight"] = torch.ones(2)
        state[f"{LAYER}self_attention.dense.bias"] = torch.ones(5)
        state[f"{LAYER}mlp.dense_4h_to_h.bias"] = torch.ones(32, dtype=torch.int64)

    text = refused_export(edited(source, change), tmp_path, "5 problems")
    for part in (
        "encoder.layers.1.mlp.dense_h_to_4h.weight is missing",
        "encoder.final_layernorm.bias is missing",
        "encoder.layers.1.self_attention.unknown.weight is a tensor this model should not have",
        "encoder.layers.1.self_attention.dense.bias has another shape",
        "layers.1.mlp.dense_4h_to_h.bias is made of int64 values",
    ):
        assert part in text


def test_a_malicious_checkpoint(source: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    refused_export(
        edited(source, lambda state: {**state, "x": Evil(marker)}),
        tmp_path,
        "names posix.system, which only an attack needs",
    )
    assert not marker.exists()


def test_a_truncated_checkpoint(source: Path, tmp_path: Path) -> None:
    content = source.read_bytes()
    source.write_bytes(content[: len(content) * 2 // 3])
    refused_export(source, tmp_path, "cut short")


def test_a_missing_rank(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    make_nemo(path, small_config(), Variant(tp_size=2, pp_size=2, container="folder"))
    (path / "tp_rank_01_pp_rank_001" / "model_weights.ckpt").unlink()
    refused_export(path, tmp_path, "tensor-parallel rank 1, stage 1 is missing")


def test_missing_and_short_chunks(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    make_nemo(path, small_config(), Variant("zarr", container="folder"))
    tensor = path / "model_weights" / "model.decoder.layers.mlp.linear_fc2.weight"
    (tensor / "2.0.0").unlink()
    (tensor / "1.0.0").write_bytes(b"short")
    text = refused_export(path, tmp_path, "2 problems")
    assert "linear_fc2.weight/2.0.0" in text
    assert "linear_fc2.weight/1.0.0: 5 bytes" in text


def test_lost_virtual_pipeline_stages(tmp_path: Path) -> None:
    """A run with virtual stages holds chunks; plain stages in their place would be out of order."""
    raw = {"virtual_pipeline_model_parallel_size": 2}
    make_nemo(tmp_path / "s.nemo", small_config(), Variant(pp_size=2, raw=raw))
    refused_export(tmp_path / "s.nemo", tmp_path, "does not hold its virtual pipeline stages")


RAW = {
    "transformer_block_type": ("normformer", "transformer_block_type is not supported"),
    "headscale": (True, "headscale is not supported"),
    "num_moe_experts": (8, "num_moe_experts is not supported"),
    "activation": ("quick-gelu", "activation is not supported.*squared-relu"),
    "position_embedding_type": ("kerple", "position_embedding_type is not supported"),
    "num_query_groups": (2, "num_query_groups needs mcore_gpt"),
    "num_attention_heads": (None, "num_attention_heads must be a positive number"),
    "transformer_engine": (True, "transformer_engine without mcore_gpt"),
    "ffn_hidden_size": (44, "another shape"),
}


@pytest.mark.parametrize("key", RAW)
def test_what_cannot_be_represented(key: str, tmp_path: Path) -> None:
    value, message = RAW[key]
    make_nemo(tmp_path / "s.nemo", small_config(), Variant(raw={key: value}))
    refused_export(tmp_path / "s.nemo", tmp_path, message)


def test_fp16_overflow_names_the_tensor(source: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state[f"{LAYER}mlp.dense_4h_to_h.weight"][3, 4] = -70000.0

    text = refused_export(edited(source, change), tmp_path, "does not fit fp16", data_type="fp16")
    assert "layers.1.mlp.dense_4h_to_h.weight" in text
    assert "70000" in text
    folder = export_folder(source, tmp_path, data_type="fp32")
    assert FTCheckpoint.open(folder).config.num_layers == 4


def test_sizes_that_do_not_divide(source: Path, tmp_path: Path) -> None:
    assert "choices: 1, 2, 4" in refused_export(source, tmp_path, "4 attention heads", 3)
    settings = ExportSettings("m", "gpt3", str(source), str(tmp_path / "m"), Parallelism(1, 5))
    with pytest.raises(ConfigError, match="layers, fewer than pipeline stages"):
        export_module.check_serving(settings, small_config())


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    refused_export(tmp_path / "no.nemo", tmp_path, "does not exist.*export.model.checkpoint_path")


def test_existing_output(source: Path, tmp_path: Path) -> None:
    folder = export_folder(source, tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    (folder / "stray").write_text("from before")
    with pytest.raises(CheckpointError, match=r"already exists.*overwrite"):
        export_folder(source, tmp_path, reuse=False)
    export_folder(source, tmp_path, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in folder.parent.iterdir()] == ["1-gpu"]


def test_an_earlier_export_is_kept_if_it_is_the_same(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = export_folder(source, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "is kept" not in capfd.readouterr().out
    assert export_folder(source, tmp_path) == folder
    assert f"the earlier export is the same and is kept: {folder}" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    with pytest.raises(
        CheckpointError, match=r"of other settings; change export\.model\.overwrite"
    ):
        export_folder(source, tmp_path, data_type="fp16")
    weights = next(folder.glob("*.weight*.bin"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is too short"):
        export_folder(source, tmp_path)
    source.touch()  # it may hold other weights now
    with pytest.raises(CheckpointError, match="it is of another checkpoint"):
        export_folder(source, tmp_path)


def test_a_failed_overwrite_keeps_what_was_there(source: Path, tmp_path: Path) -> None:
    folder = export_folder(source, tmp_path)
    content = source.read_bytes()
    source.write_bytes(content[:4000])
    with pytest.raises(CheckpointError):
        export_folder(source, tmp_path, overwrite=True)
    FTCheckpoint.open(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["1-gpu"]


def test_lost_tokenizer_names_the_key(source: Path, tmp_path: Path) -> None:
    refused_export(
        source,
        tmp_path,
        "does not hold its tokenizer's files.*export.model.tokenizer",
        tokenizer=TokenizerSettings("auto"),
    )


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    refused_export(source, tmp_path, "10 bytes free")


def test_no_room_for_a_file(source: Path, tmp_path: Path) -> None:
    """A limit of a file's size fails as a full disk does."""
    settings = big_settings(source, tmp_path)
    command = [sys.executable, "-m", convert_checkpoint.__name__, "--settings", str(settings)]
    limited = 'ulimit -f 1 && exec "$@"'
    ran = subprocess.run(
        ["bash", "-c", limited, "bash", *command], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert "cannot write" in ran.stderr and "File too large" in ran.stderr
    assert not (tmp_path / "m" / "1").exists() or not any((tmp_path / "m" / "1").iterdir())
    assert convert_checkpoint.main(["--settings", str(settings)]) == 0
    FTCheckpoint.open(tmp_path / "m" / "1" / "1-gpu")


def test_no_room_for_the_list_of_files(tmp_path: Path) -> None:
    journal = ExportJournal(tmp_path, "m")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match="No space left on device"):
        journal.add(FileEntry("a.bin", 1, "00"))
    journal.close(remove=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[False, True], ids=["alone", "processes"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether several processes write the tensors, small as they are."""
    if request.param:
        monkeypatch.setattr(tasks, "MIN_BYTES", 0)
    return request.param


@pytest.mark.usefixtures("divided")
def test_what_fails_ends_the_export(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsendable(Exception):
        def __init__(self, one: object, other: object) -> None:
            super().__init__(f"{one} and {other}")

    strips = tasks.strips

    def failing(columns: Any, dtype: Any, name: str, *more: Any, **options: Any) -> Any:
        if "layers.2" in name:
            raise error
        return strips(columns, dtype, name, *more, **options)

    monkeypatch.setattr(tasks, "strips", failing)
    for error in (CheckpointError("it cannot be read"), Unsendable("this", "that")):
        with pytest.raises(Exception, match=str(error)):
            export_folder(source, tmp_path)
        assert not (tmp_path / "m").exists()


def test_processes_write_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = export_folder(source, tmp_path / "alone", 2, "bf16")
    monkeypatch.setattr(tasks, "MIN_BYTES", 0)
    divided = export_folder(source, tmp_path / "divided", 2, "bf16", verify=True)
    assert weight_bytes(alone) == weight_bytes(divided)
    FTCheckpoint.open(divided, verify=True)


def test_a_killed_process_ends_the_export(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system does to one of them where memory is short."""
    monkeypatch.setattr(tasks, "MIN_BYTES", 0)
    monkeypatch.setattr(tasks, "strips", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    refused_export(
        source, tmp_path, "a process of the export ended early, with an exit code; got -9"
    )


def big_settings(source: Path, target: Path) -> Path:
    path = target / "settings.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model_name": "m",
                "model_type": "gpt3",
                "checkpoint_path": str(source),
                "triton_model_dir": str(target / "m"),
                "tokenizer": {"source": "none"},
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model large enough (300 MB) to be stopped in the middle of its files."""
    path = tmp_path_factory.mktemp("large") / "source.nemo"
    config = small_config(hidden_size=1024, head_size=256, ffn_size=4096, num_layers=6)
    make_nemo(path, config)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_no_checkpoint(
    number: int, large: Path, tmp_path: Path
) -> None:
    """What it wrote is kept under another name, and the next run finishes it."""
    settings = big_settings(large, tmp_path)
    command = [sys.executable, "-m", convert_checkpoint.__name__, "--settings", str(settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    partial = tmp_path / "m" / "1" / "1-gpu.partial"
    deadline = time.monotonic() + 240
    while process.poll() is None and not (partial.is_dir() and any(partial.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.poll() is None, "the export was over before it could be stopped"
    os.kill(process.pid, number)
    _, error = process.communicate(timeout=240)
    # As a shell sees it: Python itself may end by SIGINT after it has unwound.
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert status == 128 + number, error
    assert b"Traceback" not in error
    assert [path.name for path in partial.parent.iterdir()] == ["1-gpu.partial"]
    assert convert_checkpoint.main(["--settings", str(settings)]) == 0
    assert [path.name for path in partial.parent.iterdir()] == ["1-gpu"]
    FTCheckpoint.open(tmp_path / "m" / "1" / "1-gpu")


def test_the_step(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = big_settings(source, tmp_path)
    assert convert_checkpoint.main(["--settings", str(settings)]) == 0
    FTCheckpoint.open(tmp_path / "m" / "1" / "1-gpu")
    output = capfd.readouterr()
    assert "100%" in output.err
    assert convert_checkpoint.main(["--settings", str(settings)]) == 0
    assert "the earlier export is the same and is kept" in capfd.readouterr().out


def test_a_job_that_slurm_starts_again_goes_on_after_the_step_that_was_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "settings.yaml", str(tmp_path / "models" / "tiny")
    settings = ExportSettings("tiny", "gpt3", str(source), folder, Parallelism(), processes=1)
    write_settings(replace(settings, tokenizer=TokenizerSettings(source="none")), file)
    for step in (convert_checkpoint, write_model_repository):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
        assert step.main(["--settings", str(file)]) == 0
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert step.main(["--settings", str(file)]) == 0
