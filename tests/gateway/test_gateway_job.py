"""A gateway in a job of its own: its address, and how it lives, dies and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.config.gateway import DeployedGateway
from tests.gateway.processes import RunningGateway, gateway_job
from tests.http_requests import is_served, receive
from tests.processes import wait_for
from tests.server.processes import RunningStep

needs_server = pytest.mark.usefixtures("tritonserver")


def results(shared_server: RunningStep) -> Path:
    return Path(shared_server.settings.results_dir)


def ready_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results" / "ready.json").read_text())


def complete(started: RunningGateway, tokens: int = 3) -> str:
    body = {
        "model": "gpt",
        "prompt": "Once",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return receive(f"{started.facts['openai']}/completions", body)["choices"][0]["text"]


def cache_use(started: RunningGateway) -> float | None:
    return receive(f"{started.address}/servers")["servers"][0]["cache_use"]


def child_of(started: RunningGateway) -> int:
    pid = started.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def answers(started: RunningGateway) -> bool:
    return is_served(f"{started.address}/ready")


@needs_server
def test_a_gateway_that_is_killed_comes_back_at_the_same_address(
    shared_server: RunningStep, tmp_path: Path
) -> None:
    with gateway_job(tmp_path, results(shared_server), restarts=1) as started:
        started.wait_until_ready()
        assert ready_of(tmp_path).items() >= started.facts.items()
        assert started.facts["models"] == ["gpt", "plain", "t5"]
        assert ready_of(tmp_path)["job"]["folder"] == str(tmp_path)
        text, child = complete(started), child_of(started)
        wait_for(lambda: cache_use(started) == 0.0, 60)  # None before somebody has looked
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{child}").exists() and answers(started))
        assert complete(started) == text
        assert "restart 1 of 1 of the gateway" in started.out
        os.kill(child_of(started), signal.SIGKILL)
        assert started.process.wait(60) == 1
        assert "was killed by SIGKILL" in started.err
        assert not (tmp_path / "results" / "ready.json").exists()


@needs_server
def test_it_ends_in_order_and_its_servers_go_on(shared_server: RunningStep, tmp_path: Path) -> None:
    with gateway_job(tmp_path, results(shared_server)) as started:
        started.wait_until_ready()
        with gateway_job(tmp_path, results(shared_server)) as second:
            assert second.process.wait(60) == 1
            assert "another gateway is alive with this results_dir" in second.err
            assert "change gateway.run.results_dir, or stop that gateway first" in second.err
        assert complete(started)
        assert started.stop() == 0, started.err
        assert "gateway: draining: 0 requests are running" in started.out
        assert not (tmp_path / "results" / "ready.json").exists()
        assert not answers(started)
    assert not shared_server.finished()


def test_a_port_in_use_is_found_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = DeployedGateway(port=port)
        with gateway_job(tmp_path, tmp_path / "servers", gateway=wanted) as started:
            assert started.process.wait(60) == 1
            assert f"got {port}; change gateway.port (0: a free one)" in started.err


def test_servers_that_do_not_come_are_named(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    with gateway_job(tmp_path, tmp_path / "servers", ready_timeout=0.5, restarts=3) as started:
        assert started.process.wait(60) == 1
        assert "servers has no ready.json or ready-[0-9]*.json" in started.err
        assert "restart" not in started.out


@needs_server
def test_it_ends_without_servers(shared_server: RunningStep, tmp_path: Path) -> None:
    places = tmp_path / "servers"
    places.mkdir()
    (places / "ready.json").symlink_to(shared_server.settings.ready_file)
    with gateway_job(tmp_path, places, idle_timeout=1.0) as started:
        started.wait_until_ready()
        assert complete(started)
        (places / "ready.json").unlink()
        assert started.process.wait(60) == 0, started.err
        assert "stopping the gateway: no server is left (deploy.idle_timeout)" in started.out


def test_it_may_be_stopped_while_it_waits_for_its_servers(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    with gateway_job(tmp_path, tmp_path / "servers") as started:
        wait_for(lambda: (tmp_path / "gateway.yaml").exists())
        assert started.stop() == 0, started.err
