"""A server with the gateway that the deploy stage puts beside it, and how that lives and dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.jobs.status import query_load
from tests.http_requests import is_served, send, stream
from tests.processes import wait_for
from tests.server.processes import RunningStep, running
from tests.server.repositories import TOKENIZERS, export, text_config

pytestmark = pytest.mark.usefixtures("tritonserver")
TOKENIZER = load_tokenizer(TOKENIZERS / "gpt2bpe")
KEY = "sk-of-the-tests"
LONG = text_config(max_positions=4096)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = export(tmp_path_factory.mktemp("models"), LONG, decoupled=True)
    return settings.model_repository


def ask(openai: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of the gateway's answer."""
    response = send(f"{urlsplit(openai).netloc}{path}", body, key=KEY)
    return response.status_code, response.json()


def gateway_pid(step: RunningStep) -> int:
    (pid,) = [pid for pid, command in step.survivors() if "start_gateway" in command]
    return pid


def answers(openai: str) -> bool:
    return is_served(f"{urlsplit(openai).netloc}/ready")


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStep]:
    """A server whose gateway wants a key, and may be started again."""
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys"
    keys.write_text(f"tests={KEY}\n")
    keys.chmod(0o600)
    wanted = DeployedGateway(port=0, api_keys=str(keys))
    with running(folder / "job", repository, gateway=wanted, restarts=3) as step:
        step.wait_until_ready()
        yield step
        assert step.stop() == 0, step.err
        assert step.survivors() == []
        assert KEY not in step.out
        assert not (step.settings.ready_file.parent / "credentials").exists()
        assert not step.settings.ready_file.exists()


def ready_file(step: RunningStep) -> dict[str, Any]:
    return json.loads(step.settings.ready_file.read_text())


def test_the_command_of_the_ready_line_works_when_pasted(served: RunningStep) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not there")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", ready_file(served)["openai"])
    wait_for(lambda: "\ntry: curl" in served.out)
    (command,) = re.findall(r"^try: (curl .*)$", served.out, re.MULTILINE)
    environment = {**os.environ, "OPENAI_API_KEY": KEY}
    silent = command.replace("curl", "curl -sS", 1)
    wait_for(lambda: answers(ready_file(served)["openai"]))
    done = subprocess.run(
        ["bash", "-c", silent], env=environment, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode("Once upon a time"))
    assert 1 <= answer["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("rows", [1, 3])
def test_usage_has_the_cached_tokens_of_the_engine(served: RunningStep, rows: int) -> None:
    openai = ready_file(served)["openai"]
    wait_for(lambda: answers(openai))
    prompt = [number % 90 + 9 for number in range(rows, 70 + rows)]
    counts = []
    for _ in range(2):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "n": rows, "seed": 1}
        status, answer = ask(openai, "/v1/completions", body)
        assert status == 200
        counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts == [0, 64]


def test_a_gateway_that_is_killed_comes_back_and_the_server_stays(served: RunningStep) -> None:
    ready, first = ready_file(served), gateway_pid(served)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: first not in dict(served.survivors()) and answers(ready["openai"]))
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 3}
    assert ask(ready["openai"], "/v1/completions", body)[0] == 200
    now = ready_file(served)
    assert (now["pid"], now["openai"]) == (ready["pid"], ready["openai"])
    assert f"the gateway (process {first}) was killed by SIGKILL" in served.out
    assert re.search("restart [123] of 3 of the gateway", served.out)


def test_a_frozen_gateway_is_replaced(served: RunningStep) -> None:
    wait_for(lambda: served.settings.ready_file.exists())
    openai = ready_file(served)["openai"]
    wait_for(lambda: answers(openai))
    first = gateway_pid(served)
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: first not in dict(served.survivors()) and answers(openai))
    said = f"the gateway (process {first}) does not answer /health and is suspended: killed"
    assert said in served.out


@pytest.mark.parametrize("frozen", ["tritonserver", pytest.param("stub", marks=pytest.mark.slow)])
def test_a_frozen_server_ends_its_streams_with_an_error(served: RunningStep, frozen: str) -> None:
    """They are not cut, and the server is started again."""
    wait_for(lambda: served.settings.ready_file.exists())
    ready = ready_file(served)
    wait_for(lambda: answers(ready["openai"]))
    pid = int(ready["pid"] if frozen == "tritonserver" else ready["ranks"][0]["pid"])
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
    with stream(f"{ready['openai']}/completions", {**body, "stream": True}, key=KEY) as texts:
        os.kill(pid, signal.SIGSTOP)
        *_, error, done, end = "".join(texts).split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert (done, end) == ("data: [DONE]", "")
    wait_for(
        lambda: served.settings.ready_file.exists() and ready_file(served)["pid"] != ready["pid"]
    )
    assert pid not in dict(served.survivors())


@pytest.mark.slow
def test_without_restarts_the_death_of_the_gateway_is_the_servers(
    repository: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "job", repository, gateway=DeployedGateway(port=0)) as step:
        step.wait_until_ready()
        pid = gateway_pid(step)
        os.kill(pid, signal.SIGKILL)
        assert step.wait() == 1
        assert f"the gateway (process {pid}) was killed by SIGKILL" in step.err
        assert step.survivors() == []
        assert not step.settings.ready_file.exists()


def test_what_is_running_is_answered_before_the_end(repository: Path, tmp_path: Path) -> None:
    gateway = DeployedGateway(port=0)
    with running(tmp_path / "job", repository, gateway=gateway, stop_timeout=60.0) as step:
        openai = step.wait_until_ready()["openai"]
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 800, "ignore_eos": True}
        found: list[tuple[int, Any]] = []
        asking = threading.Thread(
            target=lambda: found.append(ask(openai, "/v1/completions", body)), daemon=True
        )
        asking.start()
        metrics = json.loads(step.settings.ready_file.read_text())["metrics"]
        wait_for(lambda: (query_load(metrics).running or 0) > 0)
        assert step.stop() == 0, step.err
        asking.join(10)
        ((status, answer),) = found
        assert (status, answer["usage"]["completion_tokens"]) == (200, 800)
        assert "gateway: draining: 1 requests are running" in step.out
        assert step.survivors() == []


def test_a_port_in_use_is_found_before_models_are_loaded(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(tmp_path / "job", repository, gateway=DeployedGateway(port=port)) as step:
            assert step.wait() == 1
            assert f"got {port}; change deploy.gateway.port (0: a free one)" in step.err
            assert "starting " not in step.out


def test_a_gateway_that_cannot_start_is_the_end_of_the_server(
    repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    wanted = DeployedGateway(port=0, chat_template=str(tmp_path / "bad.jinja"))
    with running(tmp_path / "job", repository, gateway=wanted, restarts=3) as step:
        assert step.wait() == 1
        assert re.search(r"the gateway \(process \d+\) ended with exit code 1", step.err)
        assert "bad.jinja" in step.err or "template" in step.err
        assert "restart" not in step.out
        assert step.survivors() == []
