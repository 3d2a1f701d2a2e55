"""A server that gave up a worker of its Python backend while it started is started once more."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.server import process
from launcher_scripts.server.process import REASON
from tests.processes import wait_for
from tests.server.processes import running
from tests.server.test_service import assert_clean_failure, make_repository

needs_server = pytest.mark.usefixtures("tritonserver")

# What is seen of a server that locks what its worker has left locked.
ABORTS_THE_SERVER = """print("what():  boost::interprocess::lock_exception", flush=True)
            os.kill(os.getppid(), signal.SIGABRT)
            time.sleep(60)"""
IS_HELD_UP = """subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)"""


@needs_server
@pytest.mark.parametrize(
    ("does", "end"),
    [
        pytest.param(ABORTS_THE_SERVER, "the server was killed by SIGABRT", id="aborted"),
        pytest.param(IS_HELD_UP, REASON, id="waiting indefinitely", marks=pytest.mark.slow),
    ],
)
def test_the_second_start_gets_ready(tmp_path: Path, does: str, end: str) -> None:
    mark = tmp_path / "started"
    code = f"""import signal
        if not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").close()
            {does}
        self.status("ready")"""
    with running(tmp_path / "job", make_repository(tmp_path, code)) as step:
        step.wait_until_ready()
        assert f"second start, 1 of 1: {end}" in step.out
        assert REASON in step.out
        assert step.stop() == 0, step.err
        assert step.survivors() == []


@needs_server
def test_there_is_no_third_start(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "os.kill(os.getpid(), 9)")
    with running(tmp_path / "job", repository) as step:
        assert_clean_failure(step, REASON, "Stub process 'standin_0_0' is not healthy")
        assert step.out.count("starting ") == 2


def test_a_server_that_waits_for_a_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WAITING_SECONDS", 0.0)
    shell = ["sh", "-c", "sleep 600; true"]
    with subprocess.Popen(shell, start_new_session=True) as waits:
        try:
            wait_for(process.LostWorkerDetector(waits.pid))
        finally:
            os.killpg(waits.pid, signal.SIGKILL)
    with subprocess.Popen(["sleep", "600"]) as sleeps:
        noticed = [process.LostWorkerDetector(sleeps.pid)() for _ in range(3)]
        sleeps.kill()
    assert noticed == [False] * 3
