"""Files that become shorter while they are read: one line, not a bus error."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from launcher_scripts.checkpoint import export as export_module
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.layout.writing import SHORTENED, run_all
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.processes import CHECKOUT
from tests.checkpoint.exporting import refused_export
from tests.checkpoint.test_gguf import write
from tests.checkpoint.tiny_models import DECODERS
from tests.checkpoint_maker import Variant, make_nemo, small_config

PAGE = mmap.PAGESIZE


def _hugging_face(folder: Path) -> Path:
    DECODERS["llama"].save(folder / "hf")
    return folder / "hf"


def _gguf(folder: Path) -> Path:
    write(DECODERS["llama"].make(), folder / "a.gguf", gguf.GGMLQuantizationType.F32)
    return folder / "a.gguf"


def _nemo(*variant: str, **more: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_nemo(folder / "a", small_config(), Variant(*variant, **more))
        return folder / "a"

    return make


SOURCES: dict[str, Callable[[Path], Path]] = {
    "safetensors": _hugging_face,
    "gguf": _gguf,
    "tar": _nemo(),
    "torch": _nemo(container="folder"),
    "torch_dist": _nemo("torch_dist", container="folder"),
    "zarr": _nemo("zarr", container="folder"),
}


def cut(path: Path) -> None:
    """Make the checkpoint's files shorter, as a second download of it would."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_is_cut_after_it_was_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCES[kind](tmp_path)
    plan = export_module.plan_tasks

    def plan_and_cut(*args: Any) -> Any:
        tasks = plan(*args)
        cut(source)
        return tasks

    monkeypatch.setattr(export_module, "plan_tasks", plan_and_cut)
    refused_export(source, tmp_path, "became shorter while")


def test_a_header_that_is_cut_after_the_file_was_mapped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * PAGE))
    region = Archive(tmp_path).region("a")
    os.truncate(tmp_path / "a", PAGE)
    with pytest.raises(CheckpointError, match=r"a became shorter .*; got .4096 bytes.; .*12288"):
        region.bytes()


def test_a_process_of_the_export_that_reads_beyond_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * PAGE))
    buffer = Archive(tmp_path).region("a").buffer
    os.truncate(tmp_path / "a", PAGE)
    with pytest.raises(CheckpointError, match=SHORTENED):
        run_all([2 * PAGE], lambda place, take: take(buffer[place]), print, 2)


@pytest.mark.parametrize("reader", ["buffer[-1:]", "numpy.frombuffer(buffer, 'u1').sum()"])
def test_the_process_itself_that_reads_beyond_the_end(reader: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * PAGE))
    program = f"""
import mmap, os, numpy
from launcher_scripts.common.processes import bus_errors_as
path = {str(tmp_path / "a")!r}
file = open(path, "rb")
buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, {PAGE})
with bus_errors_as("the file became shorter"):
    {reader}
print("not reached")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "the file became shorter\n"
