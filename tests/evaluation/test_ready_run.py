"""A ready file counts only when it is of the run of the server that is meant."""

import json

import pytest

from launcher_scripts.errors import ServerError
from launcher_scripts.evaluation.ready import connect
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
            connect(settings)


def test_the_meant_run_and_any_run_are_taken(tmp_path):
    with FakeServer() as server:
        ready = {"http": server.address, "models": ["counting"], "job": {"folder": MEANT}}
        (tmp_path / "ready.json").write_text(json.dumps(ready))
        for folder in (MEANT, None):
            client, content = connect(evaluate_settings(tmp_path, server_job_folder=folder))
            with client:
                assert content == ready
