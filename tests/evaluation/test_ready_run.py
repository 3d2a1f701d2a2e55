"""A ready file counts only when it is of the run of the server that is meant."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from launcher_scripts.clients.model_client import open_client
from launcher_scripts.common.errors import ServerError
from tests.evaluation.fake_server import FakeServer
from tests.evaluation.test_client import evaluate_settings

MEANT = "/results/jobs/002"


@pytest.mark.parametrize("job", [{}, {"job": {"folder": "/results/jobs/001"}}])
def test_a_leftover_of_an_earlier_run_is_not_taken(tmp_path, job):
    with FakeServer() as server:
        ready = {"http": server.address, "models": ["counting"], **job}
        (tmp_path / "ready.json").write_text(json.dumps(ready))
        settings = evaluate_settings(tmp_path, ready_timeout=0.3, server_job_folder=MEANT)
        with pytest.raises(ServerError, match=rf"is of the server of .*, not of {MEANT}"):
            open_client(settings)


def test_the_meant_run_and_any_run_are_taken(tmp_path):
    with FakeServer() as server:
        ready = {"http": server.address, "models": ["counting"], "job": {"folder": MEANT}}
        (tmp_path / "ready.json").write_text(json.dumps(ready))
        for folder in (MEANT, None):
            client, content = open_client(evaluate_settings(tmp_path, server_job_folder=folder))
            with client:
                assert content == {**ready, "protocol": "http"}


@pytest.mark.parametrize(("seconds", "taken"), [(5, True), (3600, False)])
def test_a_file_that_nobody_renews_is_of_a_killed_server(tmp_path, seconds, taken):
    """Another server may have its port by now, so that something answers there."""
    with FakeServer() as server:
        alive_at = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        ready = {"http": server.address, "models": ["counting"], "alive_at": alive_at.isoformat()}
        (tmp_path / "ready.json").write_text(json.dumps(ready))
        settings = evaluate_settings(tmp_path, ready_timeout=0.3)
        if taken:
            open_client(settings)[0].close()
            return
        with pytest.raises(ServerError, match=r"last renewed 36\d\d s ago: its server was killed"):
            open_client(settings)
