"""Where a server listens that nobody has told where to."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from launcher_scripts.config.gateway import DeployedGateway, GatewayJobSettings
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.server import addresses as addresses_module
from launcher_scripts.server.addresses import addresses, openai_url, with_node_address

GATEWAY = DeployedGateway(port=8080)
UNSAID = DeploySettings("repository", "results", host=None)


def names(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """What the node's name stands for; each of them is an address of this machine."""
    entries: list[Any] = [(socket.AF_INET, None, 0, "", (address, 0)) for address in found]
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: entries)
    monkeypatch.setattr(addresses_module, "_can_listen", lambda _: True)


def test_the_address_of_the_nodes_name_is_given_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "127.0.1.1", "fe80::1%eth0", "10.1.2.3", "10.1.2.4")
    found = with_node_address(UNSAID)
    assert (found.host, found.public_host) == ("10.1.2.3", "node7")
    assert set(found.hosts.values()) == {"10.1.2.3"}
    public = with_node_address(DeploySettings("r", "r", host=None, public_host="proxy"))
    assert (public.host, public.public_host) == ("10.1.2.3", "proxy")


def test_a_name_that_only_this_node_knows_gives_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "127.0.1.1", "::1")
    monkeypatch.setattr(addresses_module, "_way_out", lambda: ["192.168.5.6"])
    found = with_node_address(UNSAID)
    assert (found.host, found.public_host) == ("192.168.5.6", None)
    monkeypatch.setattr(addresses_module, "_way_out", list)
    assert with_node_address(UNSAID).host == "127.0.0.1"


def test_an_address_that_was_said_stays() -> None:
    told = DeploySettings("repository", "results", host="0.0.0.0")
    assert with_node_address(told) is told


def test_this_machine_has_an_address_to_listen_on() -> None:
    host = with_node_address(UNSAID).host
    assert host is not None
    assert host not in ("0.0.0.0", "::")
    with socket.create_server((host, 0)):
        pass


def test_the_address_of_settings_that_say_none_is_this_machine() -> None:
    assert DeploySettings("repository", "results").hosts["http"] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3"])
def test_a_gateways_job_is_announced_as_the_gateway_beside_a_server_is(host: str) -> None:
    """A public name stands for what others reach, so it is never that of a loopback address."""
    server = DeploySettings("r", "r", host=host, public_host="proxy", gateway=GATEWAY)
    job = GatewayJobSettings(("r",), "r", GATEWAY, host=host, public_host="proxy")
    told = "127.0.0.1" if host == "127.0.0.1" else "proxy"
    assert openai_url(job, host, 8080) == openai_url(server, host, 8080) == f"http://{told}:8080/v1"
    assert addresses(server, dict.fromkeys(server.hosts, 8000))["grpc"] == f"{told}:8000"


def test_what_listens_everywhere_is_announced_by_a_name_that_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = GatewayJobSettings(("r",), "r", GATEWAY, host="0.0.0.0")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with socket.create_server(("0.0.0.0", 0)) as opened:
        port = opened.getsockname()[1]
        assert openai_url(job, "0.0.0.0", port) == f"http://localhost:{port}/v1"
    assert openai_url(job, "0.0.0.0", port) == f"http://127.0.0.1:{port}/v1"
