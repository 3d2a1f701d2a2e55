"""A model's process ends with the server that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from launcher_scripts.backends.fastertransformer.server_watch import started_by
from tests.processes import wait_for

SERVER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
child.wait()
"""
MODEL = """
import os, threading
from launcher_scripts.backends.fastertransformer.server_watch import ServerWatch
watch = ServerWatch()
print(os.getpid(), flush=True)
threading.Event().wait()
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


def test_a_killed_server_takes_its_models_along(checkout: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, MODEL], cwd=checkout, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        model = int(server.stdout.readline())
        os.kill(model, 0)
        server.send_signal(signal.SIGKILL)
    wait_for(lambda: not _lives(model))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
