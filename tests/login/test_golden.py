"""Every text that a stage emits, compared with tests/golden/<cluster>/.

`pytest tests/login/test_golden.py --update-golden` rewrites the files after a wanted change.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.cluster import CLUSTERS
from launcher_scripts.cluster.job import JobFolder
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.config.settings import settings_text
from stages import STAGES
from stages.stage import Stage
from tests.conftest import Golden
from tests.login.conftest import Planner

FOLDER = Path("/mount/results/gpt3_126m/jobs/001")
BASE = (
    "stages=[export,deploy,evaluate]",
    "dry_run=True",
    "launcher_scripts_path=/opt/NeMo-Megatron-Launcher/launcher_scripts",
    "data_dir=/mount/data/the_pile_gpt3",
    "base_results_dir=/mount/results",
    "export.run.model_train_name=gpt3_126m",
    "export.model.tensor_model_parallel_size=2",
    "cluster.python=python3",
)
# Those that one command line can run; a watch is alone.
TOGETHER_STAGES = [name for name in STAGES if name != "watch"]
CASES = {
    "bcm": (),
    "bcp": (),
    "interactive": (),
    # pyxis, several nodes, every sbatch option, and values that the shell would like to read.
    "bcm_pyxis": (
        "cluster_type=bcm",
        "container=/images/launcher inference.sqsh",
        "container_mounts=[/models/gpt:/models:ro,/lustre]",
        "export.model.checkpoint_path=/models/gpt3_126m.nemo",
        "export.model.tensor_model_parallel_size=16",
        "deploy.run.name='deploy $(touch x) \"it\\'s\" ü'",
        "env_vars.NCCL_DEBUG='INFO; rm -rf $HOME'",
        "cluster.partition=luna",
        "cluster.account=4711",
        "cluster.qos=high",
        "cluster.nodelist='n[1-2]'",
        "cluster.comment='it is \"#1\"'",
        "cluster.exclusive=False",
        "cluster.requeue=True",
        "cluster.srun_args=['--container-writable']",
    ),
}
IMAGE = "container=/images/inference.sqsh"
REGISTRY = "container='nvcr.io#nvidia/nemo:23'"
ENROOT = "cluster.container_runtime=enroot"
TOGETHER = "evaluate.in_deploy_job=True"
# Jobs that know of each other, and each way into a container.
CHAINS = {
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


@pytest.mark.parametrize("case", CASES)
def test_scripts_and_settings(plan: Planner, golden: Golden, case: str) -> None:
    chosen = () if "cluster_type=bcm" in CASES[case] else (f"cluster_type={case}",)
    made = plan(*BASE, f"stages=[{','.join(TOGETHER_STAGES)}]", *chosen, *CASES[case])
    assert [stage.name for stage in made.stages] == TOGETHER_STAGES
    for stage in made.stages:
        job = stage.job(JobFolder(FOLDER, stage.block.run.name))
        golden(f"{case}/{stage.name}.sh", made.cluster.render(job))
        golden(f"{case}/{stage.name}_hydra.yaml", settings_text(job.settings))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_script_of_a_watch(plan: Planner, golden: Golden, cluster: str) -> None:
    made = plan(*BASE, "stages=[watch]", f"cluster_type={cluster}")
    (stage,) = made.stages
    job = stage.job(JobFolder(FOLDER, stage.block.run.name))
    golden(f"{cluster}/watch.sh", made.cluster.render(job))


def test_every_cluster_has_golden_scripts() -> None:
    assert set(CLUSTERS) <= set(CASES)


@pytest.mark.parametrize("case", CHAINS)
def test_scripts_of_a_chain(plan: Planner, golden: Golden, case: str) -> None:
    made = plan(*BASE, *CHAINS[case])
    for job in made.jobs(folder_of):
        golden(f"{case}/{job.stage}.sh", made.cluster.render(job))
        if job.stage == "evaluate":
            settings = settings_text(job.settings)
            assert "server_job_folder: /mount/results/jobs/deploy\n" in settings


def test_the_golden_scripts_are_shell(data_dir: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    scripts = list((data_dir.parent / "golden").rglob("*.sh"))
    assert len(scripts) > len(CASES) + len(CHAINS)
    for script in scripts:
        assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0, script


def test_the_job_of_both_has_both_settings_files(plan: Planner) -> None:
    made = plan(*BASE, TOGETHER)
    jobs = list(made.jobs(folder_of))
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
def test_what_cannot_work_is_refused(plan: Planner, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, *overrides)
