"""What the scheduler is asked before, and options of one stage, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.cluster.slurm_queue import mpi_types
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.test_jobs import ended


def test_a_plugin_of_mpi_that_is_missing_is_refused_where_it_is_needed(
    slurm: TestCluster, submit: Submit
) -> None:
    assert {"pmix", "pmi2", "none"} <= {*mpi_types()}
    absent = "cluster.mpi=pmix_v9"
    ran = submit(*submit.served, absent, "deploy.run.nodes=2", check=False)
    assert ran.returncode == 3
    assert "unknown mpi type of this srun; got 'pmix_v9'; choices: " in ran.stderr
    assert slurm.run("squeue", "--noheader").stdout == ""
    submit(*submit.served, absent, SERVER="dies_early")  # one node finds itself
    assert ended(slurm, submit, "deploy") == ("FAILED", "7:0"), submit.log("deploy")


@pytest.mark.usefixtures("slurm")
def test_setup_and_options_of_one_stage(slurm: TestCluster, submit: Submit) -> None:
    shared = ("cluster.exclusive=False", "cluster.mem=100")
    submit(
        *(*submit.measured, *shared, "evaluate.cluster.comment=client"),
        "cluster.setup=['echo from the site: $UNSET']",
        "cluster.sbatch_args=['--nice=7']",
        EVALUATE_WAITS="30",
    )
    assert ended(slurm, submit, "evaluate") == ("COMPLETED", "0:0"), submit.log("evaluate")
    for stage, comment in (("deploy", "(null)"), ("evaluate", "client")):
        job_id = submit.record(stage)["job_id"]
        shown = slurm.run("scontrol", "show", "job", job_id).stdout
        assert ("Comment=client" in shown) == (comment == "client")
        assert "Nice=7" in shown
        assert submit.log(stage).startswith("from the site:\n")
    assert (
        "CPUs/Task=3"
        in slurm.run("scontrol", "show", "job", submit.record("deploy")["job_id"]).stdout
    )


def test_a_module_s_pythonpath_comes_after_the_launcher(
    slurm: TestCluster, submit: Submit, launcher: Path
) -> None:
    step = "import os\nprint('path', os.environ['PYTHONPATH'])\n"
    (launcher / "steps" / "convert_checkpoint.py").write_text(step, encoding="utf-8")
    setup = "cluster.setup=['export PYTHONPATH=/of/a/module:$PYTHONPATH']"
    submit("stages=[export]", setup, PYTHONPATH="/of/the/shell")
    assert ended(slurm, submit, "export") == ("COMPLETED", "0:0"), submit.log("export")
    assert f"path {launcher.parent}:/of/a/module:/of/the/shell\n" in submit.log("export")
