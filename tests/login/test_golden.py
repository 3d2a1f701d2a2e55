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
from launcher_scripts.config.settings import settings_text
from stages import STAGES
from stages.plan import make_plan
from tests.login.conftest import Compose

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
ALL_STAGES = f"stages=[{','.join(STAGES)}]"
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_script_and_settings(
    hydra_config: Compose, data_dir: Path, request: pytest.FixtureRequest, case: str, stage: str
) -> None:
    chosen = () if "cluster_type=bcm" in CASES[case] else (f"cluster_type={case}",)
    plan = make_plan(hydra_config(*BASE, ALL_STAGES, *chosen, *CASES[case]))
    member = next(member for member in plan.stages if member.name == stage)
    job = member.job(JobFolder(FOLDER, member.block.run.name))
    texts = {
        f"{stage}.sh": plan.cluster.render(job),
        f"{stage}_hydra.yaml": settings_text(job.settings),
    }
    folder = data_dir.parent / "golden" / case
    for name, text in texts.items():
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        assert (folder / name).read_text(encoding="utf-8") == text


def test_every_cluster_has_golden_scripts() -> None:
    assert set(CLUSTERS) <= set(CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_golden_scripts_are_shell(data_dir: Path, case: str, stage: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = data_dir.parent / "golden" / case / f"{stage}.sh"
    assert subprocess.run([bash, "-n", str(script)], check=False).returncode == 0
