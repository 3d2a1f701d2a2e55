"""Status files of the backend and answers of Triton, as the server's watch reads them."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.server.addresses import PORT_NAMES, ports_in_use, reserved_ports
from launcher_scripts.server.health import (
    IdleDetector,
    ModelStatus,
    TritonClient,
    failures,
    read_statuses,
)
from tests.processes import wait_for


def write(folder: Path, model: str, value: Any) -> None:
    (folder / f"{model}.json").write_text(json.dumps(value))


def test_statuses_and_failures(tmp_path: Path) -> None:
    rank = {"rank": 0, "pid": 12, "host": "here", "device": "cpu"}
    write(tmp_path, "b", {"state": "failed", "reason": "no weights", "ranks": []})
    write(tmp_path, "a", {"state": "ready", "ranks": [rank], "versions": {"torch": "2"}})
    (tmp_path / "c.json.partial").write_text("{")
    statuses = read_statuses(tmp_path)
    assert statuses == [
        ModelStatus("a", "ready", None, (rank,), {"torch": "2"}),
        ModelStatus("b", "failed", "no weights"),
    ]
    assert failures(statuses) == ["model b failed: no weights"]


@pytest.mark.parametrize("value", [[], {"reason": None}, "ready"])
def test_a_status_file_that_is_none(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "a", value)
    with pytest.raises(ServerError, match=r"cannot read the backend's status file .*a\.json"):
        read_statuses(tmp_path)


def test_a_server_that_is_not_there_is_not_ready() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = TritonClient(f"127.0.0.1:{bound.getsockname()[1]}")
        assert not client.ready()
        with pytest.raises(ServerError, match="does not answer GET /v2"):
            client.version()


def settings(**ports: int) -> DeploySettings:
    names = ("http_port", "grpc_port", "metrics_port")
    values = {name: ports.get(name, 0) for name in names}
    return DeploySettings("repository", "results", host="127.0.0.1", **values)


def test_reserved_ports_can_be_listened_on_and_are_given_to_nobody_else() -> None:
    with reserved_ports(settings()) as first, reserved_ports(settings()) as second:
        assert "gateway" not in first
        numbers = [ports[name] for ports in (first, second) for name in PORT_NAMES]
        assert len(set(numbers)) == 6
        with socket.create_server(("127.0.0.1", first["http"])):
            assert ports_in_use(settings().hosts, first) == {"http": first["http"]}


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machines(host: str) -> None:
    said = rf"cannot be opened: .*; got '?{host}'?; change deploy\.server\.host"
    with (
        pytest.raises(ServerError, match=said),
        reserved_ports(replace(settings(), host=host)),
    ):
        pass


class _Metrics(BaseHTTPRequestHandler):
    text = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def test_a_server_is_idle_without_requests_alone() -> None:
    """Neither while one runs, nor when it ends, nor when nobody can ask."""
    one = 'nv_inference_request_success{model="text",version="1"} '
    running = 'launcher_num_requests_running{model_name="gpt"} '
    server = HTTPServer(("127.0.0.1", 0), _Metrics)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        _Metrics.text = f"{one}3\n{running}1\n"
        is_idle = IdleDetector(f"127.0.0.1:{server.server_port}", 0.1)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert not is_idle()
        _Metrics.text = f"{one}4\n{running}0\n"
        wait_for(is_idle)
        _Metrics.text = f"{one}5\n{running}0\n"  # it came and went between two looks
        wait_for(lambda: not is_idle())
        wait_for(is_idle)
    finally:
        server.shutdown()
        server.server_close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    is_idle = IdleDetector(address, 0.001)
    assert not any(is_idle() for _ in range(3))
