"""Jobs of this machine, seen and ended from outside of the launcher that runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Jobs, Statuses
from tests.login.conftest import LOCAL, Run
from tests.login.test_interactive import Start, assert_ended, deploy_folder
from tests.processes import wait_for, wait_for_file


def server(jobs: Jobs) -> str:
    """The server's job folder, once its server has said that it is ready."""
    wait_for(lambda: "deploy_tiny" in jobs("list").stdout)
    return "deploy_tiny"


def test_a_server_from_its_start_to_its_end(
    serving: subprocess.Popen[str], jobs: Jobs, statuses: Statuses, tmp_path: Path
) -> None:
    name = server(jobs)
    wait_for_file(deploy_folder(tmp_path) / "ready.json")
    (seen,) = statuses(name)
    assert (seen["name"], seen["stage"], seen["run"]) == (name, "deploy", "001")
    assert (seen["cluster_type"], seen["state"]) == ("interactive", "RUNNING")
    # The stand-in names an address where nobody answers.
    assert (seen["status"], seen["endpoints"]) == ("NOT ANSWERING", {"http": "127.0.0.1:8000"})
    assert jobs("status", name).returncode == 3
    listed = jobs("list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        *("JOB", "export_tiny", "deploy_tiny")
    ]
    assert "COMPLETED" in listed.stdout.splitlines()[1]
    stopped = jobs("stop", name)
    assert stopped.returncode == 0, stopped.stderr
    assert "COMPLETED" in stopped.stdout
    assert serving.wait(240) == 0
    assert "server stopped in order" in jobs("logs", name).stdout
    assert jobs("logs", "-n", "1", name).stdout == "server stopped in order\n"
    assert jobs("wait", name).returncode == 0
    assert jobs("status", name).returncode == 3  # it does not serve
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_cancelling_ends_everything_at_once(
    serving: subprocess.Popen[str], jobs: Jobs, tmp_path: Path
) -> None:
    name = server(jobs)
    wait_for_file(deploy_folder(tmp_path) / "ready.json")
    assert jobs("cancel", name).returncode == 0
    serving.wait(240)
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())
    assert "no such job" in jobs("wait", "other").stderr


def test_a_failed_job_s_code_is_that_of_wait(run: Any, arguments: list[str], jobs: Jobs) -> None:
    assert run("stages=[export]", LOCAL, *arguments, EXPORT_EXITS="23").returncode == 23
    waited = jobs("wait", "export_tiny")
    assert waited.returncode == 23
    assert "is FAILED with exit code 23" in waited.stderr
    assert "  | converting tiny" in waited.stderr
    assert jobs("status", "export_tiny").returncode == 1


def test_waiting_has_an_end(start: Start, jobs: Jobs, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start("stages=[export]", EXPORT_WAITS=str(pid_file))
    pid = wait_for_file(pid_file)
    waited = jobs("wait", "--timeout=0.3", "export_tiny")
    assert waited.returncode == 124
    assert "after 0.3 s: job" in waited.stderr
    assert jobs("status").returncode == 3
    assert jobs("stop", "export_tiny").returncode == 0
    assert_ended(pid)


def test_a_killed_launcher_leaves_no_running_job(
    serving: subprocess.Popen[str], jobs: Jobs, statuses: Statuses, tmp_path: Path
) -> None:
    name = server(jobs)
    wait_for_file(deploy_folder(tmp_path) / "ready.json")
    serving.kill()
    serving.wait()
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())
    (seen,) = statuses(name)
    assert (seen["status"], seen["exit_code"]) == ("CANCELLED", 143)
    assert "the launcher was killed" in seen["reason"]


def test_following_a_log_ends_with_its_job(start: Start, jobs: Jobs, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = start("stages=[export]", EXPORT_WAITS=str(pid_file))
    wait_for_file(pid_file)
    process.terminate()
    followed = jobs("logs", "-f", "export_tiny")
    assert (followed.returncode, followed.stdout) == (0, "converting tiny\n")


def test_neither_torch_nor_numpy_is_needed(checkout: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    for package in ("torch", "tritonclient", "numpy", "hydra"):
        (blocked / package).mkdir(parents=True)
        (blocked / package / "__init__.py").write_text(f"raise ImportError('{package}')")
    ran = subprocess.run(
        ["python3", "-m", "launcher_scripts.jobs", "list", f"--results={tmp_path}"],
        cwd=checkout,
        env={"PYTHONPATH": str(blocked), "PATH": str(Path(sys.executable).parent)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "JOB"), ran.stderr


def test_a_job_is_described_and_run_again(
    run: Run, arguments: list[str], jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("stages=[export]", LOCAL, *arguments, EXPORT_EXITS="5").returncode == 5
    (described,) = json.loads(jobs("info", "--json", "export_tiny").stdout)
    folder = Path(described["folder"])
    assert (described["state"], described["job"]) == ("FAILED", "export_tiny/001")
    assert {folder} == {Path(described[name]).parent for name in ("settings", "script", "log")}
    assert "main.py" in described["command"] and described["directory"] == str(tmp_path)
    assert f"folder      {folder}\n" in jobs("info", "export_tiny").stdout
    monkeypatch.delenv("EXPORT_EXITS", raising=False)
    again = jobs("resume", "export_tiny")
    assert again.returncode == 0, again.stderr
    assert f"in {tmp_path}: " in again.stdout
    (second,) = json.loads(jobs("info", "--json", "export_tiny").stdout)
    assert (second["state"], second["job"]) == ("COMPLETED", "export_tiny/002")


def test_a_job_that_runs_is_not_resumed(serving: subprocess.Popen[str], jobs: Jobs) -> None:  # noqa: ARG001
    refused = jobs("resume", server(jobs))
    assert refused.returncode == 1
    assert "it can be resumed when it has ended" in refused.stderr
