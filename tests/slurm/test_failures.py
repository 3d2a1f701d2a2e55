"""What a user sees when something breaks: the reason, the exit code, and nothing left running.

docs/failures.md has the table with the times. Ranks and servers that die are in other tests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launcher_scripts.config.settings import DeploySettings, write_settings
from tests.processes import read, wait_for, wait_for_file, wait_until_gone
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended


def find(slurm: TestCluster, job_id: str, name: str) -> int:
    """A process of a job by its program's name."""
    found = [
        pid
        for pid in slurm.job_processes(job_id)
        if read(Path(f"/proc/{pid}/comm")).decode().strip() == name
    ]
    assert found, f"no {name} in job {job_id}"
    return found[0]


@pytest.fixture
def serving(slurm: TestCluster, submit: Submit) -> str:  # noqa: ARG001
    """The job id of a server that is ready."""
    submit(*submit.served)
    record = submit.record("deploy")
    wait_for_file(record["folder"].parent.parent / "ready.json")
    return str(record["job_id"])


def test_a_killed_srun_ends_its_server(slurm: TestCluster, submit: Submit, serving: str) -> None:
    os.kill(find(slurm, serving, "srun"), signal.SIGKILL)
    assert ended(slurm, submit, "deploy") == ("FAILED", "137:0")
    assert "Killed" in submit.log("deploy")
    wait_for(lambda: not slurm.job_processes(serving))


def test_a_script_that_slurm_has_lost_is_ended_by_cancelling(
    slurm: TestCluster, submit: Submit, serving: str
) -> None:
    """Without its slurmstepd the script runs on, and so does the server."""
    os.kill(slurm.step_daemon(serving, "batch"), signal.SIGKILL)
    time.sleep(2)
    assert slurm.job_processes(serving) != []
    slurm.run("scancel", serving)
    assert ended(slurm, submit, "deploy")[0] == "CANCELLED"
    wait_for(lambda: not slurm.job_processes(serving))


def test_a_server_outlives_a_node_s_daemon_that_comes_back(
    slurm: TestCluster, submit: Submit, serving: str
) -> None:
    pid = slurm.pid("slurmd-n1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    slurm.start_daemon("slurmd-n1")
    slurm.run("scancel", "--batch", "--signal=TERM", serving)
    assert ended(slurm, submit, "deploy") == ("COMPLETED", "0:0"), submit.log("deploy")
    wait_for(lambda: not slurm.job_processes(serving))


STEP = """
import sys, time
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.steps.command import run_step

def serve(settings):
    print("serving", flush=True)
    time.sleep(900)

sys.exit(run_step("", DeploySettings, serve))
"""


def test_a_step_ends_with_its_killed_step_daemon(
    slurm: TestCluster, tmp_path: Path, checkout: Path
) -> None:
    """Slurm notices nothing, and would leave the step's processes on the node indefinitely."""
    settings, log = tmp_path / "settings.yaml", tmp_path / "log"
    write_settings(DeploySettings("/models", str(tmp_path)), settings)
    (tmp_path / "step.py").write_text(STEP)
    command = f"srun {sys.executable} {tmp_path}/step.py --settings {settings}"
    environment = {**slurm.environment, "PYTHONPATH": str(checkout)}
    submitted = slurm.run(
        *("sbatch", "--parsable", f"--output={log}", f"--wrap={command}"), env=environment
    )
    job_id = submitted.stdout.strip()
    wait_for_file(log)
    step = find(slurm, job_id, Path(sys.executable).name)
    os.kill(slurm.step_daemon(job_id, "0"), signal.SIGKILL)
    wait_until_gone([step])
    slurm.run("scancel", "--full", "--signal=KILL", job_id)
    wait_for(lambda: not slurm.job_processes(job_id))


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_stops_the_submission(
    slurm: TestCluster, submit: Submit, full_disk: Path
) -> None:
    fill(full_disk)
    ran = submit("stages=[export]", f"base_results_dir={full_disk}", check=False)
    assert ran.returncode == 3
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert slurm.run("squeue", "--noheader").stdout == ""
