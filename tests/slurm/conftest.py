"""A running two-node Slurm for the tests of this room."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.login.conftest import Run, arguments, launcher, nemo_file, run
from tests.slurm.cluster import TestCluster, missing_requirements

__all__ = ["arguments", "launcher", "nemo_file", "run"]


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[TestCluster]:
    """The cluster, started once; its folder has a short path because sockets live in it."""
    missing = missing_requirements()
    if missing:
        pytest.skip(f"no Slurm to test with: {missing}")
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = TestCluster(root, nodes=2)
    cluster.start()
    try:
        yield cluster
        cluster.stop()
        assert cluster.step_daemons() == []
        assert cluster.job_processes() == []
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def slurm(running_slurm: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestCluster]:
    """The cluster as this process's own; no job of one test is left for the next."""
    for name, value in running_slurm.environment.items():
        if name.startswith("SLURM_"):
            monkeypatch.setenv(name, value)
    yield running_slurm
    running_slurm.cancel_all()


@dataclass(frozen=True)
class Submit:
    """Runs the launcher with cluster_type=bcm, and finds the jobs that it left behind."""

    run: Run
    arguments: list[str]
    results: Path

    def __call__(self, *more: str, check: bool = True, **env: str) -> Any:
        """Submit; `more` are further arguments, `env` goes through sbatch to the jobs."""
        ran = self.run("cluster_type=bcm", *self.arguments, *more, **env)
        assert not check or ran.returncode == 0, ran.stdout + ran.stderr
        return ran

    def record(self, stage: str, number: int = 1) -> dict[str, Any]:
        """The job's record, with its folder under the key `folder`."""
        (path,) = self.results.glob(f"{stage}_*/jobs/{number:03d}/job.json")
        return {**json.loads(path.read_text()), "folder": path.parent}

    def log(self, stage: str, number: int = 1) -> str:
        """The job's log; empty for a job that never ran."""
        record = self.record(stage, number)
        path: Path = record["folder"] / record["log"]
        return path.read_text() if path.exists() else ""


@pytest.fixture
def submit(slurm: TestCluster, run: Run, arguments: list[str], tmp_path: Path) -> Submit:  # noqa: ARG001
    """The launcher on the cluster, with stand-ins for the steps."""
    python = f"cluster.python={sys.executable}"
    return Submit(run, [*arguments, python], tmp_path / "the results" / "tiny")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A container image as far as the SPANK test double looks: a file."""
    path = tmp_path / "image.sqsh"
    path.write_bytes(b"hsqs")
    return path
