"""Whole command lines on this machine, with stand-ins for the steps: order, signals, leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher_scripts.common.files import atomic_write
from tests.login.conftest import LOCAL, Run
from tests.processes import wait_for_file, wait_until_gone

Start = Callable[..., "subprocess.Popen[str]"]


def export_folder(tmp_path: Path) -> Path:
    return tmp_path / "the results" / "tiny" / "export_tp2_pp1_auto_auto"


def deploy_folder(tmp_path: Path) -> Path:
    return tmp_path / "the results" / "tiny" / "deploy_tp2_pp1_auto_auto"


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the launcher prints up to a line with `text`; all of it where there is none."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if text in line:
            break
    return "".join(lines)


def assert_ended(pids: str) -> None:
    wait_until_gone(map(int, pids.split()))


@pytest.fixture
def start(checkout: Path, arguments: list[str], tmp_path: Path) -> Iterator[Start]:
    """Start the launcher in the background; whatever a test leaves is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_main(*more: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(checkout / "main.py"), LOCAL, *arguments, *more],
            cwd=tmp_path,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_main
    for process in started:
        process.kill()
        process.communicate()


def test_export_runs_both_steps_and_a_second_run_overwrites_nothing(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    result = run("stages=[export]", LOCAL, *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert list(cwd.iterdir()) == []
    assert "converting tiny" in result.stdout
    assert "writing the repository" in result.stdout
    folder = export_folder(tmp_path) / "jobs" / "001"
    record = json.loads((folder / "job.json").read_text())
    assert record["cluster_type"] == "interactive"
    assert "converting tiny" in (folder / record["log"]).read_text()
    assert (folder / "ran").read_text() == "convert_checkpoint\nwrite_model_repository\n"
    assert (folder / "export_tiny_hydra.yaml").exists()
    assert os.access(folder / "export_tiny_submission.sh", os.X_OK)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert run("stages=[export]", LOCAL, *arguments).returncode == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert (folder.parent / "002" / "ran").read_text() == (folder / "ran").read_text()


def test_a_failing_step_ends_the_job_with_its_code(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    result = run("stages=[export,deploy]", LOCAL, *arguments, EXPORT_EXITS="23")
    assert result.returncode == 23
    assert "failed with exit code 23" in result.stderr
    assert "Traceback" not in result.stderr
    assert (export_folder(tmp_path) / "jobs/001/ran").read_text() == "convert_checkpoint\n"
    assert not deploy_folder(tmp_path).exists()


def test_a_reader_that_has_seen_enough_ends_the_job(start: Start, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = start("stages=[export]", EXPORT_WAITS=str(pid_file))
    pid = wait_for_file(pid_file)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    (log,) = (export_folder(tmp_path) / "jobs" / "001").glob("log-*.out")
    with log.open("a") as file:
        file.write("more that nobody reads\n")
    assert process.wait(timeout=240) == 128 + signal.SIGPIPE
    assert_ended(pid)


def test_an_interrupted_export_ends_its_processes(start: Start, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    process = start("stages=[export]", EXPORT_WAITS=str(pid_file))
    pid = wait_for_file(pid_file)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in output
    assert_ended(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_in_the_foreground_ends_cleanly(start: Start, tmp_path: Path, number: int) -> None:
    process = start("stages=[export,deploy]")
    output = read_until(process, "is ready")
    pids = (deploy_folder(tmp_path) / "pids").read_text()
    process.send_signal(number)
    output += process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert "is ready" in output
    assert output.index("writing the repository") < output.index("server starts")
    assert "server stopped in order" in output
    assert_ended(pids)


def test_the_terminal_ends_with_the_address(start: Start, tmp_path: Path) -> None:
    process = start("stages=[export,deploy]", "deploy.gateway.port=0")
    output = read_until(process, "deploy job deploy_tiny is ready")
    lines = [process.stdout.readline() for _ in range(2)] if process.stdout else []
    assert lines == [
        "OpenAI URL: http://127.0.0.1:8080/v1\n",
        "curl http://127.0.0.1:8080/v1/completions\n",
    ]
    process.terminate()
    process.communicate(timeout=240)
    assert "server.cc" not in output and "| a |" not in output
    (log,) = (deploy_folder(tmp_path) / "jobs/001").glob("log-*")
    assert "server.cc" in log.read_text()


def test_no_process_outlives_a_server_that_forgets_them(start: Start, tmp_path: Path) -> None:
    process = start("stages=[export,deploy]", SERVER="leaves_child")
    read_until(process, "is ready")
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_a_second_signal_ends_a_server_that_does_not_listen(start: Start, tmp_path: Path) -> None:
    process = start("stages=[export,deploy]", "deploy.server.stop_timeout=3600", SERVER="deaf")
    read_until(process, "is ready")
    process.terminate()
    output = read_until(process, "stopped by SIGTERM: the deploy job deploy_tiny is ending")
    assert process.poll() is None, output
    process.terminate()
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_the_server_ends_when_the_launcher_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("stages=[export,deploy]")
    wait_for_file(deploy_folder(tmp_path) / "ready.json")
    process.kill()
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_evaluation_has_a_server_beside_it(run: Run, arguments: list[str], tmp_path: Path) -> None:
    result = run("stages=[export,deploy,evaluate]", LOCAL, *arguments, EVALUATE_SECONDS="0.5")
    assert result.returncode == 0, result.stderr
    assert 'measuring at {"http": "127.0.0.1:8000", ' in result.stdout
    assert "measured the speed" in result.stdout
    assert "judging the report" in result.stdout
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())
    log = next((deploy_folder(tmp_path) / "jobs/001").glob("log-*")).read_text()
    assert "server stopped in order" in log


def test_a_gateway_beside_its_server_ends_before_it(start: Start, tmp_path: Path) -> None:
    process = start("stages=[export,deploy,gateway]", "gateway.port=8080")
    output = read_until(process, "gateway job gateway_tiny is ready")
    process.terminate()
    output += process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert output.index("deploy job deploy_tiny is ready") < output.index("gateway: gateway_tiny")
    assert "gateway stopped in order" in output
    (log,) = (deploy_folder(tmp_path) / "jobs/001").glob("log-*")
    assert "server stopped in order" in log.read_text()
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_a_gateway_beside_a_server_that_dies_ends_with_it(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    stages = ("stages=[export,deploy,gateway]", LOCAL, *arguments)
    result = run(*stages, SERVER="dies_later")
    assert result.returncode == 3
    assert "the deploy job deploy_tiny ended with exit code 9" in result.stderr
    assert not list(tmp_path.glob("the results/tiny/gateway_*/ready.json"))


def test_an_evaluation_asks_the_server_behind_a_gateway(run: Run, arguments: list[str]) -> None:
    stages = ("stages=[export,deploy,gateway,evaluate]", LOCAL, *arguments)
    result = run(*stages, EVALUATE_SECONDS="0.5")
    assert result.returncode == 0, result.stderr
    assert 'measuring at {"http": "127.0.0.1:8000", ' in result.stdout


def test_a_ready_file_of_an_earlier_run_does_not_count(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    deploy_folder(tmp_path).mkdir(parents=True)
    (deploy_folder(tmp_path) / "ready.json").write_text("old")
    late = ("deploy.server.ready_timeout=0.5", *arguments)
    result = run("stages=[export,deploy,evaluate]", LOCAL, *late, SERVER="never_ready")
    assert result.returncode == 3
    assert "was not ready within 0.5 s" in result.stderr
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_another_server_that_renews_its_ready_file_does_not_count(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    ready_file = deploy_folder(tmp_path) / "ready.json"
    ready_file.parent.mkdir(parents=True)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.02):
            atomic_write(ready_file, json.dumps({"http": "n1:8000", "job": {"folder": "/other"}}))

    other = threading.Thread(target=renew)
    other.start()
    late = ("deploy.server.ready_timeout=0.5", *arguments)
    try:
        result = run("stages=[export,deploy,evaluate]", LOCAL, *late, SERVER="never_ready")
    finally:
        ended.set()
        other.join()
    assert "was not ready within 0.5 s" in result.stderr


@pytest.mark.parametrize(
    ("behaviour", "reason", "code"),
    [("dies_early", "the port is in use", 7), ("dies_later", "a rank died", 9)],
)
def test_a_dead_server_fails_the_evaluation(
    run: Run, arguments: list[str], tmp_path: Path, behaviour: str, reason: str, code: int
) -> None:
    result = run(
        "stages=[export,deploy,evaluate]",
        LOCAL,
        *arguments,
        SERVER=behaviour,
        EVALUATE_SECONDS="30",
    )
    assert result.returncode == 3
    assert f"ended with exit code {code}" in result.stderr
    assert f"| {reason}" in result.stderr
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_a_dead_server_in_the_foreground_gives_its_code(run: Run, arguments: list[str]) -> None:
    result = run("stages=[export,deploy]", LOCAL, *arguments, SERVER="dies_later")
    assert result.returncode == 9
    assert "failed with exit code 9" in result.stderr


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (1, "NO-GO"),
        pytest.param(2, "INCONCLUSIVE", marks=pytest.mark.slow),
    ],
)
def test_a_verdict_is_the_launchers_exit_code(
    run: Run, arguments: list[str], tmp_path: Path, code: int, verdict: str
) -> None:
    result = run("stages=[export,deploy,evaluate]", LOCAL, *arguments, VERDICT=str(code))
    assert result.returncode == code, result.stderr
    assert "judging the report" in result.stdout
    assert f"{verdict}: the end of the evaluate job evaluate_tiny: " in result.stderr
    assert "error" not in result.stderr
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


@pytest.mark.parametrize(
    ("stages", "broken"),
    [
        ("[export]", {"EXPORT_EXITS": "1"}),
        pytest.param("[export,deploy,evaluate]", {"EXPORT_EXITS": "2"}, marks=pytest.mark.slow),
    ],
)
def test_a_broken_job_is_no_verdict(
    run: Run, arguments: list[str], stages: str, broken: dict[str, str]
) -> None:
    result = run(f"stages={stages}", LOCAL, *arguments, **broken)
    assert result.returncode == 3
    assert f"failed with exit code {broken['EXPORT_EXITS']}" in result.stderr
    assert "judging the report" not in result.stdout


def test_a_failing_evaluation_stops_the_server(
    run: Run, arguments: list[str], tmp_path: Path
) -> None:
    result = run("stages=[export,deploy,evaluate]", LOCAL, *arguments, EVALUATE_EXITS="5")
    assert result.returncode == 5
    assert_ended((deploy_folder(tmp_path) / "pids").read_text())


def test_a_module_s_pythonpath_comes_after_the_launcher(
    run: Run, arguments: list[str], launcher: Path
) -> None:
    step = "import os\nprint('path', os.environ['PYTHONPATH'])\n"
    (launcher / "steps" / "convert_checkpoint.py").write_text(step)
    setup = "cluster.setup=['export PYTHONPATH=/of/a/module:$PYTHONPATH']"
    ran = run("stages=[export]", LOCAL, *arguments, setup, PYTHONPATH="/of/the/shell")
    assert ran.returncode == 0, ran.stderr
    assert f"path {launcher.parent}:/of/a/module:/of/the/shell\n" in ran.stdout
