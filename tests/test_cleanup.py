"""What killed servers leave is removed; what living ones and other users have stays."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher_scripts.common import processes

SERVER = """
import os, subprocess, sys, time
from pathlib import Path
from launcher_scripts.common.processes import ServerLock

folder, shared_memory = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir()
lock = ServerLock(folder, shared_memory)
(shared_memory / f"{lock.region_prefix}region").touch()
worker = subprocess.Popen(["sleep", "600"], pass_fds=lock.descriptors)
print(worker.pid, flush=True)
time.sleep(600)
"""


class Server:
    """A process that holds a server's lock, and one that has inherited it."""

    def __init__(self, folder: Path, shared_memory: Path, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(shared_memory)],
            cwd=checkout,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.worker = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_worker(self) -> None:
        """Returns once the worker, which is not a child of this process, holds nothing any more."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.worker)
            os.kill(self.worker, signal.SIGKILL)
            ended, _, _ = select.select([descriptor], [], [], 60)
            os.close(descriptor)
            assert ended, f"process {self.worker} lives on"


@pytest.fixture
def shared_memory(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def server(tmp_path: Path, shared_memory: Path, checkout: Path) -> Iterator[Server]:
    started = Server(tmp_path / "launcher-server-abcd_123", shared_memory, checkout)
    yield started
    started.kill_worker()
    started.kill()
    assert started.process.stdout is not None
    started.process.stdout.close()


def test_only_what_no_process_holds_is_removed(
    tmp_path: Path, shared_memory: Path, server: Server
) -> None:
    folder = tmp_path / "launcher-server-abcd_123"
    other = shared_memory / "launcher-server-abcd_999_region"  # of a server without a lock
    other.touch()
    assert processes.remove_leftovers(shared_memory, tmp_path) == []
    server.kill()
    assert processes.remove_leftovers(shared_memory, tmp_path) == []  # its worker lives
    assert folder.is_dir()
    server.kill_worker()
    assert processes.remove_leftovers(shared_memory, tmp_path) == [folder.name]
    assert list(shared_memory.iterdir()) == [other]
    assert not folder.exists()
    assert processes.remove_leftovers(shared_memory, tmp_path) == []


def test_another_user_s_lock_and_links_stay(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = shared_memory / "launcher-server-abcd_123.lock"
    target = tmp_path / "target"
    target.touch()
    lock.symlink_to(target)
    assert processes.remove_leftovers(shared_memory, tmp_path) == []
    lock.unlink()
    lock.touch()
    monkeypatch.setattr(processes.os, "geteuid", lambda: 12345)
    assert processes.remove_leftovers(shared_memory, tmp_path) == []
    assert lock.exists()


def test_a_server_that_ends_in_order_leaves_nothing(tmp_path: Path, shared_memory: Path) -> None:
    folder = tmp_path / "launcher-server-abcd_123"
    folder.mkdir()
    lock = processes.ServerLock(folder, shared_memory)
    region = shared_memory / f"{lock.region_prefix}region"
    region.touch()
    assert processes.remove_leftovers(shared_memory, tmp_path) == []
    lock.hide_memory()
    assert list(shared_memory.iterdir()) == []
    assert processes.remove_leftovers(shared_memory, tmp_path) == []  # the folder is in use
    lock.release()
    assert processes.remove_leftovers(shared_memory, tmp_path) == [folder.name]
    assert not folder.exists()
