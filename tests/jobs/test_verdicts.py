"""The verdict of an evaluation beside its job, in tables and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.cluster.record import JobRecord, JobState, write_end
from launcher_scripts.jobs.commands import STATUS_COLUMNS, plain_table
from launcher_scripts.jobs.folders import JobEntry
from launcher_scripts.jobs.status import Status, badge
from tests.jobs.conftest import Jobs, Statuses
from tests.jobs.test_folders import make_job

TEXT = "accuracy of lambada is 0.20, below 0.30"
NO_GO = {
    "verdict": "NO-GO",
    "exit_code": 1,
    "reasons": [{"level": "fail", "text": TEXT}, {"level": "pass", "text": "no failures"}],
    "date": "1970-01-01T00:16:40+00:00",  # 1000 s
}


def evaluations(results: Path, *submitted: float) -> list[Path]:
    return [make_job(results, "evaluate", run, submitted=at) for run, at in enumerate(submitted, 1)]


def decide(folder: Path, **values: Any) -> Path:
    path = folder.parents[1] / "verdict.json"
    path.write_text(json.dumps({**NO_GO, **values}))
    return path


def badges(folders: list[Path]) -> list[str | None]:
    found = [badge(folder, JobRecord.read(folder)) for folder in folders]
    return [None if each is None else each.text() for each in found]


def test_a_verdict_is_of_the_last_run_before_it(tmp_path: Path) -> None:
    folders = evaluations(tmp_path, 10.0, 1000.4, 1200.0)
    assert badges(folders) == [None] * 3
    decide(folders[0])
    assert badges(folders) == [None, f"NO-GO: {TEXT}", None]
    decide(folders[0], verdict="GO", reasons=[])
    assert badges(folders) == [None, "GO", None]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"date": "today"}', '{"date": "1970-01-01T00:16:40+00:00"}']
)
def test_a_file_that_is_no_verdict_is_no_reason_to_say_nothing_of_the_job(
    tmp_path: Path, text: str
) -> None:
    (folder,) = evaluations(tmp_path, 10.0)
    decide(folder).write_text(text)
    assert badges([folder]) == [None]


def test_only_evaluations_have_one(tmp_path: Path) -> None:
    folder = make_job(tmp_path, "deploy", 1)
    decide(folder)
    assert badges([folder]) == [None]


def test_status_shows_it(jobs: Jobs, statuses: Statuses, tmp_path: Path) -> None:
    (folder,) = evaluations(tmp_path / "the results", 10.0)
    path = decide(folder)
    write_end(folder, "101", JobState("FAILED", 1))
    head, line = jobs("status", "evaluate_tiny").stdout.splitlines()
    assert line[head.index("VERDICT") :] == f"NO-GO: {TEXT}"
    (said,) = statuses("evaluate_tiny")
    assert said["verdict"] == {"verdict": "NO-GO", "reason": TEXT, "file": str(path)}


def test_a_server_that_is_held_back_is_not_ready(tmp_path: Path) -> None:
    server = JobEntry.read(make_job(tmp_path, "deploy", 1, ready_file="/r/ready.json"))
    ready = {"http": "n1:8000", "candidate": True}
    status = Status(server, "101", JobState("RUNNING"), ready, True)
    assert (status.word, status.exit_code) == ("CANDIDATE", 3)
    assert not status.to_json()["ready"]
    assert "CANDIDATE" in plain_table([status], STATUS_COLUMNS)
    published = Status(server, "101", JobState("RUNNING"), {"http": "n1:8000"}, True)
    assert (published.word, published.exit_code) == ("READY", 0)
