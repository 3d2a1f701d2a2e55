"""Gateways on a real Slurm: beside rank 0 of two nodes, and one before replicas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.http_requests import receive
from tests.processes import command_line, variables, wait_for
from tests.slurm.cluster import TestCluster
from tests.slurm.serving import TP2
from tests.slurm.submitting import Submit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]


def test_the_gateway_is_on_the_first_node_and_ends_with_the_job(
    slurm: TestCluster, serve: Any
) -> None:
    served = serve("deploy.gateway.port=0")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", served.ready["openai"])
    gateways = [
        pid
        for pid in slurm.job_processes(served.job_id)
        if "launcher_scripts.steps.start_gateway" in command_line(pid).split()
    ]
    assert len(gateways) == 1
    assert b"SLURM_NODEID=0" in variables(gateways[0])
    if shutil.which("curl") is not None:
        (command,) = re.findall(r"^(?:\d+: )?try: (curl .*)$", served.log(), re.MULTILINE)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout).get("model") == "tiny", done.stdout
    slurm.run("scancel", served.job_id)
    state, _, log = served.end()
    assert state == "CANCELLED"
    assert "gateway: draining: 0 requests are running" in log
    assert "is killed" not in log
    assert not served.ready_file.exists()


def asked(openai: str, path: str, body: dict[str, Any] | None = None) -> Any:
    return receive(f"{openai.removesuffix('/v1')}{path}", body)


def test_replicas_have_one_address_which_outlives_each_of_them(
    slurm: TestCluster, launch: Submit
) -> None:
    shared = ("cluster.exclusive=False", "cluster.mem=1000", "cluster.gpus_per_node=2")
    launch("stages=[export,deploy]", *TP2, *shared, "deploy.replicas=2", "deploy.gateway.port=0")
    deployed, gateway = launch.record("deploy"), launch.record("gateway")
    ready = gateway["folder"].parent.parent / "ready.json"
    wait_for(ready.exists)
    openai = json.loads(ready.read_text())["openai"]

    def healthy() -> set[str]:
        return {s["address"] for s in asked(openai, "/servers")["servers"] if s["healthy"]}

    def address(number: int) -> str:
        path = deployed["folder"].parent.parent / f"ready-{number}.json"
        return str(json.loads(path.read_text())["grpc"])

    wait_for(lambda: len(healthy()) == 2)
    body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    assert asked(openai, "/v1/completions", body)["usage"]["completion_tokens"] == 3
    slurm.run("scancel", f"{deployed['job_id']}_0")
    wait_for(lambda: healthy() == {address(1)})
    assert asked(openai, "/v1/completions", body)["usage"]["completion_tokens"] == 3
    # A replica that is submitted while it runs.
    launch("stages=[deploy]", *TP2, *shared, "deploy.first_replica=0", "deploy.gateway.port=0")
    wait_for(lambda: len(healthy()) == 2)
    assert healthy() == {address(0), address(1)}
    assert json.loads(ready.read_text())["openai"] == openai
    slurm.run("scancel", gateway["job_id"])
    assert slurm.wait(gateway["job_id"])["JobState"] == "CANCELLED"
    assert "gateway: draining: 0 requests are running" in launch.log("gateway")
    assert not ready.exists()
    slurm.cancel_all()
