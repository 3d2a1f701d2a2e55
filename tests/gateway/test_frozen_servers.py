"""A gateway of its own before a server that freezes: its streams end with an error, and go on
elsewhere afterwards. The server has another address, as on another node."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.gateway.processes import gateway
from tests.http_requests import send, stream
from tests.processes import wait_for
from tests.server.processes import RunningStep, running
from tests.server.repositories import export, text_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]
BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
ROWS = 3  # those after the first one share a stream


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStep]:
    """A server of two ranks."""
    folder = tmp_path_factory.mktemp("served")
    models = export(folder, text_config(max_positions=4096), tp=2, decoupled=True)
    with running(folder / "job", models.model_repository, host="127.0.0.2", restarts=3) as step:
        step.wait_until_ready()
        yield step


@pytest.fixture(scope="module")
def before(served: RunningStep, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the gateway before it."""
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(folder, "--ready", str(served.settings.ready_file)) as started:
        yield urlsplit(started.address).netloc
        assert started.stop() == 0, started.err


def answers(address: str) -> bool:
    """Return whether a request is served; a server that has failed is ready until it is stopped."""
    body = {**BODY, "max_tokens": 1, "stream": False}
    return send(f"{address}/v1/completions", body).status_code == 200


def frozen(served: RunningStep, which: str) -> set[int]:
    """Suspend one process of the server, or all of them: then only the gateway can notice."""
    ready = served.ready
    if which == "all":
        return served.suspend()
    pids = {"tritonserver": ready["pid"]} | {f"rank {r['rank']}": r["pid"] for r in ready["ranks"]}
    os.kill(pids[which], signal.SIGSTOP)
    return {pids[which]}


@pytest.mark.parametrize("which", ["rank 0", "rank 1", "tritonserver", "all"])
def test_streams_of_a_frozen_server_end_with_an_error(
    served: RunningStep, before: str, which: str
) -> None:
    wait_for(lambda: answers(before), said=served.said)
    with ExitStack() as stack:
        responses = [
            stack.enter_context(stream(f"{before}/v1/completions", BODY)) for _ in range(ROWS)
        ]
        suspended = frozen(served, which)
        for response in responses:
            *_, error, done, end = "".join(response).split("\n\n")
            assert (
                json.loads(error.strip().removeprefix("data: "))["error"]["code"] == "unavailable"
            )
            assert (done, end) == ("data: [DONE]", "")
    if which == "all":
        for pid in suspended:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: answers(before), said=served.said)
