"""Every key of conf/cluster/bcm.yaml: what it becomes in a script, and what it cannot be."""

from __future__ import annotations

import pytest

from launcher_scripts.common.errors import ConfigError
from stages.choices import with_stage_options
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
    "gpus_per_node='a100:8'": "#SBATCH --gpus-per-node=a100:8",
    "gpus_per_node='h100-80g:4'": "    --gpus-per-node=h100-80g:2 \\",
    "gres='gpu:8'": "#SBATCH --gres=gpu:8",
    "dependency='afterok:4711'": "#SBATCH --dependency=afterok:4711",
    "mail_type='END,FAIL'": "#SBATCH --mail-type=END,FAIL",
    "mail_user=a@b.c": "#SBATCH --mail-user=a@b.c",
    "sbatch_args=['--wckey=a b','--spread-job']": "#SBATCH '--wckey=a b'",
    "setup=['module load cuda # x']": "module load cuda # x",
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
    "mpi=pmi2": "    --kill-on-bad-exit=1 --overlap --mpi=pmi2 --label \\",
    "mpi=pmix_v4": "    --kill-on-bad-exit=1 --overlap --mpi=pmix_v4 --label \\",
    "srun_args=['--cpu-bind=none']": "    --cpu-bind=none \\",
    "job_name_prefix=''": "#SBATCH --job-name=deploy_gpt3_126m",
    "python=/opt/python3": "    /opt/python3 -m launcher_scripts.steps.start_server",
}


def server_script(plan: Planner, override: str) -> list[str]:
    nodes = "deploy.run.nodes=2" if override.startswith("mpi") else "deploy.run.nodes=1"
    made = plan(*BASE, f"cluster.{override}", "stages=[export,deploy]", nodes)
    _, job = made.jobs(folder_of)
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
        ("gpus_per_node=two", "gpus_per_node must be at least 1"),
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


def test_one_stage_has_other_options(plan: Planner) -> None:
    cpu = "++evaluate.cluster={partition: cpu, sbatch_args: ['--wckey=x']}"
    made = plan(*BASE, "cluster.partition=gpu", cpu, "++deploy.cluster.exclusive=False")
    scripts = {job.stage: made.cluster.render(job) for job in made.jobs(folder_of)}
    assert ["--partition=cpu" in scripts[stage] for stage in scripts] == [False, False, True]
    assert ["--wckey=x" in scripts[stage] for stage in scripts] == [False, False, True]
    assert ["#SBATCH --exclusive" in scripts[stage] for stage in scripts] == [True, False, False]
    # Two ranks and the server, where the node may be shared.
    assert ["--cpus-per-task=3" in scripts[stage] for stage in scripts] == [False, True, False]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("evaluate.cluster.partitoin=cpu", "unknown key evaluate.cluster.partitoin"),
        ("evaluate.cluster.type=bcp", "all stages have one cluster type"),
        ("deploy.run.time_limit=1", r"leaves no time to serve: .*change deploy\.run\.time_limit"),
        ("deploy.run.time_limit=0:02:00", "leaves no time to serve"),
        ("deploy.server.stop_timeout=86400", "leaves no time to serve"),
        ("cluster.sbatch_args=['--output=x']", "the launcher sets itself; got '--output=x'"),
        ("cluster.sbatch_args=['-p cpu']", "is one word"),
        ("cluster.gpus_per_node='a100:0'", r"change cluster\.gpus_per_node"),
        ("cluster.gpus_per_node=many", r"change cluster\.gpus_per_node"),
    ],
)
def test_options_that_cannot_work(plan: Planner, option: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, *with_stage_options([option]))


@pytest.mark.parametrize("limit", ["0", "0:03:00", "1-0", "30"])
def test_time_limits_of_a_server(plan: Planner, limit: str) -> None:
    plan(*BASE, f"deploy.run.time_limit={limit}")


def test_typed_gpus_and_those_of_gres_count(plan: Planner) -> None:
    for option in ("cluster.gpus_per_node='a100:4'", "cluster.gres='gpu:a100:4,fs:1'"):
        off = () if "per_node" in option else ("cluster.gpus_per_node=null",)
        made = plan(*BASE, "export.model.tensor_model_parallel_size=8", option, *off)
        (deploy,) = (job for job in made.jobs(folder_of) if job.stage == "deploy")
        assert deploy.resources.nodes == 2
