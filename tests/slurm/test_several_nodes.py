"""A server whose ranks are on two nodes of a real Slurm: its start, its figures, every loss."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.parallel import Parallelism
from launcher_scripts.server.health import TritonClient
from launcher_scripts.settings import ExportSettings, write_settings
from launcher_scripts.steps import convert_checkpoint, write_model_repository
from launcher_scripts.steps.quickstart import write_nemo_file
from tests.login.conftest import Run
from tests.quickstart.tiny_gguf import hf_weights, write_gguf
from tests.server.typed import TypedServer
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit
from tests.slurm.processes import alive, processes, read

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytriton") is None or importlib.util.find_spec("torch") is None,
    reason="the pip-installable tritonserver or torch is not there",
)

ITEMS = '{"text": "abc de"}\n{"text": "fg hi"}\n'
MODEL = ("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32")
TP2 = ("export.model.tensor_model_parallel_size=2",)
PP2 = (
    "export.model.tensor_model_parallel_size=1",
    "export.triton_deployment.pipeline_model_parallel_size=2",
)


@pytest.fixture
def launch(slurm: TestCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:  # noqa: ARG001
    """The launcher with its real steps, a tiny model, and free ports on the loopback address."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checkpoint = write_nemo_file(
        write_gguf(tmp_path / "tiny.gguf", hf_weights()), tmp_path / "tiny.nemo"
    )
    (tmp_path / "items.jsonl").write_text(ITEMS)
    arguments = [
        "cluster.container_runtime=none",
        f"cluster.python={shutil.which('python3')}",
        f"base_results_dir={tmp_path / 'results'}",
        "export.run.model_train_name=tiny",
        f"export.model.checkpoint_path={checkpoint}",
        "export.model.processes=1",
        *MODEL,
        "deploy.server.host=127.0.0.1",
        *(f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics")),
        "deploy.server.device=cpu",
        f"evaluate.tasks.lambada.data_file={tmp_path / 'items.jsonl'}",
        "evaluate.benchmark=null",
        "evaluate.in_deploy_job=True",
    ]
    return Submit(run, arguments, tmp_path / "results" / "tiny")


def measured(slurm: TestCluster, launch: Submit, sizes: str, number: int) -> tuple[float, str]:
    """The perplexity that a launched evaluation found, and what its job said."""
    (record,) = launch.results.glob(f"deploy_{sizes}_*/jobs/{number:03d}/job.json")
    job_id = json.loads(record.read_text())["job_id"]
    fields = slurm.wait(job_id, timeout=300)
    log = "".join(path.read_text() for path in record.parent.glob("*.out"))
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert slurm.job_processes(job_id) == []
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


class Served:
    """A deployment on both nodes, and what runs of it."""

    def __init__(self, slurm: TestCluster, results: Path) -> None:
        self.slurm = slurm
        self.folder = results / "jobs" / "001"
        self.record = json.loads((self.folder / "job.json").read_text())
        self.job_id = self.record["job_id"]
        self.ready_file = results / "ready.json"
        self.ready = self.wait_until_ready()

    def log(self) -> str:
        return (self.folder / self.record["log"]).read_text()

    def on_nodes(self) -> str:
        shown = self.slurm.run("squeue", "--noheader", "--format=%N", "--jobs", self.job_id)
        return shown.stdout.strip()

    def wait_until_ready(self, after: str = "") -> dict[str, Any]:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if self.ready_file.exists():
                ready = json.loads(self.ready_file.read_text())
                if ready["http"] != after:
                    return ready
            time.sleep(0.1)
        raise TimeoutError(self.log())

    def answers(self) -> bool:
        """Whether a reader would take this server for ready."""
        host, _, port = self.ready["http"].partition(":")
        return self.ready_file.exists() and TritonClient(host, int(port)).ready()

    def rank(self, number: int) -> int:
        return int(self.ready["ranks"][number]["pid"])

    def step(self, node: str) -> int:
        """The process of the step on a node."""
        for pid in self.slurm.job_processes(self.job_id):
            words = read(Path(f"/proc/{pid}/cmdline"))
            variables = read(Path(f"/proc/{pid}/environ")).split(b"\0")
            on_node = f"SLURMD_NODENAME={node}".encode() in variables
            if on_node and b"steps.start_server" in words and b"srun" not in words.split(b"\0")[0]:
                return pid
        raise LookupError(node)

    def end(self) -> tuple[str, str, str]:
        """State, exit code and log, once nothing of it runs any more."""
        fields = self.slurm.wait(self.job_id)
        deadline = time.monotonic() + 20
        while self.slurm.job_processes(self.job_id) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.slurm.job_processes(self.job_id) == []
        assert not alive(self.rank(0))
        assert not alive(self.rank(1))
        return fields["JobState"], fields["ExitCode"], self.log()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model of two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = write_nemo_file(write_gguf(folder / "t.gguf", hf_weights()), folder / "t.nemo")
    settings = ExportSettings(
        "tiny",
        "gpt3",
        str(checkpoint),
        str(folder / "models" / "tiny"),
        Parallelism(2),
        processes=1,
    )
    write_settings(settings, folder / "export.yaml")
    for step in (convert_checkpoint, write_model_repository):
        assert step.main(["--settings", str(folder / "export.yaml")]) == 0
    return folder / "models"


@pytest.fixture
def serve(slurm: TestCluster, launch: Submit, repository: Path) -> Iterator[Any]:
    """Starts a deployment of `repository` on both nodes."""

    def start(*more: str) -> Served:
        launch("stages=[deploy]", f"deploy.model_repository={repository}", *NODES, *more)
        (results,) = launch.results.glob("deploy_*")
        return Served(slurm, results)

    yield start
    slurm.cancel_all()


NODES = ("deploy.run.nodes=2", *TP2, "deploy.server.stop_timeout=5")
LOSSES = {
    "rank on node 1": (
        lambda served: served.rank(0),
        signal.SIGKILL,
        "rank 0 of model tiny (process {pid}) died",
    ),
    "rank on node 2": (
        lambda served: served.rank(1),
        signal.SIGKILL,
        "rank 1 on node 1 (n2, pid {pid}) was ended by SIGKILL while waiting after step",
    ),
    "rank on node 2, stopped": (
        lambda served: served.rank(1),
        signal.SIGSTOP,
        "rank 1 on node 1 (n2, pid {pid}) is stopped (SIGSTOP) while waiting after step",
    ),
    "tritonserver": (
        lambda served: int(served.ready["pid"]),
        signal.SIGKILL,
        "the server was killed by SIGKILL",
    ),
    "the step on node 1": (
        lambda served: served.step("n1"),
        signal.SIGKILL,
        "srun: error: n1: task 0: Killed",
    ),
    "the step on node 2": (
        lambda served: served.step("n2"),
        signal.SIGKILL,
        "srun: error: n2: task 1: Killed",
    ),
}
UNREADY_SECONDS = 5.5


@pytest.mark.slow
@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_ends_the_job_with_the_reason(serve: Any, what: str) -> None:
    find, number, reason = LOSSES[what]
    served = serve()
    pid = find(served)
    start = time.monotonic()
    os.kill(pid, number)
    while served.answers():
        assert time.monotonic() - start < UNREADY_SECONDS
        time.sleep(0.05)
    noticed = time.monotonic() - start
    state, code, log = served.end()
    over = time.monotonic() - start
    print(f"{what}: unready after {noticed:.1f} s, over after {over:.1f} s, {state} {code}")
    assert state == "FAILED"
    assert reason.format(pid=pid) in log
    # Only who is killed itself leaves its file, which says when it was last alive.
    left = json.loads(served.ready_file.read_text()) if served.ready_file.exists() else None
    assert (left is not None) == (what == "the step on node 1")
    assert left is None or "alive_at" in left


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
def test_the_documented_command_by_hand(
    slurm: TestCluster, repository: Path, tmp_path: Path
) -> None:
    launching = ("srun", "-N", "2", "-n", "2", "--mpi=pmix", "--label", "--kill-on-bad-exit=1")
    env = {**slurm.environment, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    server = TypedServer(tmp_path, repository, env, launching, node="SLURM_PROCID", nodes=2)
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
            if b"engine.worker" in read(entry / "cmdline")
            and str(tmp_path).encode() in read(entry / "environ")
        )
        start = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        while server.ready():
            assert time.monotonic() - start < UNREADY_SECONDS
            time.sleep(0.05)
        assert server.wait() != 0
        lost = f"0: ending the server: rank 1 on node 1 (n2, pid {rank}) was ended by SIGKILL"
        assert lost in server.log.read_text()
    finally:
        server.kill()
