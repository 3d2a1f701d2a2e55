"""Submission to Slurm, with a stand-in for sbatch; rendering is in test_golden.py."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import JobFolder
from launcher_scripts.cluster.slurm_script import SlurmOptions
from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import Planner, Run


def test_stages_are_chained(run: Run, arguments: list[str], calls: Path, tmp_path: Path) -> None:
    result = run("stages=[export,deploy,evaluate]", *arguments, SLURM_JOB_ID="9", SLURM_NTASKS="4")
    assert result.returncode == 0, result.stderr
    export, deploy, evaluate = calls.read_text().splitlines()
    assert export == str(tmp_path / "the results/tiny") + (
        "/export_tp2_pp1_auto_auto/jobs/001/export_tiny_submission.sh"
    )
    assert deploy.startswith("--dependency=afterok:101 --kill-on-invalid-dep=yes /")
    assert evaluate.startswith("--dependency=after:102,afterok:101 --kill-on-invalid-dep=yes /")
    assert "submitted deploy_tiny as Slurm job 102" in result.stdout
    folder = tmp_path / "the results/tiny/deploy_tp2_pp1_auto_auto/jobs/001"
    record = json.loads((folder / "job.json").read_text())
    assert (record["job_id"], record["after"]) == ("102", "101")
    assert record["log"] == "log-deploy_tiny_102.out"
    names = {path.name for path in folder.iterdir()}
    own = {"deploy_tiny_hydra.yaml", "deploy_tiny_submission.sh", "job.json", "job_id"}
    assert names == {*own, "client_job_id"}
    assert (folder / "job_id").read_text() == "102\n"
    assert (folder / "client_job_id").read_text() == "103\n"
    assert "--mpi=none" in Path(f"{calls}.2.sh").read_text()


def test_only_the_first_job_waits_for_a_training(
    run: Run, arguments: list[str], calls: Path
) -> None:
    """The command line's --dependency replaces that of the script."""
    training = "cluster.dependency='afterok:4711'"
    result = run("stages=[export,deploy]", *arguments, training)
    assert result.returncode == 0, result.stderr
    export, deploy = calls.read_text().splitlines()
    assert export.startswith("--kill-on-invalid-dep=yes /")
    assert deploy.startswith("--dependency=afterok:101 --kill-on-invalid-dep=yes /")
    assert "--dependency=afterok:4711" in Path(f"{calls}.1.sh").read_text()


def test_fewer_cpus_than_a_server_needs_are_a_note(
    run: Run, arguments: list[str], calls: Path
) -> None:
    assert not calls.exists()
    more = ("cluster.exclusive=False", "cluster.cpus_per_task=1")
    result = run("stages=[export,deploy]", *arguments, *more)
    assert result.returncode == 0, result.stderr
    assert (
        "note: cluster.cpus_per_task=1 is fewer than the 3 CPUs that the deploy job needs"
        in result.stdout
    )


def test_a_refusal_is_one_message(run: Run, arguments: list[str], calls: Path) -> None:
    result = run("stages=[export,deploy]", *arguments, REFUSE="1")
    assert result.returncode == 3
    assert "sbatch refused the export job" in result.stderr
    assert "invalid partition specified" in result.stderr
    assert "export_tiny_submission.sh" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("asked", ["TERM", "HUP"])
def test_a_launcher_that_is_ended_takes_back_what_was_queued(
    run: Run, arguments: list[str], calls: Path, asked: str
) -> None:
    result = run("stages=[export,deploy,evaluate]", *arguments, ASKS=asked)
    assert result.returncode == 128 + signal.Signals[f"SIG{asked}"], result.stderr
    assert "export: cancelled Slurm job 101" in result.stdout
    assert Path(f"{calls}.cancelled").read_text() == "scancel 101\n"
    assert len(calls.read_text().splitlines()) == 2


def test_a_job_that_slurm_queues_too_late_to_say_so_is_found(
    run: Run, arguments: list[str], calls: Path, tmp_path: Path
) -> None:
    result = run("stages=[export]", *arguments, LATE="1")
    assert result.returncode == 0, result.stderr
    assert "submitted export_tiny as Slurm job 107" in result.stdout
    folder = tmp_path / "the results/tiny/export_tp2_pp1_auto_auto/jobs/001"
    assert json.loads((folder / "job.json").read_text())["job_id"] == "107"
    assert len(calls.read_text().splitlines()) == 1


def test_a_machine_without_slurm_is_told_so(
    run: Run, arguments: list[str], bare_path: Path, tmp_path: Path
) -> None:
    assert not (bare_path / "sbatch").exists()
    result = run("stages=[export]", *arguments)
    assert result.returncode == 3
    assert "sbatch is not on the PATH" in result.stderr
    assert not (tmp_path / "the results").exists()


@pytest.mark.parametrize(
    "options", [{"mpi": "openmpi"}, {"comment": "two\nlines"}, {"gpus_per_node": 0}]
)
def test_options_that_a_script_cannot_hold(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{next(iter(options))}"):
        SlurmOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "python"),
    [
        (("container=null",), sys.executable),
        (("container=x", "cluster.container_runtime=none"), sys.executable),
        (("container=x",), "python3"),
        (("container=null", "cluster.python=/opt/python"), "/opt/python"),
        (("cluster_type=bcp",), sys.executable),
    ],
)
def test_the_interpreter_of_the_steps(
    plan: Planner, arguments: list[str], given: tuple[str, ...], python: str
) -> None:
    """On the host the launcher's own, which has its packages; python3 there may be another."""
    made = plan(*arguments, "dry_run=True", *given)
    (job,) = made.jobs(lambda stage: JobFolder(Path("/jobs/001"), stage.block.run.name))
    assert {step.argv[0] for step in job.steps} == {python}
