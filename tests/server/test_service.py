"""A real tritonserver with small stand-in models: ready, stopped, and every way to fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest

from launcher_scripts.common.processes import remove_leftovers
from tests.processes import wait_for
from tests.server.processes import CHECKOUT, RunningStep, running

pytestmark = pytest.mark.usefixtures("tritonserver")

CONFIG = """
name: "standin"
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

# A model that does what the backend does around its life: status files, and a rank of its own
# that has left the server's session.
MODEL = """
import json, os, subprocess, sys, time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
        {initialize}

    def status(self, state, reason=None):
        ranks = [{{"rank": 1, "pid": self.rank.pid, "host": "localhost", "device": "cpu"}}]
        facts = {{"state": state, "reason": reason, "ranks": ranks, "versions": {{"standin": "1"}}}}
        path = Path(os.environ["LAUNCHER_STATUS_DIR"]) / "standin.json"
        path.with_suffix(".partial").write_text(json.dumps(facts))
        path.with_suffix(".partial").rename(path)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def make_repository(folder: Path, initialize: str = "self.status('ready')") -> Path:
    version = folder / "repository" / "standin" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL.format(initialize=initialize))
    return folder / "repository"


def assert_clean_failure(step, *reasons: str) -> None:
    """Exit code 1, the reasons on stderr without a traceback, and nothing left."""
    assert step.wait() == 1, step.out
    for reason in reasons:
        assert reason in step.err
    assert "Traceback" not in step.err
    assert step.survivors() == []
    assert not step.settings.ready_file.exists()


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGTERM, "a 'b' \"c\" $(touch made) `touch made` & ;"),
        pytest.param(signal.SIGINT, "models", marks=pytest.mark.slow),
    ],
    ids=["SIGTERM and nasty names", "SIGINT"],
)
def test_ready_then_stopped(
    tmp_path: Path, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    repository = make_repository(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    with running(tmp_path / "job", repository, forked=False) as step:
        ready = step.wait_until_ready()
        host, _, port = ready["http"].partition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=60):
            pass
        assert ready["models"] == ["standin"]
        assert set(ready["versions"]) == {"tritonserver", "standin"}
        assert [rank["model"] for rank in ready["ranks"]] == ["standin"]
        assert [what for what, _ in ready["timeline"]][-1] == "ready"
        assert "  +0.00  this step was started" in step.out
        assert len({ready["http"], ready["grpc"], ready["metrics"]}) == 3
        assert step.shared_memory() == []  # its processes have it open
        assert step.stop(number) == 0, step.err
        assert step.survivors() == []
        assert not step.settings.ready_file.exists()
        assert f"stopping the server: {signal.Signals(number).name}" in step.out
        assert step.shared_memory() == []
    assert [path.name for path in folder.iterdir()] == ["repository"]
    assert not (CHECKOUT / "made").exists()


def test_a_server_that_is_not_told_where_listens_on_the_nodes_address(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path), host=None) as step:
        ready = step.wait_until_ready()
        addresses = set(ready["listens_on"].values())
        assert len(addresses) == 1 and addresses.isdisjoint({"0.0.0.0", "::"})
        host, _, port = ready["http"].rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=60):
            pass
        assert f"--http-address={addresses.pop()}" in step.out
        assert step.stop() == 0, step.err


def test_a_stop_that_the_servers_processes_hear_first(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        step.wait_until_ready()
        for pid, _ in step.survivors():
            if pid != step.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert step.stop() == 0, step.err
        assert "stopping the server: SIGTERM" in step.out
        assert step.survivors() == []


def test_stopped_while_loading(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "self.status('loading'); time.sleep(600)")
    with running(tmp_path / "job", repository, stop_timeout=2.0) as step:
        wait_for(lambda: any("sleep 600" in command for _, command in step.survivors()))
        assert step.stop() == 0, step.err
        assert step.survivors() == []


def test_a_model_that_does_not_load_is_the_reason(tmp_path: Path) -> None:
    repository = make_repository(
        tmp_path, "self.status('failed', 'no weights'); raise ValueError('no weights at all')"
    )
    with running(tmp_path / "job", repository) as step:
        assert_clean_failure(step, "model standin failed: no weights", "end of the server's log")


def test_the_log_of_a_server_that_gives_up_is_shown(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "raise ValueError('the disk is made of cheese')")
    with running(tmp_path / "job", repository) as step:
        assert_clean_failure(
            step,
            "the server ended with exit code 1\n"
            "ERROR: Failed to create instance: ValueError: the disk is made of cheese\n",
            "the end of the server's log",
        )


def test_a_server_that_is_never_ready(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "self.status('loading'); time.sleep(600)")
    with running(tmp_path / "job", repository, ready_timeout=4.0, stop_timeout=1.0) as step:
        assert_clean_failure(step, "not ready within 4 s", "deploy.server.ready_timeout")


def test_a_killed_server(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        os.kill(step.wait_until_ready()["pid"], signal.SIGKILL)
        assert_clean_failure(step, "the server was killed by SIGKILL")


def test_a_killed_rank(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        rank = step.wait_until_ready()["ranks"][0]
        os.kill(rank["pid"], signal.SIGKILL)
        assert_clean_failure(step, f"rank 1 of model standin (process {rank['pid']}) died")


def test_a_suspended_server(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        server = step.wait_until_ready()["pid"]
        os.kill(server, signal.SIGSTOP)
        assert_clean_failure(step, f"the server (process {server}) is suspended")


def test_a_killed_python_worker(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        step.wait_until_ready()
        stub = next(pid for pid, command in step.survivors() if "python_backend_stub" in command)
        os.kill(stub, signal.SIGKILL)
        assert_clean_failure(step, f"Python backend (process {stub}) died")


def test_a_model_that_fails_later(tmp_path: Path) -> None:
    """It fails when the test has made a file."""
    sign = tmp_path / "fail"
    later = f"""import threading
        def fail():
            while not os.path.exists({str(sign)!r}):
                time.sleep(0.05)
            self.status("failed", "rank 1 died")
        self.status("ready")
        threading.Thread(target=fail).start()"""
    with running(tmp_path / "job", make_repository(tmp_path, later)) as step:
        step.wait_until_ready()
        sign.touch()
        assert_clean_failure(step, "model standin failed: rank 1 died")


def test_a_server_that_was_ready_is_started_again_as_often_as_allowed(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path), restarts=1) as step:
        first = step.wait_until_ready()
        os.kill(first["ranks"][0]["pid"], signal.SIGKILL)
        wait_for(lambda: not step.settings.ready_file.exists())
        second = step.wait_until_ready()
        assert second["pid"] != first["pid"]
        assert "restart 1 of 1: rank 1 of model standin" in step.out
        os.kill(second["pid"], signal.SIGKILL)
        assert_clean_failure(step, "the server was killed by SIGKILL")


def test_a_server_without_requests_ends_by_itself(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path), idle_timeout=1.0, restarts=1) as step:
        assert step.wait() == 0, step.err
        assert "stopping the server: no request for 1 s (deploy.idle_timeout)" in step.out
        assert "restart 1" not in step.out
        assert step.survivors() == []
        assert not step.settings.ready_file.exists()


def test_a_server_that_was_never_ready_is_not_started_again(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "raise ValueError('no weights')")
    with running(tmp_path / "job", repository, restarts=3) as step:
        assert_clean_failure(step, "no weights")
        assert "restart" not in step.out


def test_the_server_does_not_outlive_the_step(tmp_path: Path) -> None:
    with running(tmp_path / "job", make_repository(tmp_path)) as step:
        ready = step.wait_until_ready()
        step.process.kill()
        wait_for(lambda: not Path(f"/proc/{ready['pid']}").exists())


def test_what_a_killed_server_leaves_is_removed_and_nothing_of_a_living_one(
    tmp_path: Path,
) -> None:
    """Servers of other tests clean up, too: this test holds them as long as it looks."""
    loading = make_repository(tmp_path / "slow", "time.sleep(600)")
    with running(tmp_path / "killed", loading) as killed:
        wait_for(lambda: killed.shared_memory() != [])
        (lock,) = locks(killed)
        folder = Path(tempfile.gettempdir(), lock.stem)
        with lock.open() as memory_held, (folder / ".lock").open() as folder_held:
            # Suspended first: who sees another one's death would tidy up.
            for pid in killed.suspend():
                with contextlib.suppress(ProcessLookupError):  # some end by themselves
                    os.kill(pid, signal.SIGKILL)
            for held in (memory_held, folder_held):  # which waits for the last process
                fcntl.flock(held, fcntl.LOCK_EX)
            if lock.exists():  # a server of another test may have been quicker to remove it all
                assert killed.shared_memory() != []
                assert folder.is_dir()
        with running(tmp_path / "job", make_repository(tmp_path)) as step:
            step.wait_until_ready()
            assert (killed.shared_memory(), locks(killed)) == ([], [])
            assert not folder.exists()
            assert (step.shared_memory(), locks(step)) == ([], [])  # its processes have it open
            living = Path(backends(step)).parent
            assert living.name not in remove_leftovers()
            assert (living / "backends").is_dir()
            assert step.stop() == 0
            assert not living.exists()


def locks(step: RunningStep) -> list[Path]:
    """What the step's server holds as long as it lives."""
    return list(Path("/dev/shm").glob(f"{Path(backends(step)).parent.name}.lock"))


def backends(step: RunningStep) -> str:
    (folder,) = re.findall(r"--backend-directory=(\S+)", step.out)
    return str(folder)


def test_ports_in_use_are_all_named_before_anything_starts(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        ports = one.getsockname()[1], two.getsockname()[1]
        more = {"http_port": ports[0], "metrics_port": ports[1]}
        with running(tmp_path / "job", make_repository(tmp_path), **more) as step:
            assert_clean_failure(
                step,
                f"got {ports[0]}; change deploy.server.http_port",
                f"got {ports[1]}; change deploy.server.metrics_port",
            )
            assert "tritonserver" not in step.out


def test_a_missing_repository(tmp_path: Path) -> None:
    with running(tmp_path / "job", tmp_path / "absent") as step:
        assert_clean_failure(step, "absent (no folder)", "deploy.model_repository")


def test_a_server_program_that_does_not_exist(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    with running(tmp_path / "job", repository, tritonserver="/nowhere/tritonserver") as step:
        assert_clean_failure(step, "/nowhere/tritonserver", "deploy.server.tritonserver")


def test_a_second_server_leaves_the_ready_file_of_a_living_one(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    with running(tmp_path / "job", repository) as first:
        ready = first.wait_until_ready()
        (tmp_path / "second").mkdir()
        second = RunningStep(first.settings, tmp_path / "second")
        try:
            assert second.wait() == 1
        finally:
            second.close()
        assert "another server is alive with this results_dir; got " in second.err
        assert "change deploy.run.results_dir" in second.err
        assert "tritonserver" not in second.out
        shown = json.loads(first.settings.ready_file.read_text())
        assert {**shown, "alive_at": None} == {**ready, "alive_at": None}
        assert first.stop() == 0
        assert not first.settings.ready_file.exists()


def test_an_old_ready_file_is_removed_at_once(tmp_path: Path) -> None:
    results = tmp_path / "job" / "results"
    results.mkdir(parents=True)
    (results / "ready.json").write_text(json.dumps({"http": "elsewhere:1"}))
    repository = make_repository(tmp_path, "self.status('loading'); time.sleep(600)")
    with running(tmp_path / "job", repository, stop_timeout=1.0) as step:
        wait_for(lambda: not step.settings.ready_file.exists())
        wait_for(lambda: any("sleep 600" in command for _, command in step.survivors()))
        assert step.stop() == 0
