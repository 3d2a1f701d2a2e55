"""A real server of a tiny model on both nodes of the test cluster, and what runs of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.server.health import TritonClient
from launcher_scripts.steps.quickstart import write_nemo_file
from tests.login.conftest import Run
from tests.processes import command_line, variables, wait_for, wait_until_gone
from tests.quickstart.tiny_gguf import hf_weights, write_gguf
from tests.server.processes import run_export
from tests.slurm.cluster import TestCluster
from tests.slurm.submitting import Submit

ITEMS = '{"text": "abc de"}\n{"text": "fg hi"}\n'
MODEL = ("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32")
TP2 = ("export.model.tensor_model_parallel_size=2",)
NODES = ("deploy.run.nodes=2", *TP2, "deploy.server.stop_timeout=5")


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
        "deploy.restarts=0",
        "deploy.server.host=127.0.0.1",
        *(f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics")),
        "deploy.server.device=cpu",
        f"evaluate.tasks.lambada.data_file={tmp_path / 'items.jsonl'}",
        "evaluate.benchmark=null",
        "evaluate.in_deploy_job=True",
    ]
    return Submit(run, arguments, tmp_path / "results" / "tiny")


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
        def ready() -> dict[str, Any] | None:
            if not self.ready_file.exists():
                return None
            found: dict[str, Any] = json.loads(self.ready_file.read_text())
            return None if found["http"] == after else found

        return wait_for(ready, said=self.log) or {}

    def answers(self) -> bool:
        """Whether a reader would take this server for ready."""
        return self.ready_file.exists() and TritonClient(self.ready["http"]).ready()

    def rank(self, number: int) -> int:
        return int(self.ready["ranks"][number]["pid"])

    def step(self, node: str) -> int:
        """The process of the step on a node."""
        for pid in self.slurm.job_processes(self.job_id):
            program, _, arguments = command_line(pid).partition(" ")
            on_node = f"SLURMD_NODENAME={node}".encode() in variables(pid)
            if on_node and "steps.start_server" in arguments and "srun" not in program:
                return pid
        raise LookupError(node)

    def end(self) -> tuple[str, str, str]:
        """State, exit code and log, once nothing of it runs any more."""
        fields = self.slurm.wait(self.job_id)
        wait_for(lambda: not self.slurm.job_processes(self.job_id))
        wait_until_gone([self.rank(0), self.rank(1)])
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
        weight_data_type="fp32",
        data_type="fp32",
    )
    return run_export(settings, folder)


@pytest.fixture
def serve(slurm: TestCluster, launch: Submit, repository: Path) -> Iterator[Any]:
    """Starts a deployment of `repository` on both nodes."""

    def start(*more: str) -> Served:
        launch("stages=[deploy]", f"deploy.model_repository={repository}", *NODES, *more)
        (results,) = launch.results.glob("deploy_*")
        return Served(slurm, results)

    yield start
    slurm.cancel_all()
