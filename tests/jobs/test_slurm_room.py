"""A client that could never start beside the server it is to measure is found before it waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.cluster.job import Job, JobFolder, Resources, Service
from launcher_scripts.cluster.slurm import check_capacity
from launcher_scripts.cluster.slurm_script import SlurmOptions
from launcher_scripts.common.errors import Problems

# Prints what a cluster with two kinds of partitions says: two nodes, and one of them.
SCONTROL = """#!/bin/bash
node() {
    echo "NodeName=$1 CPUTot=16 RealMemory=64000 Gres=gpu:h100:4(S:0-1),gpu:a10:1,shard:8" \\
        "ActiveFeatures=$2 Partitions=$3 State=IDLE"
}
partition() { echo "PartitionName=$1 Default=$2 OverSubscribe=$3 DefMemPerNode=UNLIMITED $4"; }
case "$*" in
    *"show node") node n1 big,fast both,one,shared,owned; node n2 big both,shared,owned ;;
    *"show partition")
        partition both YES NO; partition one NO NO DefMemPerCPU=1000
        partition shared NO FORCE:2; partition owned NO EXCLUSIVE ;;
    *"show config") echo "SelectTypeParameters    = CR_CORE_MEMORY"; echo "DefMemPerNode = 0" ;;
    *"show hostnames"*) echo "${@: -1}" | tr , '\\n' ;;
esac
"""
SHARING = {"exclusive": False, "mem": "8G", "gpus_per_node": 2, "cpus_per_task": 4}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def server(nodes: int = 1, replicas: int = 0) -> Job:
    return Job(
        stage="deploy",
        folder=JobFolder(Path("/jobs/deploy"), "deploy"),
        settings=None,
        steps=(),
        resources=Resources(nodes=nodes),
        env={},
        service=Service(Path("/ready.json"), 60, 10),
        replicas=replicas,
    )


def client(of: Job | None, gpus: int = 0) -> Job:
    return replace(
        server(),
        stage="evaluate",
        folder=JobFolder(Path("/jobs/evaluate"), "evaluate"),
        resources=Resources(gpus_per_node=gpus),
        service=None,
        server=of,
    )


def found(job: Job, **options: object) -> list[str]:
    problems = Problems("the jobs")
    check_capacity(job, SlurmOptions(**options), problems)
    return problems.messages


def test_what_is_said() -> None:
    (message,) = found(client(server()), partition="one")
    assert message.startswith(
        "the evaluate job could never start beside the deploy job, which takes 1 of the 1 node(s) "
        "that both may use in the partition one for itself; change evaluate.in_deploy_job=True"
    )


@pytest.mark.parametrize(
    ("nodes", "replicas", "options"),
    [
        (1, 0, {"partition": "one"}),
        (2, 0, {}),
        (1, 2, {}),
        (1, 0, {"nodelist": "n2"}),
        (1, 0, {"exclude": "n1"}),
        (1, 0, {"constraint": "fast"}),
        (1, 0, {**SHARING, "partition": "owned", "exclude": "n1"}),
        (1, 0, {**SHARING, "mem": "0", "partition": "one"}),
        (1, 0, {**SHARING, "mem": "63G", "partition": "one"}),
        (1, 0, {**SHARING, "mem": None, "exclude": "n1"}),
        (1, 0, {**SHARING, "cpus_per_task": 9, "partition": "one"}),
    ],
)
def test_there_is_no_room(nodes: int, replicas: int, options: dict[str, object]) -> None:
    assert len(found(client(server(nodes, replicas)), **options)) == 1


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (1, {}),
        (1, {"constraint": "big"}),
        (2, {"constraint": "[fast|big]"}),  # Slurm's to understand
        (2, {"partition": "shared"}),
        (1, {"partition": "one,both"}),
        (1, {**SHARING, "partition": "one"}),
        (2, {**SHARING}),
        (1, {**SHARING, "mem": None, "partition": "one"}),  # its default: 1000 MB of a core
        (2, {"partition": "unheard"}),
    ],
)
def test_there_is_room(nodes: int, options: dict[str, object]) -> None:
    assert found(client(server(nodes)), **options) == []


def test_gpus_of_a_client_count() -> None:
    options = {**SHARING, "partition": "one", "gpus_per_node": 4}
    assert found(client(server(), gpus=1), **options) == []
    assert len(found(client(server(), gpus=2), **options)) == 1


def test_a_job_without_a_server_is_not_asked_about() -> None:
    assert found(client(None), partition="one") == []
