"""A server that is held back until a verdict: real ones, beside one that is published."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.files import CANDIDATE, request_publication
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.config.settings import DeploySettings, EvaluateSettings
from launcher_scripts.evaluation.gate import promote
from tests.processes import wait_for
from tests.server.processes import RunningStep
from tests.server.test_service import make_repository

pytestmark = pytest.mark.usefixtures("tritonserver")
Start = Callable[..., RunningStep]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Servers with one results folder; a second one of the same name is the same job again."""
    repository = make_repository(tmp_path)
    started: list[RunningStep] = []

    def start_one(name: str, promote: str | None, **more: Any) -> RunningStep:
        settings = DeploySettings(
            model_repository=str(repository),
            results_dir=str(tmp_path / "results"),
            host="127.0.0.1",
            **dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0),
            stop_timeout=8.0,
            job_folder=str(tmp_path / name),
            promote=promote,
            **more,
        )
        (tmp_path / name).mkdir(exist_ok=True)
        folder = tmp_path / f"{name}-{len(started)}"
        folder.mkdir()
        started.append(RunningStep(settings, folder))
        return started[-1]

    yield start_one
    for step in started:
        step.close()


def shown(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def job_of(path: Path) -> str:
    return shown(path).get("job", {}).get("folder", "")


def test_a_candidate_takes_the_place_of_the_published_server_after_go(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = start("older", None)
    older.wait_until_ready()
    candidate = start("newer", "after_gate", restarts=1)
    file, published = tmp_path / "results" / CANDIDATE, tmp_path / "results" / "ready.json"
    wait_for(lambda: file.exists() or candidate.finished(), 180, candidate.said)
    assert shown(file)["candidate"] is True
    assert shown(tmp_path / "newer" / "ready.json")["candidate"] is True
    assert job_of(published) == str(tmp_path / "older")

    settings = EvaluateSettings(
        str(file),
        str(tmp_path),
        "standin",
        str(tmp_path),
        benchmark=BenchmarkSettings(),
        server_job_folder=str(tmp_path / "newer"),
        published_as=str(published),
    )
    for verdict in ("NO-GO", "INCONCLUSIVE"):
        promote(settings, verdict)
    assert not (tmp_path / "newer" / "promotion.json").exists()
    http = shown(file)["http"]
    promote(settings, "GO")
    assert f"published: {published}" in capsys.readouterr().out
    assert (job_of(published), shown(published)["http"]) == (str(tmp_path / "newer"), http)
    wait_for(lambda: not file.exists(), 30, candidate.said)
    assert "candidate" not in shown(tmp_path / "newer" / "ready.json")
    assert not older.finished()
    assert older.stop() == 0
    assert job_of(published) == str(tmp_path / "newer")

    (server,) = [pid for pid, words in candidate.survivors() if "/tritonserver" in words.split()[0]]
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: shown(published).get("pid") not in (None, server), 180, candidate.said)
    assert job_of(published) == str(tmp_path / "newer")
    assert not file.exists()
    assert candidate.stop() == 0
    assert not published.exists()


def test_a_candidate_that_is_stopped_was_never_published(start: Start, tmp_path: Path) -> None:
    candidate = start("newer", "after_gate")
    file = tmp_path / "results" / CANDIDATE
    wait_for(lambda: file.exists() or candidate.finished(), 180, candidate.said)
    second = start("second", "after_gate")
    assert second.wait() == 1
    assert "another server is alive with this results_dir" in second.err
    assert candidate.stop() == 0, candidate.said()
    assert list((tmp_path / "results").iterdir()) == []


def test_a_promoted_server_that_was_killed_comes_up_published(start: Start, tmp_path: Path) -> None:
    published = tmp_path / "results" / "ready.json"
    first = start("newer", "after_gate")
    wait_for(lambda: (published.parent / CANDIDATE).exists() or first.finished(), 180, first.said)
    request_publication(tmp_path / "newer")  # and whoever asked is gone
    wait_for(published.exists, 60, first.said)
    first.process.kill()
    for pid, _ in first.survivors():
        os.kill(pid, signal.SIGKILL)
    killed = shown(published)["pid"]
    again = start("newer", "after_gate")
    wait_for(
        lambda: shown(published).get("pid", killed) != killed or again.finished(), 180, again.said
    )
    assert job_of(published) == str(tmp_path / "newer")
    assert not (published.parent / CANDIDATE).exists()
