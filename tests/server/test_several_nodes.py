"""tritonserver typed by hand under mpirun: on one node, and on two that find each other."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.processes import command_line, processes, variables, wait_for
from tests.server.repositories import NO_TEXT, export
from tests.server.requests import Client, generated, ids_request
from tests.server.wrapped_server import WrappedServer

pytestmark = pytest.mark.usefixtures("tritonserver")


def mpirun_env(node: int, nodes: int) -> dict[str, str]:
    """What Open MPI's mpirun leaves in the environment of one process per node."""
    ranks = {
        "OMPI_COMM_WORLD_RANK": node,
        "OMPI_COMM_WORLD_SIZE": nodes,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 1,
        "PMIX_RANK": node,
        "PMIX_NAMESPACE": 1_000_000 + os.getpid(),
    }
    return {**os.environ, **{name: str(value) for name, value in ranks.items()}}


def ranks_of(folder: Path) -> list[int]:
    """Rank processes of servers whose backends lie in `folder`."""
    return [
        pid
        for pid, _ in processes()
        if "ranks.worker" in command_line(pid)
        and any(str(folder).encode() in variable for variable in variables(pid))
    ]


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WrappedServer]]:
    """Models of two ranks and of one, in servers on two nodes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    export(tmp_path, name="wide", tp=2, tokenizer=NO_TEXT)
    repository = export(tmp_path, name="narrow", tp=1, tokenizer=NO_TEXT).model_repository
    servers = [
        WrappedServer(tmp_path / str(node), repository, mpirun_env(node, 2)) for node in range(2)
    ]
    yield servers
    for server in servers:
        server.kill()


def test_models_of_different_sizes_on_two_nodes(two_nodes: list[WrappedServer], tmp_path: Path):
    first, second = two_nodes
    with Client(first.wait_until_ready(), "http") as client:
        request = ids_request([(5, 6, 7)], 6)
        answers = [generated(client.infer(model, **request)) for model in ("wide", "narrow")]
        assert answers[0] == answers[1]
        assert not second.ready()
        assert second.process.poll() is None
        log = second.log.read_text()
        assert "node 1 of 2 (started by mpirun (Open MPI)): node 0 serves model wide" in log
        assert "hosts ranks [1] of model wide for rank 0 at" in log
        assert "hosts ranks [] of model narrow for rank 0 at" in log
        (rank,) = ranks_of(tmp_path / "1")
        os.kill(rank, signal.SIGKILL)
        with pytest.raises((InferenceServerException, OSError)):
            wait_for(lambda: not client.infer("wide", **request))
    assert first.wait() != 0
    assert second.wait() != 0
    assert f"ending the server: rank 1 on node 1 ({os.uname().nodename}, pid {rank})" in (
        first.log.read_text()
    )
    wait_for(lambda: not ranks_of(tmp_path))


@pytest.mark.slow
def test_a_server_that_is_stopped_lets_the_other_node_end(two_nodes: list[WrappedServer]):
    first, second = two_nodes
    first.wait_until_ready()
    first.process.terminate()
    assert first.wait() == 0, first.log.read_text()
    second.wait()
    assert "model wide is closed" in second.log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not there")
def test_mpirun_on_one_node(tmp_path: Path):
    repository = export(tmp_path, tp=2).model_repository
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launching = ["mpirun", "-n", "1", "--allow-run-as-root"]
    server = WrappedServer(tmp_path, repository, env, launching)
    try:
        with Client(server.wait_until_ready(), "http") as client:
            assert len(generated(client.infer("tiny", **ids_request([(5, 6)], 4)))) == 4
        server.process.terminate()
        server.wait()
        wait_for(lambda: not ranks_of(tmp_path))
    finally:
        server.kill()
