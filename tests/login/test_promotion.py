"""A server that is held back until the verdict: what is planned, refused, and left running."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from stages.evaluate import Evaluate
from tests.conftest import Golden
from tests.login.conftest import LOCAL, Planner
from tests.login.test_golden import BASE, folder_of
from tests.login.test_interactive import assert_ended, deploy_folder
from tests.processes import wait_for_file

PROMOTE = "deploy.promote=after_gate"
STEPS = ("measure_accuracy", "judge")
# main.py of the checkout that is named first, with a judge among the steps of an evaluation.
JUDGED = f"""
import runpy, sys
checkout = sys.argv.pop(1)
sys.path.insert(0, checkout)
from stages.evaluate import Evaluate
Evaluate.step_names = lambda self: {STEPS}
sys.argv[0] = checkout + "/main.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Asks for the promotion after GO, and exits as a verdict does.
JUDGE = """
import os, sys, time, yaml
from pathlib import Path
settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
if os.environ["VERDICT"] == "0":
    Path(settings["server_job_folder"], "promotion.json").touch()
    while not Path(settings["published_as"]).exists():
        time.sleep(0.05)
Path(settings["results_dir"], "verdict.json").write_text("{}")
sys.exit(int(os.environ["VERDICT"]))
"""


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluate, "step_names", lambda _: STEPS)


@pytest.mark.usefixtures("judged")
def test_the_server_is_private_and_its_evaluation_knows_where(
    plan: Planner, golden: Golden
) -> None:
    gateway = "deploy.gateway.port=8080"
    made = plan(*BASE, PROMOTE, gateway)
    _, deploy, evaluate = made.jobs(folder_of)
    server = deploy.settings
    assert (server.http_port, server.grpc_port, server.metrics_port) == (0, 0, 0)
    assert server.gateway.port == 0
    results = deploy.settings.results_dir
    assert evaluate.settings.ready_file == f"{results}/ready.candidate.json"
    assert evaluate.settings.published_as == f"{results}/ready.json"
    assert evaluate.settings.server_job_folder == str(deploy.folder.root)
    golden("bcm_promote/evaluate.sh", made.cluster.render(evaluate))


def test_an_evaluation_of_a_server_that_is_not_held_back_publishes_nothing(
    plan: Planner,
) -> None:
    *_, evaluate = plan(*BASE).jobs(folder_of)
    assert evaluate.settings.published_as is None
    assert not evaluate.promotes


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("deploy.promote=later",), "unknown promote; got 'later'; choices: after_gate"),
        ((PROMOTE, "stages=[export,deploy]"), "nobody judges the server"),
        ((PROMOTE, "stages=[deploy,gateway,evaluate]"), "waits for a server that is held back"),
        ((PROMOTE, "deploy.replicas=2", "deploy.gateway.port=0"), "stages=.gateway.. on a command"),
        ((PROMOTE, "evaluate.ready_file=/r/ready.json"), "the verdict on another server"),
        ((PROMOTE, "evaluate.in_deploy_job=True"), "outlives its evaluation"),
        ((PROMOTE, "evaluate.ladder=[fp32]"), "the servers of a ladder are stopped"),
    ],
)
def test_what_cannot_be_promoted_is_refused(
    plan: Planner, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(*BASE, *overrides)


def test_without_a_verdict_nothing_is_promoted(
    plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluate, "step_names", lambda _: ("measure_accuracy",))
    with pytest.raises(ConfigError, match=r"waits for a verdict; change evaluate\.policy"):
        plan(*BASE, PROMOTE)


@pytest.mark.parametrize("verdict", [0, 1])
def test_here_the_server_goes_on_after_go_alone(
    arguments: list[str], launcher: Path, checkout: Path, tmp_path: Path, verdict: int
) -> None:
    (launcher / "steps" / "judge.py").write_text(JUDGE)
    stages = ("stages=[export,deploy,evaluate]", PROMOTE, LOCAL, *arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", JUDGED, str(checkout), *stages],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "VERDICT": str(verdict)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deploy = deploy_folder(tmp_path)
    try:
        if verdict == 0:
            wait_for_file(deploy / "ready.json")
            for line in process.stdout or ():
                if f"is ready: {deploy / 'ready.json'}" in line:
                    break
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == verdict, output
    finally:
        process.kill()
        process.communicate()
    (log,) = (deploy / "jobs" / "001").glob("log-*")
    assert "server stopped in order" in log.read_text()
    assert_ended((deploy / "pids").read_text())
    assert (deploy / "ready.json").exists() is (verdict == 0)  # a stand-in leaves it
