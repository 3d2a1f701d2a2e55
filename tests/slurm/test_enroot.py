"""Jobs that run enroot's commands, on a real Slurm with a stand-in for enroot on the nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.processes import processes, variables, wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended

ENROOT = Path(__file__).parent / "enroot_double.sh"


@pytest.fixture
def enroot_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "programs" / "enroot"
    program.parent.mkdir()
    program.write_bytes(ENROOT.read_bytes())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ENROOT_CALLS", str(tmp_path / "enroot"))
    return tmp_path / "enroot"


@pytest.fixture
def chosen(submit: Submit, launcher: Path, tmp_path: Path) -> Submit:
    """The launcher with enroot, and paths without spaces, which enroot cannot mount."""
    results = tmp_path / "results"
    results.mkdir()
    options = [
        "cluster.container_runtime=enroot",
        "container='nvcr.io#nvidia/nemo:23'",
        f"launcher_scripts_path={launcher.rename(results / 'launcher_scripts')}",
        f"base_results_dir={results}",
    ]
    return Submit(submit.run, [*submit.arguments, *options], results / "tiny")


def test_a_job_fetches_its_image_once_and_removes_its_containers(
    slurm: TestCluster, chosen: Submit, enroot_calls: Path
) -> None:
    together = ("evaluate.in_deploy_job=True", "deploy.run.nodes=2")
    chosen("stages=[export,deploy,evaluate]", *together, EVALUATE_WAITS="30")
    for stage in ("export", "deploy"):
        assert ended(slurm, chosen, stage) == ("COMPLETED", "0:0"), chosen.log(stage)
    calls = enroot_calls.read_text().splitlines()
    assert len([call for call in calls if " import " in call]) == 1
    assert "docker://nvcr.io#nvidia/nemo:23" in calls[0]
    created = [call.split()[4] for call in calls if call.split()[1] == "create"]
    removed = [call.split()[3] for call in calls if call.split()[1] == "remove"]
    assert len(created) == len(set(created)) == 4  # the export, two nodes, and the evaluation
    assert sorted(created) == sorted(removed)
    starts = [call for call in calls if call.split()[1] == "start"]
    assert {call.split()[0] for call in starts} == {"n1", "n2"}
    server = next(call for call in starts if "start_server" in call)
    gpus = "--env CUDA_VISIBLE_DEVICES"
    for expected in ("--env PMIX_RANK", "--env SLURM_PROCID", gpus, "none:x-create=dir,rbind"):
        assert expected in server
    (server_log,) = chosen.record("deploy")["folder"].glob("server-*.out")
    assert "server stopped in order" in server_log.read_text()


def left(calls: Path) -> list[str]:
    """<node>/<name> of the containers that lie on the nodes."""
    folder = Path(f"{calls}.nodes")
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))


def test_a_job_removes_what_killed_ones_have_left_on_its_node(
    slurm: TestCluster, chosen: Submit, enroot_calls: Path
) -> None:
    """Not what belongs to a job that lives, to another cluster, or to anything but the launcher."""
    shared = ("cluster.exclusive=False", "cluster.mem=100", "cluster.gpus_per_node=2")
    shared += ("cluster.cpus_per_task=1",)
    shared += ("cluster.nodelist=n1",)
    for _ in range(2):
        chosen(*chosen.served, *shared)
    killed, living = (chosen.record("deploy", number)["job_id"] for number in (1, 2))
    wait_for(lambda: len(left(enroot_calls)) == 2)
    for name in ("launcher_other_1_0_0", "launcher_test_x", "pyxis_1.0", "launcher_test_9999_0_0"):
        (Path(f"{enroot_calls}.nodes") / "n1" / name).mkdir()
    wait_for(lambda: chosen.log("deploy").count("server starts") == 1)
    # Suspended first: a shell that sees its command die before it is killed itself would tidy up.
    step = {f"SLURM_JOB_ID={killed}".encode(), b"SLURM_STEP_ID=0"}
    suspended = [pid for pid, _ in processes() if step.issubset(variables(pid))]
    assert suspended
    for pid in suspended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    slurm.run("scancel", "--signal=KILL", f"{killed}.0")
    assert ended(slurm, chosen, "deploy")[0] == "FAILED"
    assert f"n1/launcher_test_{killed}_0_0" in left(enroot_calls)

    chosen("stages=[export]", *shared)
    assert ended(slurm, chosen, "export") == ("COMPLETED", "0:0"), chosen.log("export")
    kept = ("launcher_other_1_0_0", f"launcher_test_{living}_0_0", "launcher_test_x", "pyxis_1.0")
    assert left(enroot_calls) == [f"n1/{name}" for name in kept]
    assert f"removing the container launcher_test_{killed}_0_0, which" in chosen.log("export")


def test_a_second_signal_does_not_stop_the_removal(
    slurm: TestCluster, chosen: Submit, enroot_calls: Path
) -> None:
    chosen(*chosen.served, ENROOT_SECONDS="3")
    wait_for(lambda: "server starts" in chosen.log("deploy"))
    job_id = chosen.record("deploy")["job_id"]
    for _ in range(2):
        slurm.run("scancel", "--signal=TERM", job_id)
        wait_for(lambda: " remove " in enroot_calls.read_text())
    assert ended(slurm, chosen, "deploy") == ("COMPLETED", "0:0"), chosen.log("deploy")
    assert left(enroot_calls) == []


def test_a_missing_mount_is_not_hidden_by_what_unpacking_says(
    slurm: TestCluster, chosen: Submit, enroot_calls: Path
) -> None:
    mounts = "container_mounts=[/no/such/folder:/data]"
    chosen("stages=[export]", mounts)
    assert ended(slurm, chosen, "export") == ("FAILED", "1:0")
    log = chosen.log("export")
    assert "enroot-mount: failed to mount: /no/such/folder at " in log
    assert "unsquashfs" not in log
    assert left(enroot_calls) == []
