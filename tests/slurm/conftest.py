"""A running two-node Slurm for the tests of this room."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import jobs, statuses
from tests.login.conftest import Run, arguments, launcher, nemo_file, run
from tests.slurm.cluster import TestCluster, missing_requirements
from tests.slurm.configuration import write_plugstack
from tests.slurm.serving import launch, repository, serve
from tests.slurm.submitting import Submit

__all__ = [
    "Submit",
    "arguments",
    "jobs",
    "launch",
    "launcher",
    "nemo_file",
    "repository",
    "run",
    "serve",
    "statuses",
]


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
        assert cluster.left_processes() == []
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def slurm(running_slurm: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestCluster]:
    """The cluster as this process's own; no job or container of one test is left for the next."""
    for name, value in running_slurm.environment.items():
        if name.startswith("SLURM_"):
            monkeypatch.setenv(name, value)
    yield running_slurm
    running_slurm.cancel_all()
    write_plugstack(running_slurm.paths)
    shutil.rmtree(running_slurm.paths.containers, ignore_errors=True)


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


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
