"""A server whose ranks are on two nodes of a real Slurm: its start, its figures, every loss."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import processes, read
from tests.server.wrapped_server import WrappedServer
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.serving import TP2, Served

pytestmark = pytest.mark.usefixtures("tritonserver")

PP2 = (
    "export.model.tensor_model_parallel_size=1",
    "export.triton_deployment.pipeline_model_parallel_size=2",
)


def measured(slurm: TestCluster, launch: Submit, sizes: str, number: int) -> tuple[float, str]:
    """The perplexity that a launched evaluation found, and what its job said."""
    (record,) = launch.results.glob(f"deploy_{sizes}_*/jobs/{number:03d}/job.json")
    job_id = json.loads(record.read_text())["job_id"]
    fields = slurm.wait(job_id, timeout=300)
    log = "".join(path.read_text() for path in record.parent.glob("*.out"))
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert slurm.left_processes(job_id) == []
    (report,) = launch.results.glob(f"evaluate_{sizes}_*/report.json")
    metrics = json.loads(report.read_text())["tasks"]["lambada"]["metrics"]
    return metrics["perplexity"]["value"], log


def test_lambada_is_the_same_on_one_node_and_on_two(slurm: TestCluster, launch: Submit) -> None:
    launch("stages=[export,deploy,evaluate]", *TP2, "deploy.run.nodes=2")
    two, log = measured(slurm, launch, "tp2_pp1", 1)
    assert "node 1 of 2 (n2): hosts ranks [1] of model tiny for rank 0 at" in log
    assert "node 1 of 2 (n2): model tiny is closed" in log
    assert "tiny: the ranks are connected" in log
    launch("stages=[deploy,evaluate]", *TP2, "deploy.run.nodes=1")
    one, log = measured(slurm, launch, "tp2_pp1", 2)
    assert "hosts ranks" not in log
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_lambada_is_the_same_with_a_pipeline_over_two_nodes(
    slurm: TestCluster, launch: Submit
) -> None:
    loopback = "deploy.server.network_interface=127.0.0.0/8"
    launch("stages=[export,deploy,evaluate]", *PP2, "deploy.run.nodes=2", loopback)
    two, log = measured(slurm, launch, "tp1_pp2", 1)
    assert "hosts ranks [1] of model tiny for rank 0 at 127.0.0.1:" in log
    launch("stages=[deploy,evaluate]", *PP2, "deploy.run.nodes=1")
    one, _ = measured(slurm, launch, "tp1_pp2", 2)
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_a_lost_rank_is_replaced_when_restarts_are_allowed(serve: Any) -> None:
    served = serve("deploy.restarts=1")
    first = served.ready["http"]
    os.kill(served.rank(1), signal.SIGKILL)
    served.ready = served.wait_until_ready(after=first)
    assert served.ready["http"] != first
    log = served.log()
    assert "restart 1 of 1: model tiny failed: rank 1 on node 1 (n2" in log
    os.kill(served.rank(1), signal.SIGKILL)
    assert served.end()[0] == "FAILED"


@pytest.mark.slow
def test_a_signal_drains_both_nodes(slurm: TestCluster, serve: Any) -> None:
    served = serve()
    slurm.run("scancel", "--batch", "--signal=USR1", served.job_id)
    state, code, log = served.end()
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert "stopping the server: SIGTERM" in log
    assert "node 1 of 2 (n2): model tiny is closed" in log
    assert not served.ready_file.exists()


@pytest.mark.slow
def test_two_deployments_share_their_nodes(
    slurm: TestCluster, launch: Submit, repository: Path
) -> None:
    """Both ask for two nodes because a node of theirs has one GPU, and no port is fixed."""
    shared = ("cluster.exclusive=False", "cluster.mem=1500", "cluster.gpus_per_node=1")
    served = []
    for name in ("one", "two"):
        results = f"deploy.run.results_dir={launch.results / f'deploy_{name}'}"
        model = f"deploy.model_repository={repository}"
        launch("stages=[deploy]", model, *TP2, *shared, results, "deploy.server.stop_timeout=5")
    for name in ("one", "two"):
        served.append(Served(slurm, launch.results / f"deploy_{name}"))
    assert all(one.answers() for one in served)
    assert len({one.ready["http"] for one in served}) == 2
    assert {one.on_nodes() for one in served} == {"n[1-2]"}
    os.kill(served[0].rank(1), signal.SIGKILL)
    assert served[0].end()[0] == "FAILED"
    assert served[1].answers()
    slurm.run("scancel", "--batch", "--signal=USR1", served[1].job_id)
    assert served[1].end()[0] == "COMPLETED"


@pytest.mark.slow
def test_one_evaluation_asks_all_replicas(slurm: TestCluster, launch: Submit) -> None:
    shared = ("cluster.exclusive=False", "cluster.mem=1000", "cluster.gpus_per_node=2")
    replicas = ("deploy.replicas=2", "evaluate.in_deploy_job=False")
    launch("stages=[export,deploy,evaluate]", *TP2, *shared, *replicas)
    fields = slurm.wait(launch.record("evaluate")["job_id"], timeout=300)
    assert fields["JobState"] == "COMPLETED", launch.log("evaluate")
    (report,) = launch.results.glob("evaluate_*/report.json")
    metrics = json.loads(report.read_text())["tasks"]["lambada"]["metrics"]
    assert metrics["perplexity"]["value"] > 1
    folder = launch.record("deploy")["folder"]
    logs = [path.read_text() for path in folder.glob("log-*_[01].out")]
    assert len(logs) == 2
    assert slurm.wait(f"{launch.record('deploy')['job_id']}_0")["JobState"] == "COMPLETED"


@pytest.mark.slow
def test_the_documented_command_by_hand(
    slurm: TestCluster, repository: Path, tmp_path: Path
) -> None:
    launching = ("srun", "-N", "2", "-n", "2", "--mpi=pmix", "--label", "--kill-on-bad-exit=1")
    env = {**slurm.environment, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    server = WrappedServer(tmp_path, repository, env, launching, node="SLURM_PROCID", nodes=2)
    try:
        server.wait_until_ready()
        assert not server.ready(1)
        log = server.log.read_text()
        told = "node 1 of 2 (started by srun (Slurm)): node 0 serves model tiny; this server only"
        assert f"1: {told} hosts ranks" in log
        assert "1: node 1 of 2 (n2): hosts ranks [1] of model tiny for rank 0 at" in log
        (rank,) = (
            pid
            for pid, entry in processes()
            if b"ranks.worker" in read(entry / "cmdline")
            and str(tmp_path).encode() in read(entry / "environ")
        )
        os.kill(rank, signal.SIGKILL)
        assert server.wait() != 0
        lost = f"0: ending the server: rank 1 on node 1 (n2, pid {rank}) was ended by SIGKILL"
        assert lost in server.log.read_text()
    finally:
        server.kill()
