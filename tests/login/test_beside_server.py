"""The end of an evaluation's script, with stand-ins for Slurm's programs: the exit code and why."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import JobFolder
from stages.stage import Stage
from tests.login.conftest import Planner

DEPLOYED = ("stages=[deploy,evaluate]", "deploy.model_repository={repository}")
KEEPS = "evaluate.stop_server=False"
Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(plan: Planner, arguments: list[str], tmp_path: Path) -> Script:
    """Runs the evaluation's script: `state` is the server's for scontrol, `code` that of srun."""
    programs = tmp_path / "programs"
    repository = tmp_path / "repository"

    def write(name: str, text: str) -> None:
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)

    def run_script(
        *more: str, state: str, code: int = 0, log: str | None = None, server_id: str | None = "7"
    ) -> subprocess.CompletedProcess[str]:
        stages = [item.format(repository=repository) for item in DEPLOYED]
        made = plan(*arguments, "dry_run=True", *stages, *more)
        jobs = {job.stage: job for job in made.jobs(lambda stage: folder_of(stage, tmp_path))}
        for job in jobs.values():
            job.folder.root.mkdir(parents=True)
        server, job = jobs["deploy"], jobs["evaluate"]
        job.write(made.cluster.render(job))
        if server_id is not None:
            server.folder.id_file.write_text(f"{server_id}\n")
        if log is not None:
            server.folder.log("7").write_text(log)
        write("scontrol", state)
        write("scancel", "exit 1")  # of a job that has ended
        write("srun", f"exit {code}")
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "8"}
        return subprocess.run(
            ["bash", str(job.folder.script)], env=env, capture_output=True, text=True, timeout=60
        )

    return run_script


def folder_of(stage: Stage, root: Path) -> JobFolder:
    return JobFolder(root / stage.name / "jobs" / "001", stage.block.run.name)


def shown(state: str, comment: str = "") -> str:
    """scontrol's answer about a job in a state."""
    return f"printf '%s\\n' 'JobId=7 JobName=x' '   JobState={state} Reason=None' '   {comment}'"


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (shown("CANCELLED"), "CANCELLED"),
        (shown("NODE_FAIL"), "NODE_FAIL"),
        (shown("CANCELLED", "Comment=x JobState=RUNNING"), "CANCELLED"),
        (FORGOTTEN, "FORGOTTEN"),
    ],
    ids=["cancelled", "lost node", "a comment with fields", "forgotten"],
)
@pytest.mark.parametrize("log", [None, "a rank died\n"], ids=["no log", "log"])
def test_a_server_that_has_ended_is_no_verdict(
    script: Script, state: str, name: str, log: str | None
) -> None:
    ran = script(state=state, log=log)
    assert ran.returncode == 3, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("error: the server ended before the evaluation started")
    assert f"(server: {name}; its log: " in last
    assert ("  | a rank died" in ran.stderr) == (log is not None)
    assert ("the server has not started: there is no log" in ran.stderr) == (log is None)


def test_replicas_without_a_log(script: Script) -> None:
    ran = script("deploy.replicas=2", state=shown("CANCELLED"))
    assert (ran.returncode, "there is no log" in ran.stderr) == (3, True), ran.stderr


def test_a_server_without_an_id(script: Script) -> None:
    ran = script(state=shown("RUNNING"), server_id=None)
    assert ran.returncode == 3
    assert "error: the job id of the server is missing" in ran.stderr


@pytest.mark.parametrize("more", [(), ("evaluate.policy=null",)], ids=["policy", "no policy"])
@pytest.mark.parametrize("code", [1, 2])
def test_a_step_that_fails_without_a_verdict(
    script: Script, more: tuple[str, ...], code: int
) -> None:
    """srun's own failure, a missing image and a broken Python have the exit codes of verdicts."""
    ran = script(KEEPS, *more, state=shown("RUNNING"), code=code)
    assert ran.returncode == 3
    assert ran.stderr.endswith("error: it reached no verdict\n")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (137, 137)])
def test_other_exit_codes_are_the_client_s(script: Script, code: int, expected: int) -> None:
    ran = script(KEEPS, state=shown("RUNNING"), code=code)
    assert ran.returncode == expected
