"""Evaluations that are cancelled or started again, and their servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.jobs.conftest import Jobs
from tests.processes import wait_for, wait_for_file
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended
from tests.whole_job import make_checkpoint

# A real step of the checkout; with `waits` its first start does nothing until Slurm ends it.
STEP = """import os, sys, time
from pathlib import Path

if {waits} and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    Path(os.environ["EXPORT_WAITS"]).write_text("waits")
    time.sleep(600)
environment = {{**os.environ, "PYTHONPATH": {checkout!r}}}
command = [sys.executable, "-m", "launcher_scripts.steps.{name}", *sys.argv[1:]]
os.execve(sys.executable, command, environment)
"""


def requeue(slurm: TestCluster, job_id: str) -> None:
    """Have Slurm end a job and start it again."""
    slurm.run("scontrol", "requeue", job_id)

    def pends() -> bool:
        return "JobState=PENDING" in slurm.run("scontrol", "show", "job", job_id).stdout

    wait_for(pends)
    # A node refuses a job within the second in which it has ended it.
    slurm.run("scontrol", "update", f"jobid={job_id}", "StartTime=now+2")


def test_a_server_that_is_cancelled_before_it_starts(
    slurm: TestCluster, submit: Submit, tmp_path: Path
) -> None:
    waits = tmp_path / "waits"
    submit("stages=[export,deploy,evaluate]", EXPORT_WAITS=str(waits))
    wait_for_file(waits)
    slurm.run("scancel", submit.record("deploy")["job_id"])
    waits.unlink()
    assert ended(slurm, submit, "evaluate") == ("FAILED", "3:0")
    last = submit.log("evaluate").splitlines()[-1]
    assert last.startswith("error: the server ended before the evaluation started")
    assert "(server: CANCELLED; " in last


def test_a_server_ends_with_an_evaluation_that_is_cancelled_before_it_starts(
    slurm: TestCluster, submit: Submit, tmp_path: Path
) -> None:
    waits = tmp_path / "waits"
    submit("stages=[export,deploy,evaluate]", EXPORT_WAITS=str(waits))
    wait_for_file(waits)
    slurm.run("scancel", submit.record("evaluate")["job_id"])
    waits.unlink()
    assert ended(slurm, submit, "deploy") == ("FAILED", "3:0")
    assert "the evaluation has ended: the server is not started" in submit.log("deploy")
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


def test_a_requeued_evaluation_goes_on_with_its_server(
    slurm: TestCluster, submit: Submit, jobs: Jobs
) -> None:
    options = ("cluster.requeue=True", "deploy.server.http_port=0")
    submit(*submit.measured, *options, EVALUATE_WAITS="60", EVALUATE_SECONDS="3")
    wait_for(lambda: "measuring at" in submit.log("evaluate"))
    requeue(slurm, submit.record("evaluate")["job_id"])
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert submit.log("evaluate").count("measuring at") == 2
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert submit.log("deploy").count("server starts") == 1
    assert jobs("wait", "evaluate_tiny").returncode == 0


def test_an_export_that_is_requeued_between_its_steps_goes_on(
    slurm: TestCluster, submit: Submit, launcher: Path, checkout: Path, tmp_path: Path
) -> None:
    """The real steps: the second start finds what the first has written."""
    for name in ("convert_checkpoint", "write_model_repository"):
        values = {"checkout": str(checkout), "name": name, "waits": name.startswith("write")}
        (launcher / "steps" / f"{name}.py").write_text(STEP.format(**values))
    waits = tmp_path / "waits"
    submit(
        "stages=[export]",
        f"export.model.checkpoint_path={make_checkpoint(tmp_path / 'real.nemo')}",
        "cluster.requeue=True",
        EXPORT_WAITS=str(waits),
    )
    wait_for_file(waits)
    requeue(slurm, submit.record("export")["job_id"])
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    assert "the earlier export is the same and is kept" in submit.log("export")
    (config,) = submit.results.glob("export_*/model_repo/tiny/config.pbtxt")
    assert (config.parent / "1" / "2-gpu" / "manifest.json").exists()


@pytest.mark.parametrize("killed", [False, True], ids=["cancelled", "killed"])
def test_a_server_ends_with_an_evaluation_that_is_ended(
    slurm: TestCluster, submit: Submit, *, killed: bool
) -> None:
    """A killed one runs none of its handlers: the server's own job looks for it."""
    submit(*submit.measured, EVALUATE_WAITS="60", EVALUATE_SECONDS="120")
    wait_for(lambda: "measuring at" in submit.log("evaluate"))
    job_id = submit.record("evaluate")["job_id"]
    if killed:
        for pid in slurm.job_processes(job_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        slurm.run("scancel", job_id)
    assert ended(slurm, submit, "evaluate")[0] == ("FAILED" if killed else "CANCELLED")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert "server stopped in order" in submit.log("deploy")
    looked = "the evaluation has ended: the server is stopped" in submit.log("deploy")
    assert looked or not killed
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


def test_a_launcher_that_is_killed_after_the_submission(
    slurm: TestCluster, submit: Submit, jobs: Jobs, tmp_path: Path
) -> None:
    """It could not write the id: the script does."""
    program = tmp_path / "programs" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" || exit\n'
        'case "$*" in *_submission.sh) kill -KILL "$PPID"; sleep 5 ;; esac\n'
    )
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    waits = tmp_path / "waits"
    ran = submit("stages=[export]", check=False, PATH=path, EXPORT_WAITS=str(waits))
    assert ran.returncode != 0 and "submitted export_tiny" not in ran.stdout
    assert submit.record("export")["job_id"] == ""
    wait_for_file(waits)
    status = jobs("status", "export_tiny")
    (job_id,) = slurm.run("squeue", "--noheader", "--format=%i").stdout.split()
    assert f" {job_id} " in status.stdout and " RUNNING " in status.stdout
    waits.unlink()
    waited = jobs("wait", "export_tiny")
    assert waited.returncode == 0, waited.stderr
    assert slurm.wait(job_id)["JobState"] == "COMPLETED"
