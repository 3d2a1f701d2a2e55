"""The three stages as jobs of a two-node Slurm, in containers as far as the test double goes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launcher_scripts.steps.quickstart import write_nemo_file
from tests.login.conftest import Run
from tests.quickstart.tiny_gguf import hf_weights, write_gguf
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import Submit

pytestmark = pytest.mark.usefixtures("tritonserver")


@pytest.fixture
def main_job(slurm: TestCluster, run: Run, image: Path, tmp_path: Path) -> Submit:  # noqa: ARG001
    """The launcher with its real steps and a tiny model of two tensor-parallel ranks."""
    checkpoint = write_nemo_file(
        write_gguf(tmp_path / "tiny.gguf", hf_weights()), tmp_path / "tiny.nemo"
    )
    items = tmp_path / "items.jsonl"
    items.write_text('{"text": "abc de"}\n{"text": "fg hi"}\n')
    arguments = [
        f"container={image}",
        f"container_mounts=[{sys.prefix}]",
        f"cluster.python={sys.executable}",
        f"base_results_dir={tmp_path / 'results'}",
        "export.run.model_train_name=tiny",
        f"export.model.checkpoint_path={checkpoint}",
        "export.model.tensor_model_parallel_size=2",
        "export.model.weight_data_type=fp32",
        "export.model.processes=2",
        "export.triton_deployment.data_type=fp32",
        "export.triton_deployment.max_batch_size=4",
        "deploy.restarts=0",
        "deploy.server.host=127.0.0.1",
        "deploy.server.http_port=0",
        "deploy.server.grpc_port=0",
        "deploy.server.metrics_port=0",
        "deploy.server.device=cpu",
        f"evaluate.tasks.lambada.data_file={items}",
        "evaluate.benchmark.lengths=[[6,3]]",
        "evaluate.benchmark.requests=2",
        "evaluate.benchmark.warmup=1",
    ]
    return Submit(run, arguments, tmp_path / "results" / "tiny")


def test_export_deploy_and_evaluate(slurm: TestCluster, main_job: Submit, checkout: Path) -> None:
    before = len(slurm.pyxis_record())
    main_job("stages=[export,deploy,evaluate]", "evaluate.stop_server=False")
    for stage in ("export", "evaluate"):
        fields = slurm.wait(main_job.record(stage)["job_id"], timeout=300)
        log = main_job.log(stage) + main_job.log("deploy")
        assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log
    (report_file,) = main_job.results.glob("evaluate_*/report.json")
    report = json.loads(report_file.read_text())
    assert [item["target"] for item in report["tasks"]["lambada"]["items"]] == [" de", " hi"]
    assert len(report["speed"]["measured_on"]["server"]["ranks"]) == 2
    assert len({entry["job"] for entry in slurm.pyxis_record()[before:] if "job" in entry}) == 3
    job_id = main_job.record("deploy")["job_id"]
    command = [sys.executable, "-m", "launcher_scripts.jobs", "status", "--json", job_id]
    results = f"--results={main_job.results.parent}"
    asked = slurm.run(*command, results, cwd=checkout, env=dict(os.environ))
    assert asked.returncode == 0, asked.stdout + asked.stderr
    (seen,) = json.loads(asked.stdout)
    assert (seen["status"], len(seen["ranks"])) == ("READY", 2)
    assert "tiny" in seen["models"]
    assert (seen["load"]["kv_use"], seen["load"]["requests"] > 0) == (0.0, True)
    assert slurm.job_processes(job_id) != []
    slurm.run("scancel", job_id)
    assert slurm.wait(job_id)["JobState"] == "CANCELLED"
    slurm.cancel_all()
    assert slurm.left_processes(job_id) == []
    assert "stopping the server: SIGTERM" in main_job.log("deploy")
