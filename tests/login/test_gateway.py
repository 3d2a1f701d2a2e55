"""The gateway beside a server, as far as the login side looks at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.errors import ConfigError
from launcher_scripts.settings import DeploySettings
from stages.plan import make_plan
from tests.login.conftest import Compose
from tests.login.test_golden import BASE

KEY = "deploy.gateway"
DEPLOY = (*BASE, "stages=[export,deploy]")


def settings(hydra_config: Compose, *given: str) -> DeploySettings:
    plan = make_plan(hydra_config(*DEPLOY, *given))
    found = plan.stages[1].settings
    assert isinstance(found, DeploySettings)
    return found


def test_without_a_port_there_is_no_gateway(hydra_config: Compose) -> None:
    assert settings(hydra_config, f"{KEY}.max_running=3").gateway is None


@pytest.mark.parametrize("cluster", ["bcm", "bcp", "interactive"])
def test_a_port_makes_one_on_every_cluster(hydra_config: Compose, cluster: str) -> None:
    found = settings(hydra_config, f"cluster_type={cluster}", f"{KEY}.port=0").gateway
    assert found is not None
    assert (found.port, found.host) == (0, None)


def test_a_wrong_port_is_named_with_the_others(hydra_config: Compose) -> None:
    with pytest.raises(ConfigError, match=r"got 70000; choices: null .*change deploy.gateway.port"):
        settings(hydra_config, f"{KEY}.port=70000")
    with pytest.raises(ConfigError, match=r"ports are equal; got .*8001.*deploy.gateway.port"):
        settings(hydra_config, f"{KEY}.port=8001")
    with pytest.raises(ConfigError, match=r"at least 1; got 0; change deploy.gateway.max_running"):
        settings(hydra_config, f"{KEY}.max_running=0")
    with pytest.raises(ConfigError, match=r"needs its key; change deploy.gateway.tls_cert"):
        settings(hydra_config, f"{KEY}.tls_certificate=/c.pem")


def test_files_must_be_there_and_private(hydra_config: Compose, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("somebody=secret-key")
    keys.chmod(0o644)
    given = (*DEPLOY, f"{KEY}.port=0", f"{KEY}.chat_template=/no/template")
    with pytest.raises(ConfigError, match=r"mode 644\): chmod 600; .*deploy.gateway.api_keys"):
        make_plan(hydra_config(*given, f"{KEY}.api_keys={keys}"))
    keys.chmod(0o600)
    plan = make_plan(hydra_config(*given, f"{KEY}.api_keys={keys}", "container=/images/x.sqsh"))
    assert "chat_template of the gateway is not there" in "\n".join(plan.absent)
    preview = plan.preview()
    assert f"mount {tmp_path}:{tmp_path}" in preview
    assert "secret-key" not in preview


def test_files_do_not_depend_on_the_working_directory(
    hydra_config: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings(hydra_config, f"{KEY}.port=0", f"{KEY}.chat_template=chat.jinja").gateway
    assert found is not None
    assert found.chat_template == str(tmp_path / "chat.jinja")


def test_the_gateway_speaks_as_its_server_does(hydra_config: Compose) -> None:
    security = "++deploy.server.security.grpc_tls"
    tls = (f"{security}.certificate=/x.pem", f"{security}.key=/x.pem", f"{KEY}.port=0")
    with pytest.raises(ConfigError, match=r"change deploy.gateway.grpc_tls=\{ca: FILE\}"):
        settings(hydra_config, *tls)
    trusting = settings(hydra_config, *tls, f"++{KEY}.grpc_tls.ca=/ca.pem").gateway
    assert trusting is not None
    made = trusting.settings("/r/ready.json", "n1", 9, 30.0)
    assert (made.server_ca, made.ready, made.host, made.port) == (
        "/ca.pem",
        ("/r/ready.json",),
        "n1",
        9,
    )


def test_replicas_that_share_a_node_need_free_ports(hydra_config: Compose) -> None:
    free = [f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics")]
    shared = (*free, "cluster_type=bcm", "cluster.exclusive=False", "deploy.replicas=2")
    with pytest.raises(ConfigError, match=r"ports of their own.*deploy.gateway.port"):
        settings(hydra_config, *shared, f"{KEY}.port=8080")
    assert settings(hydra_config, *shared, f"{KEY}.port=0").gateway is not None
