"""A server and its client on a real Slurm: which server is meant, who ends whom, and how."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.processes import wait_for, wait_for_file
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended

CHAIN = "stages=[export,deploy,evaluate]"
TOGETHER = "evaluate.in_deploy_job=True"


def test_the_evaluation_stops_the_server_that_was_started_for_it(
    slurm: TestCluster, submit: Submit
) -> None:
    submit(CHAIN, EVALUATE_WAITS="30")
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert "server stopped in order" in submit.log("deploy")
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


def test_a_failed_evaluation_keeps_its_code_and_stops_the_server(
    slurm: TestCluster, submit: Submit
) -> None:
    submit(*submit.measured, EVALUATE_WAITS="30", EVALUATE_EXITS="5")
    assert ended(slurm, submit, "evaluate") == ("FAILED", "5:0")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0")
    assert "the evaluation ended with exit code 5 (server: RUNNING; its log: " in submit.log(
        "evaluate"
    )


def test_a_verdict_is_the_exit_code_of_its_job(slurm: TestCluster, submit: Submit) -> None:
    submit(*submit.measured, EVALUATE_WAITS="30", VERDICT="1")
    assert ended(slurm, submit, "evaluate") == ("FAILED", "1:0"), submit.log("evaluate")
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0")
    assert "judging the report" in submit.log("evaluate")


def test_a_verdict_is_the_exit_code_of_a_job_that_is_shared(
    slurm: TestCluster, submit: Submit
) -> None:
    submit(*submit.measured, TOGETHER, EVALUATE_WAITS="30", VERDICT="2")
    assert ended(slurm, submit, "deploy") == ("FAILED", "2:0"), submit.log("deploy")


def test_a_server_that_dies_ends_the_evaluation_with_the_reason(
    slurm: TestCluster, submit: Submit
) -> None:
    submit(*submit.measured, SERVER="dies_early", EVALUATE_WAITS="300")
    assert ended(slurm, submit, "deploy") == ("FAILED", "7:0")
    assert ended(slurm, submit, "evaluate") == ("FAILED", "3:0")
    log = submit.log("evaluate")
    # It may end before the evaluation has its nodes.
    why = r"the server ended before the evaluation (did|started) \(server: FAILED; its log: "
    assert re.search(why, log), log
    assert "  | the port is in use" in log
    assert slurm.left_processes(submit.record("evaluate")["job_id"]) == []


def test_client_and_server_share_a_job(slurm: TestCluster, submit: Submit) -> None:
    ran = submit(*submit.measured, TOGETHER, "deploy.run.nodes=2", EVALUATE_WAITS="30")
    assert "evaluate: evaluate_tiny is a step of that job" in ran.stdout
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    deploy, evaluate = submit.record("deploy"), submit.record("evaluate")
    assert deploy["job_id"] == evaluate["job_id"]
    assert evaluate["log"] == str(deploy["folder"] / deploy["log"])
    assert "measuring at" in submit.log("deploy")
    assert "measured the speed" in submit.log("deploy")
    (server_log,) = deploy["folder"].glob("server-*.out")
    assert server_log.name == f"server-deploy_tiny_{deploy['job_id']}.out"
    assert "server stopped in order" in server_log.read_text()
    assert slurm.left_processes(deploy["job_id"]) == []


def test_the_client_s_result_is_the_job_s(slurm: TestCluster, submit: Submit) -> None:
    submit(*submit.measured, TOGETHER, EVALUATE_WAITS="30", EVALUATE_EXITS="5")
    assert ended(slurm, submit, "deploy") == ("FAILED", "5:0")
    assert "the evaluation ended with exit code 5" in submit.log("deploy")


def test_a_dead_server_fails_the_job_that_it_shares(slurm: TestCluster, submit: Submit) -> None:
    submit(*submit.measured, TOGETHER, SERVER="dies_early", EVALUATE_WAITS="300")
    assert ended(slurm, submit, "deploy") == ("FAILED", "3:0")
    assert "the server ended before the evaluation did" in submit.log("deploy")
    assert "  | the port is in use" in submit.log("deploy")
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


@pytest.fixture
def impatient(tmp_path: Path) -> str:
    """A PATH whose sbatch hands on scripts that wait 3 s instead of 20 s for a server's end."""
    program = tmp_path / "programs" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        '[ ! -f "$last" ] || sed -i "s/SECONDS + 20))/SECONDS + 3))/" "$last"\n'
        f'exec {shutil.which("sbatch")} "$@"\n'
    )
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def test_a_server_that_does_not_listen_is_killed(
    slurm: TestCluster, submit: Submit, impatient: str
) -> None:
    short = "deploy.server.stop_timeout=0"
    submit(*submit.measured, TOGETHER, short, SERVER="deaf", EVALUATE_WAITS="30", PATH=impatient)
    record = submit.record("deploy")
    assert "SECONDS + 3))" in (record["folder"] / record["script"]).read_text()
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert slurm.left_processes(submit.record("deploy")["job_id"]) == []


def serving(submit: Submit) -> str:
    """The job of a server that is ready."""
    submit(*submit.served)
    record = submit.record("deploy")
    wait_for_file(record["folder"].parent.parent / "ready.json")
    return record["job_id"]


def test_a_signal_before_the_time_limit_ends_the_server_in_order(
    slurm: TestCluster, submit: Submit
) -> None:
    job_id = serving(submit)
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert "server stopped in order" in submit.log("deploy")
    assert slurm.left_processes(job_id) == []


def test_a_server_that_a_more_urgent_job_displaces_ends_in_order(
    slurm: TestCluster, submit: Submit
) -> None:
    job_id = serving(submit)
    urgent = ("--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null")
    other = slurm.run("sbatch", "--parsable", *urgent, "--wrap=sleep 1").stdout.strip()
    assert slurm.wait(other)["JobState"] == "COMPLETED"
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    assert "server stopped in order" in submit.log("deploy")
    assert slurm.left_processes(job_id) == []


def test_requeueing_starts_the_server_again(slurm: TestCluster, submit: Submit) -> None:
    submit(*submit.served, "cluster.requeue=True")
    record = submit.record("deploy")
    ready_file = record["folder"].parent.parent / "ready.json"
    wait_for_file(ready_file)
    ready_file.unlink()  # the stand-in leaves it behind; the real server takes it back
    slurm.run("scontrol", "requeue", record["job_id"])
    wait_for(lambda: slurm.job_processes(record["job_id"]) == [])
    # Slurm lets a requeued job wait for two minutes.
    wait_for(lambda: "BeginTime" in shown(slurm, record["job_id"]))
    slurm.run("scontrol", "update", f"jobid={record['job_id']}", "starttime=now")
    wait_for_file(ready_file)
    assert "Restarts=1 " in shown(slurm, record["job_id"])
    assert "JobState=RUNNING" in shown(slurm, record["job_id"])
    # The second start has added to the log of the first, which ended in order.
    said = [line for line in submit.log("deploy").splitlines() if line.startswith("server")]
    assert said == ["server starts", "server stopped in order", "server starts"]


def shown(slurm: TestCluster, job_id: str) -> str:
    return str(slurm.run("scontrol", "--oneliner", "show", "job", job_id).stdout)
