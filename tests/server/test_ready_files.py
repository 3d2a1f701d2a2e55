"""Whose ready file it is that a server finds in its results folder."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import request_publication
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.server import addresses
from launcher_scripts.server.addresses import ReadyFiles

FACTS = {"http": "n1:8000", "job": {"folder": "/jobs/1"}}
OTHERS = {"http": "n2:8000", "job": {"folder": "/jobs/2"}}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(addresses, "_POLL_SECONDS", 0.01)


def files(folder: Path) -> ReadyFiles:
    return ReadyFiles(DeploySettings("repository", str(folder), host="127.0.0.1"))


def shown(folder: Path) -> dict[str, object]:
    return json.loads((folder / "ready.json").read_text())


@contextmanager
def living(others: ReadyFiles) -> Iterator[None]:
    """A server that renews its file all the time."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.02):
            others.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_file_of_a_living_server_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_TIMEOUT_SECONDS", 60.0)
    others = files(tmp_path)
    others.prepare()
    others.write(OTHERS)
    with living(others), pytest.raises(ServerError, match=r"alive .*n2:8000.*results_dir"):
        files(tmp_path).prepare()
    assert shown(tmp_path)["http"] == "n2:8000"


def test_a_server_that_was_ready_first_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_TIMEOUT_SECONDS", 60.0)
    others, ours = files(tmp_path), files(tmp_path)
    for each in (others, ours):
        each.prepare()
    others.write(OTHERS)
    with living(others), pytest.raises(ServerError, match="another server is alive"):
        ours.write(FACTS)
    ours.remove()
    assert shown(tmp_path)["http"] == "n2:8000"


def test_the_file_of_a_killed_server_is_removed_when_it_is_not_renewed(tmp_path: Path) -> None:
    killed, ours = files(tmp_path), files(tmp_path)
    killed.write(OTHERS)
    ours.prepare()
    assert not (tmp_path / "ready.json").exists()
    ours.write(FACTS)
    ours.write({**FACTS, "pid": 3})  # started again
    assert shown(tmp_path)["pid"] == 3


@pytest.mark.parametrize(
    "text", ["old", "[]", '{"alive_at": 3}', '{"alive_at": "2026-99-99"}', '{"http": "n2:8000"}']
)
def test_a_file_that_says_nothing_of_a_life_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    (tmp_path / "ready.json").write_text(text)
    files(tmp_path).prepare()
    assert not (tmp_path / "ready.json").exists()


def test_a_file_of_yesterday_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    text = json.dumps({**OTHERS, "alive_at": yesterday.isoformat()})
    (tmp_path / "ready.json").write_text(text)
    files(tmp_path).prepare()
    assert not (tmp_path / "ready.json").exists()


def candidate(folder: Path) -> ReadyFiles:
    job = folder / "job"
    job.mkdir(exist_ok=True)
    return ReadyFiles(
        DeploySettings(
            "repository",
            str(folder),
            host="127.0.0.1",
            job_folder=str(job),
            promote="after_gate",
        )
    )


def test_an_older_server_that_was_just_renewing_its_file_does_not_take_it_back(
    tmp_path: Path,
) -> None:
    older, ours = files(tmp_path), candidate(tmp_path)
    older.write(OTHERS)
    ours.prepare()
    ours.write(FACTS)
    assert ours.publish() is None
    assert shown(tmp_path)["http"] == "n2:8000"
    late = (tmp_path / "ready.json").read_text()
    request_publication(tmp_path / "job")
    assert ours.publish() == tmp_path / "ready.json"
    assert ours.publish() is None
    assert shown(tmp_path)["http"] == "n1:8000"
    (tmp_path / "ready.json").write_text(late)  # it had read the file before
    ours.renew()
    older.renew()
    older.remove()
    assert shown(tmp_path)["http"] == "n1:8000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "ready.json"]
    third = candidate(tmp_path)
    third.write({**FACTS, "http": "n3:8000"})  # the same job, started again beside us
    ours.renew()
    assert shown(tmp_path)["http"] == "n3:8000"
