"""Secrets, keys and certificates, as far as the login side looks at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import Planner
from tests.login.test_golden import BASE

SECURITY = "deploy.server.security"


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "api_key"])
def test_a_secret_in_a_variable_is_refused_without_its_value(plan: Planner, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} would be written into scripts") as error:
        plan(*BASE, f"+env_vars.{name}=hidden")
    assert "hidden" not in str(error.value)


def test_a_path_to_a_secret_is_none(plan: Planner) -> None:
    path = "+env_vars.AWS_SHARED_CREDENTIALS_FILE=/mount/aws"
    assert "AWS_SHARED_CREDENTIALS_FILE" in plan(*BASE, path).preview()


def test_files_must_be_there_and_private(plan: Planner, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("A=1")
    secrets.chmod(0o644)
    given = (f"{SECURITY}.secrets_file={secrets}", f"++{SECURITY}.grpc_tls.certificate=/no/c.pem")
    with pytest.raises(ConfigError, match=r"mode 644\): chmod 600; .*security.secrets_file"):
        plan(*BASE, *given, f"++{SECURITY}.grpc_tls.key=/no/k.pem")
    secrets.chmod(0o600)
    tls = (*given, f"++{SECURITY}.grpc_tls.key=/no/k.pem", "stages=[export,deploy]")
    made = plan(*BASE, *tls, "container=/images/x.sqsh")
    assert [note.partition(";")[0] for note in made.absent if "grpc_tls" in note] == [
        "grpc_tls.certificate of the server is not there",
        "grpc_tls.key of the server is not there",
    ]
    preview = made.preview()
    assert f"mount {tmp_path}:{tmp_path}" in preview
    assert "A=1" not in preview


def test_a_client_speaks_as_its_server_does(plan: Planner) -> None:
    tls = [f"++{SECURITY}.grpc_tls.{name}=/x.pem" for name in ("certificate", "key")]
    with pytest.raises(ConfigError, match=r"Triton's HTTP has no TLS.*got 'http'; choices: grpc"):
        plan(*BASE, *tls)
    with pytest.raises(ConfigError, match=r"change evaluate.grpc_tls=\{ca: FILE\}"):
        plan(*BASE, *tls, "evaluate.protocol=grpc")
    plan(*BASE, *tls, "evaluate.in_deploy_job=True")
    over_http = (*tls, f"{SECURITY}.http_host=0.0.0.0")
    plan(*BASE, *over_http)
    with pytest.raises(ConfigError, match=r"change evaluate.grpc_tls=\{ca: FILE\}"):
        plan(*BASE, *over_http, "export.triton_deployment.decoupled=True")
    client = ("evaluate.protocol=grpc", "++evaluate.grpc_tls.ca=/ca.pem")
    assert plan(*BASE, *tls, *client).stages[2].settings.grpc_tls.ca == "/ca.pem"


def test_what_a_server_for_others_has_by_default(plan: Planner) -> None:
    for cluster, host, restarts in (("interactive", "127.0.0.1", 0), ("bcm", None, 3)):
        (deploy,) = plan(*BASE, f"cluster_type={cluster}", "stages=[deploy]", "dry_run=True").stages
        assert (deploy.settings.host, deploy.settings.restarts) == (host, restarts)
        told = ("deploy.server.host=0.0.0.0", "deploy.restarts=1")
        told = (*BASE, f"cluster_type={cluster}", "stages=[deploy]", "dry_run=True", *told)
        (deploy,) = plan(*told).stages
        assert (deploy.settings.host, deploy.settings.restarts) == ("0.0.0.0", 1)


def test_some_rows_must_be_allowed_to_wait(plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"at least 1; got 0; change .*max_waiting_rows"):
        plan(*BASE, "deploy.server.max_waiting_rows=0")
