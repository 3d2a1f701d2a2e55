"""What pyxis' containers leave on the nodes, and what is said where one cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.conftest import Jobs
from tests.processes import wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.configuration import write_plugstack
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended


@pytest.mark.parametrize("scope", ["global", "job"])
@pytest.mark.parametrize("together", [False, True])
def test_no_container_outlives_its_stage(
    slurm: TestCluster, submit: Submit, image: Path, scope: str, *, together: bool
) -> None:
    """A server on two nodes and its client are cancelled, on clusters of both scopes of pyxis."""
    write_plugstack(slurm.paths, scope)
    shared = ("deploy.run.nodes=2", "cluster.exclusive=False", "cluster.mem=100")
    together_or_not = f"evaluate.in_deploy_job={together}"
    waits = {"EVALUATE_WAITS": "60", "EVALUATE_SECONDS": "300"}
    stages = "stages=[export,deploy,evaluate]"
    submit(stages, f"container={image}", *shared, together_or_not, **waits)
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    wait_for(lambda: "measuring at" in submit.log("evaluate"))
    wait_for(lambda: len(slurm.containers()) == 3)
    slurm.cancel_all()
    for stage in ("deploy", "evaluate"):
        assert ended(slurm, submit, stage)[0] == "CANCELLED"
        assert "srun: error: Unable to create step" not in submit.log(stage)
    assert slurm.containers() == []


def test_the_first_step_that_fails_in_a_container_ends_the_stage(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    submit("stages=[export]", f"container={image}", EXPORT_EXITS="23")
    assert ended(slurm, submit, "export") == ("FAILED", "23:0")
    assert (submit.record("export")["folder"] / "ran").read_text() == "convert_checkpoint\n"


def test_an_interpreter_that_the_image_has_not_is_named(
    slurm: TestCluster, submit: Submit, image: Path
) -> None:
    """As where /etc/profile of the image resets the PATH."""
    submit("stages=[export]", f"container={image}", "cluster.python=python3.99")
    assert ended(slurm, submit, "export") == ("FAILED", "127:0")
    log = submit.log("export")
    assert "error: the container has no python3.99; got PATH=" in log
    assert "; change cluster.python" in log


def test_why_containers_on_two_nodes_did_not_start_is_shown(
    slurm: TestCluster, submit: Submit, image: Path, jobs: Jobs
) -> None:
    """pyxis prints what unpacking said, for every node, below the line that matters."""
    mounts = "container_mounts=[/no/such/folder:/data]"
    submit(*submit.served, f"container={image}", mounts, "deploy.run.nodes=2")
    assert ended(slurm, submit, "deploy")[0] == "FAILED"
    waited = jobs("wait", "deploy_tiny")
    assert waited.returncode == 1
    reason = "--container-mounts: source path does not exist: /no/such/folder"
    _, head, first, *rest = waited.stderr.splitlines()
    assert head.startswith("lines of its log ")
    assert first == f"  | pyxis: {reason}"
    assert rest[0].startswith("the end of its log ")
