"""A model's process ends with the server that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.backends.fastertransformer.server import ServerWatch, started_by
from tests.processes import command_line, wait_for

SERVER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
child.wait()
"""
MODEL = """
import ctypes, os
from launcher_scripts.backends.fastertransformer.server import ServerWatch
watch = ServerWatch()
print(os.getpid(), watch.pid, flush=True)
ctypes.PyDLL(None).pause()
"""


def test_a_server_that_died_before_its_model_began_is_known() -> None:
    """Its model's process then has another parent already."""
    stub = b"/backends/python/triton_python_backend_stub"
    words = [
        stub,
        b"/repo/gpt/1/model.py",
        b"region",
        b"1048576",
        b"1048576",
        b"4242",
        b"/backends",
    ]
    assert started_by(words) == 4242
    assert started_by([b"python3", b"-c", b"pass", b"1", b"2", b"3"]) == os.getppid()


@pytest.mark.parametrize("killed", ["server", "model"])
def test_a_killed_server_takes_its_models_along(checkout: Path, killed: str) -> None:
    """Also where the model waits with Python's lock; and nobody looks after one that has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, MODEL], cwd=checkout, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        model, watch = map(int, server.stdout.readline().split())
        assert _lives(model)
        assert _lives(watch)
        os.kill(server.pid if killed == "server" else model, signal.SIGKILL)
    wait_for(lambda: not _lives(model) and not _lives(watch))


def test_a_watch_that_is_closed_has_ended() -> None:
    watch = ServerWatch()
    assert _lives(watch.pid)
    # One of the shared floor, which imports no torch: that would take seconds of every model.
    wait_for(lambda: "launcher_scripts.common." in command_line(watch.pid))
    watch.close()
    assert not _lives(watch.pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
