"""The tables: plain for pipes, coloured and live in a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from launcher_scripts.cluster.record import JobState
from launcher_scripts.jobs.commands import STATUS_COLUMNS, coloured, plain_table
from launcher_scripts.jobs.folders import JobEntry
from launcher_scripts.jobs.status import ServerLoad, Status
from tests.jobs.test_folders import make_job


def statuses(results: Path) -> list[Status]:
    server = JobEntry.read(make_job(results, "deploy", 1, ready_file="/r/ready.json"))
    export = JobEntry.read(make_job(results, "export", 2))
    ready = {"http": "n1:8000", "grpc": "n1:8001", "openai": "http://n1:9/v1"}
    running = JobState("RUNNING", nodes="n[1-2]", seconds=3661)
    load = ServerLoad(
        gpu_use=0.5, gpu_used=2.0**30, gpu_total=2.0**31, kv_use=0.25, requests=9, running=3
    )
    blocked = JobState("PENDING", reason="PartitionTimeLimit")
    return [
        Status(server, "101", running, ready, True, load),
        Status(export, "102", blocked),
    ]


def test_a_pipe_gets_columns(tmp_path: Path) -> None:
    head, server, export = plain_table(statuses(tmp_path), STATUS_COLUMNS).splitlines()
    assert head.split() == list(STATUS_COLUMNS)
    expected = "deploy_tiny 001 101 READY n[1-2] 1:01:01 n1:8000 n1:8001 http://n1:9/v1"
    expected += " 50% 1.0/2.0 GiB 25% 3 9 - -"
    assert server.split() == expected.split()
    assert export.index("PENDING") == server.index("READY") == head.index("STATE")
    assert "PartitionTimeLimit, it will never start: its time limit is beyond" in export


def test_exit_codes_of_what_is_seen(tmp_path: Path) -> None:
    server, export = statuses(tmp_path)
    assert (server.exit_code, export.exit_code) == (0, 3)
    for name, code in (("FAILED", 1), ("COMPLETED", 3), ("UNKNOWN", 5), ("FORGOTTEN", 5)):
        assert Status(server.job, "101", JobState(name)).exit_code == code
    assert Status(export.job, "102", JobState("COMPLETED", 0)).exit_code == 0


def test_a_terminal_gets_colours(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system="standard")
    console.print(coloured(statuses(tmp_path), STATUS_COLUMNS))
    assert "\x1b[32mREADY" in out.getvalue()
    assert "METRICS" not in out.getvalue()


def test_a_live_table_until_it_is_interrupted(checkout: Path, tmp_path: Path) -> None:
    make_job(tmp_path, "export", 1, cluster_type="interactive", job_id=str(os.getpid()))
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "launcher_scripts.jobs", "status", "--watch=0.2"]
    process = subprocess.Popen(
        [*command, f"--results={tmp_path}"],
        cwd=checkout,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    shown = b""
    deadline = time.monotonic() + 240
    try:
        while shown.count(b"export_tiny") < 2 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 65536)
        process.send_signal(2)
        assert process.wait(240) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert shown.count(b"export_tiny") >= 2, shown
    assert b"PENDING" in shown
