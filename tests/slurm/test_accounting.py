"""A test cluster with accounting: sacct knows how a job ended."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.slurm.cluster import TestCluster, missing_requirements


@pytest.fixture
def accounted() -> Iterator[TestCluster]:
    """A cluster of one node with slurmdbd; its folder has a short path for the sockets in it."""
    missing = missing_requirements(with_accounting=True)
    if missing:
        pytest.skip(f"no Slurm accounting to test with: {missing}")
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = TestCluster(root, nodes=1, accounting=True)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


def test_sacct_knows_state_and_exit_code(accounted: TestCluster) -> None:
    submitted = accounted.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 3")
    job_id = submitted.stdout.strip()
    show = ("sacct", "-X", "--noheader", "--parsable2", "--format=State,ExitCode", "--jobs", job_id)
    wait_for(lambda: accounted.run(*show).stdout.strip() == "FAILED|3:0")
    etc = accounted.paths.slurm_conf.parent
    for secret in ("slurmdbd.conf", "mariadb.sql", "munge.key"):
        assert (etc / secret).stat().st_mode & 0o777 == 0o600
    accounted.stop()
    assert [daemon for daemon in accounted.daemons if accounted.pid(daemon)] == []
