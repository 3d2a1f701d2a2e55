"""Which processes a job's folder may have signalled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.cluster import record
from launcher_scripts.cluster.record import PROCESS, end_group, note_process, request_end
from launcher_scripts.common.errors import ClusterError


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that were signalled; nobody is."""
    numbers: list[int] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, _: numbers.append(pid))
    monkeypatch.setattr(record, "_KILL_SECONDS", 0.0)
    return numbers


def changed(folder: Path, **values: object) -> None:
    path = folder / PROCESS
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_a_folder_cannot_name_many_processes(
    tmp_path: Path, signalled: list[int], pid: int
) -> None:
    note_process(tmp_path, os.getpid())
    changed(tmp_path, pid=pid)
    for end in (lambda: request_end(tmp_path, "1", 0.0), lambda: end_group(tmp_path, "1")):
        with pytest.raises(ClusterError, match=f"names no process of a job; got pid {pid}"):
            end()
    assert signalled == []


def test_a_later_process_of_the_same_number_is_left_alone(
    tmp_path: Path, signalled: list[int]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        note_process(tmp_path, process.pid)
        end_group(tmp_path, "1")
        assert set(signalled) == {process.pid}
        signalled.clear()
        changed(tmp_path, started=1)
        end_group(tmp_path, "1")
        assert signalled == []
        process.communicate(b"\n")
