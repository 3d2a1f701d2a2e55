"""A server on two nodes of a real Slurm with a gateway beside rank 0, and their common end."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import TestCluster
from tests.slurm.processes import read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pytriton") is None or importlib.util.find_spec("torch") is None,
        reason="the pip-installable tritonserver or torch is not there",
    ),
]


def test_the_gateway_is_on_the_first_node_and_ends_with_the_job(
    slurm: TestCluster, serve: Any
) -> None:
    served = serve("deploy.gateway.port=0")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", served.ready["openai"])
    gateways = [
        pid
        for pid in slurm.job_processes(served.job_id)
        if b"launcher_scripts.steps.start_gateway"
        in read(Path(f"/proc/{pid}/cmdline")).split(b"\0")
    ]
    assert len(gateways) == 1
    variables = read(Path(f"/proc/{gateways[0]}/environ")).split(b"\0")
    assert b"SLURM_NODEID=0" in variables
    if shutil.which("curl") is not None:
        (command,) = re.findall(r"^(?:\d+: )?try: (curl .*)$", served.log(), re.MULTILINE)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["model"] == "tiny"
    slurm.run("scancel", served.job_id)
    state, _, log = served.end()
    assert state == "CANCELLED"
    assert "gateway: draining: 0 requests are running" in log
    assert "is killed" not in log
    assert not served.ready_file.exists()
