"""Evaluations that are cancelled or started again, and their servers."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.conftest import Jobs
from tests.processes import wait_for, wait_for_file
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended


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
    requeue = ("cluster.requeue=True", "deploy.server.http_port=0")
    submit(*submit.measured, *requeue, EVALUATE_WAITS="60", EVALUATE_SECONDS="3")
    wait_for(lambda: "measuring at" in submit.log("evaluate"))
    job_id = submit.record("evaluate")["job_id"]
    slurm.run("scontrol", "requeue", job_id)

    def pends() -> bool:
        return "JobState=PENDING" in slurm.run("scontrol", "show", "job", job_id).stdout

    wait_for(pends)
    # A node refuses a job within the second in which it has ended it.
    slurm.run("scontrol", "update", f"jobid={job_id}", "StartTime=now+2")
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert submit.log("evaluate").count("measuring at") == 2
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert submit.log("deploy").count("server starts") == 1
    assert jobs("wait", "evaluate_tiny").returncode == 0
