"""A running two-node Slurm for the tests of this room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PACKAGES, TestCluster, missing_requirements


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[TestCluster]:
    """The cluster, started once; its folder has a short path because sockets live in it."""
    missing = missing_requirements()
    if missing:
        pytest.skip(f"no Slurm to test with ({', '.join(missing)}): apt-get install {PACKAGES}")
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


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A container image as far as the SPANK test double looks: a file."""
    path = tmp_path / "image.sqsh"
    path.write_bytes(b"hsqs")
    return path
