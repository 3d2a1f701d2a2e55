"""The test cluster is a real Slurm: two nodes, PMIx, signals, dependencies, clean ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.slurm.cluster import TestCluster, main


def test_a_step_runs_on_both_nodes_and_ranks_find_pmix(slurm: TestCluster) -> None:
    show = 'echo "$SLURM_PROCID $SLURMD_NODENAME $PMIX_RANK ${PMIX_NAMESPACE%%.*}"'
    ran = slurm.run("srun", "--nodes=2", "--ntasks=2", "--mpi=pmix", "bash", "-c", show)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["0 n1 0 slurm", "1 n2 1 slurm"]


def test_nodes_pretend_to_have_gpus(slurm: TestCluster) -> None:
    ran = slurm.run("srun", "--gpus-per-node=8", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert ran.stdout.strip() == "0,1,2,3,4,5,6,7"
    assert slurm.run("srun", "--gpus-per-node=9", "true").returncode == 1


def test_a_second_start_changes_nothing_and_status_knows(
    slurm: TestCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {daemon: slurm.pid(daemon) for daemon in slurm.daemons}
    assert main(["start", "--root", str(slurm.root)]) == 0
    assert {daemon: slurm.pid(daemon) for daemon in slurm.daemons} == before
    assert main(["status", "--root", str(slurm.root)]) == 0
    assert f"export SLURM_CONF={slurm.paths.slurm_conf}" in capsys.readouterr().out


def test_status_and_stop_without_a_cluster(tmp_path: Path) -> None:
    assert main(["status", "--root", str(tmp_path)]) == 1
    assert main(["stop", "--root", str(tmp_path)]) == 0


@pytest.mark.parametrize("command", ["srun", "sbatch"])
def test_a_misspelled_option_is_refused(slurm: TestCluster, command: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    ran = slurm.run(command, "--container-images=/x.sqsh", str(script))
    assert ran.returncode == 255
    assert "unrecognized option" in ran.stderr


def test_test_only_checks_without_submitting(slurm: TestCluster, tmp_path: Path) -> None:
    def answer_to(*lines: str) -> tuple[int, str]:
        script = tmp_path / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", *lines, "true", ""]))
        ran = slurm.run("sbatch", "--test-only", str(script))
        return ran.returncode, ran.stderr

    assert answer_to("#SBATCH --nodes=2", "#SBATCH --container-image=/x.sqsh")[0] == 0
    assert answer_to("#SBATCH --no-such-option=1")[0] == 255
    assert answer_to("#SBATCH --nodes=3")[0] == 1
    code, message = answer_to("#SBATCH --partition=absent")
    assert (code, "invalid partition" in message) == (1, True)
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_a_signal_reaches_the_step_and_lets_it_end_by_itself(
    slurm: TestCluster, tmp_path: Path
) -> None:
    body = "trap 'echo stopped; exit 0' TERM; echo started; while true; do sleep 0.1; done"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\nsrun bash -c "{body}"\n')
    log = tmp_path / "job.log"
    job_id = _submit(slurm, script, f"--output={log}")
    wait_for(lambda: log.exists() and "started" in log.read_text())
    assert slurm.run("scancel", "--signal=TERM", f"{job_id}.0").returncode == 0
    fields = slurm.wait(job_id)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0")
    assert "stopped" in log.read_text()


def test_a_failed_job_takes_those_that_depend_on_it_out_of_the_queue(
    slurm: TestCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsleep 1; exit 3\n")
    first = _submit(slurm, script)
    second = _submit(slurm, script, f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
    assert slurm.wait(first)["ExitCode"] == "3:0"
    fields = slurm.wait(second)
    assert (fields["JobState"], fields["NodeList"]) == ("CANCELLED", "")


def test_a_cancelled_job_leaves_no_process(slurm: TestCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    log = tmp_path / "job.log"
    script.write_text("#!/bin/bash\nsrun bash -c 'sleep 300 & echo started; wait'\n")
    job_id = _submit(slurm, script, f"--output={log}")
    wait_for(lambda: log.exists() and "started" in log.read_text())
    assert slurm.job_processes(job_id) != []
    slurm.run("scancel", job_id)
    assert slurm.wait(job_id)["JobState"] == "CANCELLED"
    slurm.cancel_all()
    assert slurm.left_processes(job_id) == []


def _submit(slurm: TestCluster, script: Path, *options: str) -> str:
    ran = slurm.run("sbatch", "--parsable", "--output=/dev/null", *options, str(script))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
