"""Status files of the backend and answers of Triton, as the server's watch reads them."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.server.health import ModelStatus, TritonClient, failures, read_statuses
from launcher_scripts.server.ports import PORT_NAMES, ports_in_use, reserved_ports


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
