"""The scripts of jobs that know of each other, and of each way into a container.

`pytest tests/login/test_golden_jobs.py --update-golden` rewrites the files after a wanted change.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import JobFolder
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.settings import settings_text
from stages.plan import make_plan
from stages.stage import Stage
from tests.login.conftest import Compose
from tests.login.test_golden import BASE

IMAGE = "container=/images/inference.sqsh"
REGISTRY = "container='nvcr.io#nvidia/nemo:23'"
ENROOT = "cluster.container_runtime=enroot"
TOGETHER = "evaluate.in_deploy_job=True"
CASES = {
    "bcm_chain": (),
    "bcm_chain_keep": ("evaluate.stop_server=False",),
    "bcm_in_deploy_job": (TOGETHER,),
    "bcm_enroot": (ENROOT, IMAGE, "container_mounts=[/models:/models:ro+nosuid]"),
    "bcm_enroot_registry": (ENROOT, REGISTRY, TOGETHER, "cluster.mpi=pmi2"),
    "bcm_replicas": (IMAGE, "deploy.replicas=2", "deploy.gateway.port=8080"),
    "bcp_mpi": ("cluster_type=bcp", "cluster.array_type=mpi", "deploy.run.nodes=2"),
    "bcm_host": ("cluster.container_runtime=none", IMAGE, "cluster.mpi=none"),
}


def folder_of(stage: Stage) -> JobFolder:
    return JobFolder(Path("/mount/results/jobs") / stage.name, stage.block.run.name)


def compare(path: Path, text: str, *, update: bool) -> None:
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("case", CASES)
def test_scripts(
    hydra_config: Compose, data_dir: Path, request: pytest.FixtureRequest, case: str
) -> None:
    plan = make_plan(hydra_config(*BASE, *CASES[case]))
    folder = data_dir.parent / "golden" / case
    update = request.config.getoption("--update-golden")
    for job in plan.jobs(folder_of):
        compare(folder / f"{job.stage}.sh", plan.cluster.render(job), update=update)
        if job.stage == "evaluate":
            settings = settings_text(job.settings)
            assert "server_job_folder: /mount/results/jobs/deploy\n" in settings


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_shell(data_dir: Path, case: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    for script in (data_dir.parent / "golden" / case).glob("*.sh"):
        assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0


def test_the_job_of_both_has_both_settings_files(hydra_config: Compose) -> None:
    plan = make_plan(hydra_config(*BASE, TOGETHER))
    jobs = list(plan.jobs(folder_of))
    assert [job.stage for job in jobs] == ["export", "deploy"]
    assert [path.parent.name for path in jobs[1].settings_files()] == ["deploy", "evaluate"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((ENROOT, IMAGE, "container_mounts=['/a b']"), "no mount with a space"),
        ((ENROOT, IMAGE, "container_mounts=['/a\\b']"), "or a backslash"),
        ((IMAGE, "container_mounts=['/a$(touch x)']"), "pyxis has a shell read mounts"),
        ((IMAGE, "base_results_dir='/a`x`'"), "pyxis has a shell read mounts"),
        (("base_results_dir='/a\\b'",), "no job id into the name of a log .* backslash"),
        ((f"deploy.run.name={'x' * 201}",), "at most 200 bytes"),
        ((ENROOT, REGISTRY, "cluster.image_cache=null"), r"cluster\.image_cache"),
        (("cluster.container_runtime=docker",), "pyxis, enroot, none"),
        ((TOGETHER, "evaluate.ready_file=/other/ready.json"), "no deploy job"),
        ((TOGETHER, "stages=[evaluate]"), "no deploy job"),
    ],
)
def test_what_cannot_work_is_refused(
    hydra_config: Compose, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(hydra_config(*BASE, *overrides))
