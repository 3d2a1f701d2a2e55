"""Every key of conf/cluster/bcm.yaml: what it becomes in a script, and what it cannot be."""

from __future__ import annotations

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import Planner
from tests.login.test_golden import BASE, folder_of

# key and value -> a line of the script of the server's job; -: one that must not be there
MEANINGS = {
    "partition=luna": "#SBATCH --partition=luna",
    "account=4711": "#SBATCH --account=4711",
    "qos=high": "#SBATCH --qos=high",
    "constraint='a100&nvme'": "#SBATCH --constraint='a100&nvme'",
    "exclusive=True": "#SBATCH --exclusive",
    "exclusive=user": "#SBATCH --exclusive=user",
    "exclusive=False": "-#SBATCH --exclusive",
    "exclusive=null": "-#SBATCH --exclusive",
    "overcommit=True": "#SBATCH --overcommit",
    "overcommit=null": "-#SBATCH --overcommit",
    "gpus_per_node=4": "#SBATCH --gpus-per-node=4",
    "gpus_per_node=null": "-#SBATCH --gpus-per-node",
    "gpus_per_task=4": "#SBATCH --gpus-per-task=4",
    "gpus_per_task=2": "-#SBATCH --gpus-per-node",
    "cpus_per_task=16": "    --cpus-per-task=16 \\",
    "mem=200G": "#SBATCH --mem=200G",
    "nodelist='n[1-2]'": "#SBATCH --nodelist='n[1-2]'",
    "exclude=n3": "#SBATCH --exclude=n3",
    "reservation=tests": "#SBATCH --reservation=tests",
    "comment='a b'": "#SBATCH --comment='a b'",
    "requeue=True": "#SBATCH --requeue",
    "requeue=False": "#SBATCH --no-requeue",
    "requeue=null": "-#SBATCH --no-requeue",
    "mpi=pmi2": "    --kill-on-bad-exit=1 --overlap --mpi=pmi2 \\",
    "mpi=pmix_v4": "    --kill-on-bad-exit=1 --overlap --mpi=pmix_v4 \\",
    "srun_args=['--cpu-bind=none']": "    --cpu-bind=none \\",
    "job_name_prefix=''": "#SBATCH --job-name=deploy_gpt3_126m",
    "python=/opt/python3": "    /opt/python3 -m launcher_scripts.steps.start_server",
}


def server_script(plan: Planner, override: str) -> list[str]:
    made = plan(*BASE, f"cluster.{override}", "stages=[deploy]")
    (job,) = made.jobs(folder_of)
    return made.cluster.render(job).splitlines()


@pytest.mark.parametrize("override", MEANINGS)
def test_a_key_has_its_meaning(plan: Planner, override: str) -> None:
    lines = server_script(plan, override)
    expected = MEANINGS[override]
    if expected.startswith("-#"):
        assert not [line for line in lines if line.startswith(expected[1:])]
    else:
        assert [line for line in lines if line.startswith(expected)], "\n".join(lines)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("partition=''", r"partition is empty.*cluster\.partition \(null leaves the option out\)"),
        ("exclusive=often", "unknown exclusive; got 'often'; choices: True, False, user, mcs"),
        ("gpus_per_node=0", "gpus_per_node must be at least 1"),
        ("gpus_per_node=two", "cluster.gpus_per_node must be a whole number"),
        ("gpus_per_task=0", "gpus_per_task must be at least 1"),
        ("cpus_per_task=-1", "cpus_per_task must be at least 1"),
        ("mem='5 GB'", "no size of memory; got '5 GB'"),
        ("mpi=openmpi", "unknown mpi; got 'openmpi'; choices: pmix, "),
        ("srun_args=x", "cluster.srun_args must be a list"),
        ("srun_args=['']", "srun_args is empty"),
        ("comment='a\nb'", "not on one line"),
        ("container_runtime=docker", "unknown container_runtime; got 'docker'"),
        ("requeue=maybe", "cluster.requeue must be True or False"),
        ("+nodes=2", "unknown key cluster.nodes; choices: account, comment"),
    ],
)
def test_a_wrong_value_is_answered(plan: Planner, override: str, says: str) -> None:
    plus = "+" if override.startswith("+") else ""
    given = f"{plus}cluster.{override.removeprefix('+')}"
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, given)
