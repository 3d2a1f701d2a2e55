"""The signals that ask a program to end, and what /proc says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher_scripts.common.processes import (
    StopRequest,
    is_suspended,
    process_name,
    process_stat,
    seconds_since,
    start_of,
)


@pytest.mark.parametrize(
    ("nohup", "received"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, None)]
)
def test_nohup_outlives_its_terminal(
    nohup: signal.Handlers, received: signal.Signals | None
) -> None:
    before = signal.signal(signal.SIGHUP, nohup)
    try:
        request = StopRequest()
        with request.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.received == received
        assert signal.getsignal(signal.SIGHUP) == nohup
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_is_noted_apart() -> None:
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert (request.name, request.again) == ("SIGTERM", False)
        os.kill(os.getpid(), signal.SIGINT)
    assert (request.name, request.again) == ("SIGTERM", True)


def test_a_process_whose_name_looks_like_fields_of_stat(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "1000"])
    try:
        while process_name(child.pid) != program.name:
            time.sleep(0.01)
        stat = process_stat(child.pid)
        assert (stat.parent, start_of(child.pid)) == (os.getpid(), stat.started)
        assert process_stat(os.getpid()).started <= stat.started
        assert seconds_since(stat.started) >= 0
        assert not is_suspended(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_suspended(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_of(child.pid) is None  # nobody has asked for its exit status
    finally:
        child.kill()
        child.wait()
    with pytest.raises(OSError):
        process_stat(child.pid)
    assert start_of(child.pid) is None and not is_suspended(child.pid)


ENDS_WITH_PARENT = """
import os, signal, sys
from launcher_scripts.common.processes import signal_when_parent_dies
if os.fork() == 0:
    signal_when_parent_dies(signal.SIGTERM)
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
sys.stdin.read()
"""


def test_a_child_is_told_of_its_parents_death() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        child = int(parent.stdout.readline())
        parent.kill()
    limit = time.monotonic() + 60
    while start_of(child) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert start_of(child) is None
