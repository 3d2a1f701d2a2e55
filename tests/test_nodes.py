"""Which node a process is on, from the variables that the launching programs leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.hosts import SINGLE_NODE, NodeRank, find_node_rank, unbind_from_core
from launcher_scripts.common.parallelism import Parallelism

SRUN = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
}
PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.42.3"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "3552051201",
}
ONE_MPIRUN = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}
BCP = {"NGC_JOB_ID": "777", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}

NODE_RANKS = {
    "nothing": ({"HOME": "/", "RANK": "1", "WORLD_SIZE": "2"}, SINGLE_NODE),
    "srun": (SRUN, NodeRank(1, 2, "srun (Slurm)", "42-3-")),
    "srun, requeued": (
        {**SRUN, "SLURM_RESTART_COUNT": "1"},
        NodeRank(1, 2, "srun (Slurm)", "42-3-1"),
    ),
    "srun with PMIx": ({**SRUN, **PMIX}, NodeRank(1, 2, "srun (Slurm)", "42-3-")),
    "a batch script": (BATCH, SINGLE_NODE),
    "mpirun": (MPIRUN, NodeRank(1, 2, "mpirun (Open MPI)", "3552051201--")),
    "mpirun on one node": (ONE_MPIRUN, NodeRank(0, 1, "mpirun (Open MPI)")),
    "mpirun's helper in a Slurm job": (
        {**SRUN, **MPIRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        NodeRank(1, 2, "mpirun (Open MPI)", "3552051201--"),
    ),
    "mpirun in a batch script": ({**BATCH, **ONE_MPIRUN}, NodeRank(0, 1, "mpirun (Open MPI)")),
    "PMI": (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_JOBID": "a/b"},
        NodeRank(0, 2, "mpiexec (PMI)", "a_b-"),
    ),
    "bcprun": (BCP, NodeRank(1, 2, "bcprun", "777-29500")),
}


@pytest.mark.parametrize("name", NODE_RANKS)
def test_node_ranks(name, monkeypatch):
    env, node_rank = NODE_RANKS[name]
    assert find_node_rank(env) == node_rank
    for variable in set(os.environ):
        monkeypatch.delenv(variable)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    assert find_node_rank(os.environ) == node_rank


WRONG = {
    "PMIx says something else": ({**SRUN, "PMIX_RANK": "0"}, "SLURM_PROCID=1, PMIX_RANK=0"),
    "mpirun's variables in srun": (
        {**SRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        "OMPI_COMM_WORLD_SIZE=1, SLURM_STEP_NUM_TASKS=2",
    ),
    "two tasks per node": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "4"},
        "SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NUM_NODES=2",
    ),
    "mpirun -n 2 on one node": (
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "several servers on this node; got 'OMPI_COMM_WORLD_LOCAL_SIZE=2'",
    ),
    "no size": ({"PMI_RANK": "0"}, "PMI_SIZE must be a number; got 'nothing'"),
    "no number": ({**SRUN, "SLURM_PROCID": "one"}, "SLURM_PROCID must be a number; got 'one'"),
    "beyond the end": ({**SRUN, "SLURM_PROCID": "2"}, "SLURM_PROCID must be below"),
}


@pytest.mark.parametrize("name", WRONG)
def test_contradictions_are_errors(name):
    env, reason = WRONG[name]
    with pytest.raises(ServerError, match="the environment of this server's process") as raised:
        find_node_rank(env)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "spread"),
    [(2, 1, 2, 2), (1, 1, 2, 1), (2, 2, 3, 2), (4, 2, 4, 4), (3, 1, 2, 1), (8, 1, 1, 1)],
)
def test_ranks_go_evenly_over_as_many_nodes_as_they_can(tp, pp, nodes, spread):
    assert Parallelism(tp, pp).spread(nodes) == spread


ONE_PROCESS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("env", "widened"),
    [
        (ONE_PROCESS, True),
        ({}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({**ONE_PROCESS, "OMPI_MCA_hwloc_base_binding_policy": "core"}, False),
    ],
)
def test_mpirun_s_default_binding_to_a_core_is_undone(env: dict[str, str], widened: bool) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one CPU")
    core = {min(before)}
    os.sched_setaffinity(0, core)
    try:
        note = unbind_from_core(env)
        assert (os.sched_getaffinity(0) > core) == widened
        assert (note is not None) == widened
    finally:
        os.sched_setaffinity(0, before)


BINDING = """
import os
import shutil
import subprocess
import sys
from launcher_scripts.common.hosts import unbind_from_core
print(unbind_from_core(os.environ), *sorted(os.sched_getaffinity(0)), sep="|")
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
@pytest.mark.parametrize("asked", [(), ("--bind-to", "core")])
def test_a_binding_of_mpirun_itself(asked: tuple[str, ...]) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU")
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    command = ["mpirun", *asked, "-n", "1", sys.executable, "-c", BINDING]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **root}
    )
    note, *left = ran.stdout.strip().split("|")
    assert len(left) == (1 if asked else len(cpus))
    assert note.startswith("None" if asked else "mpirun bound this server to 1 of ")
