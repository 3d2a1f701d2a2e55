"""Who may do what with a real server: TLS, restricted interfaces, secrets that show up nowhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.clients.connection import channel_arguments
from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.config.gateway import DeployedGateway, GatewaySettings
from launcher_scripts.config.security import (
    ClientTls,
    ServerSecurity,
    ServerTls,
    read_keys,
    read_secrets,
)
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.gateway.service import serve_gateway_settings
from launcher_scripts.server.process import TOKEN_HEADER, Protection, launch_credentials
from tests.http_requests import send
from tests.server.processes import running
from tests.server.test_service import make_repository


def secrets_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secrets"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_secrets_are_lines_of_a_private_file(tmp_path: Path) -> None:
    text = "# S3\nAWS_ACCESS_KEY_ID=a=b\n\nAWS_SECRET_ACCESS_KEY= c d\n"
    assert read_secrets(secrets_file(tmp_path, text)) == {
        "AWS_ACCESS_KEY_ID": "a=b",
        "AWS_SECRET_ACCESS_KEY": " c d",
    }


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("A=hidden", 0o640, r"mode 640\): chmod 600"),
        ("A=hidden\nhidden", 0o600, "line 2 is not NAME=value"),
        ("A-B=hidden", 0o600, "line 1 is not NAME=value"),
        ("A=hidden\nB=", 0o600, "line 2: B has no value"),
        ("A=hidden\nB=  \t", 0o600, "line 2: B has no value"),
        ("A=hidden\nA=hidden2", 0o600, "line 2: A is there for a second time"),
    ],
)
def test_what_is_no_secrets_file_is_refused_without_its_values(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    with pytest.raises(ServerError, match=says) as error:
        read_secrets(secrets_file(tmp_path, text, mode))
    assert "hidden" not in str(error.value)
    with pytest.raises(ServerError, match="FileNotFoundError"):
        read_secrets(tmp_path / "absent")


def test_a_file_of_keys_without_a_key_opens_no_gateway(tmp_path: Path) -> None:
    assert read_keys(secrets_file(tmp_path, "alice= sk-1 \n"), "--api-keys") == {"alice": "sk-1"}
    for text, says in (("# nobody\n", "holds no key"), ("alice=sk-1\ncarol=\n", "line 2: carol")):
        settings = GatewaySettings(("ready.json",), api_keys=str(secrets_file(tmp_path, text)))
        with pytest.raises(ServerError, match=rf"{says}.*--api-keys"):
            serve_gateway_settings(settings)


def test_unknown_interfaces_and_half_certificates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'admin'; choices: health, .*restricted_apis"):
        ServerSecurity(restricted_apis=("admin",))
    with pytest.raises(ConfigError, match="a certificate needs its key"):
        ClientTls("ca.pem", certificate="me.pem")


def protection(security: ServerSecurity, **more: Any) -> Protection:
    settings = DeploySettings("repository", "results", security=security, **more)
    return Protection(settings, Path("/run"), Path("/c d.pem") if more else None)


def test_arguments_and_addresses() -> None:
    plain = protection(ServerSecurity(restricted_apis=()))
    assert plain.arguments() == ["--model-control-mode=none"]
    assert plain.client_address("node1:8001") == "node1:8001"
    tls = ServerSecurity(grpc_tls=ServerTls("c.pem", "k.pem"))
    arguments = protection(tls).arguments()
    assert "--grpc-use-ssl=true" in arguments
    assert tls.hosts("0.0.0.0") == {"http": "127.0.0.1", "grpc": "0.0.0.0", "metrics": "127.0.0.1"}
    assert ServerSecurity().hosts("::")["http"] == "::"
    first, second = (protection(ServerSecurity()).arguments()[1] for _ in range(2))
    assert first.startswith(f"--http-restricted-api=shared-memory,trace,logging:{TOKEN_HEADER}=")
    assert first != second


def test_a_closed_server_opens_one_port_to_those_with_its_credentials() -> None:
    closed = protection(ServerSecurity(), closed=True)
    assert closed.arguments() == [
        "--model-control-mode=none",
        "--http-address=unix:/run/http.sock",
        "--http-port=1",
        "--metrics-address=unix:/run/metrics.sock",
        "--metrics-port=2",
        "--grpc-use-ssl-mutual=true",
        "--grpc-server-cert=/c d.pem",
        "--grpc-server-key=/c d.pem",
        "--grpc-root-cert=/c d.pem",
    ]
    assert closed.client_address("node1:8001") == "node1:8001#/c%20d.pem"
    with pytest.raises(ConfigError, match=r"cannot be read: only its owner .*got '/c d.pem'"):
        channel_arguments("node1:8001#/c%20d.pem", None)


def test_credentials_are_new_private_and_gone_at_the_end(tmp_path: Path) -> None:
    settings = DeploySettings("repository", str(tmp_path / "results"), closed=True)
    with launch_credentials(settings) as first, launch_credentials(settings) as second:
        assert first is not None and second is not None
        assert first.read_bytes() != second.read_bytes()
        assert first.stat().st_mode & 0o777 == 0o600
        assert first.parent.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "results").iterdir()) == []
    with launch_credentials(DeploySettings("repository", str(tmp_path))) as none:
        assert none is None


def test_settings_that_would_open_a_closed_server_are_refused() -> None:
    half = ServerSecurity(http_host="0.0.0.0", grpc_tls=ServerTls("c.pem", "k.pem"))
    with pytest.raises(ConfigError, match=r"client_ca(.|\n)*http_host"):
        DeploySettings("repository", "results", security=half, closed=True)
    inference = ServerSecurity(restricted_apis=("trace", "inference"))
    with pytest.raises(ConfigError, match=r"got \['inference'\].*restricted_apis.*api_keys"):
        DeploySettings("repository", "results", security=inference, gateway=DeployedGateway())
    keyed = DeployedGateway(port=0, api_keys="keys")
    DeploySettings("repository", "results", security=inference, gateway=keyed)
    with pytest.raises(ConfigError, match="client_ca"):
        DeploySettings("repository", "results", security=half, gateway=keyed)


def certificates(folder: Path) -> dict[str, str]:
    """A certificate authority, and a server's and a client's certificates of it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make certificates with")

    def run(*argv: str) -> None:
        subprocess.run([openssl, *argv], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    run(*new, "-x509", "-subj", "/CN=test ca", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
        run(*signed, "-CAcreateserial", "-extfile", "names", "-out", f"{name}.pem")
        (folder / f"{name}.key").chmod(0o600)
    return {path.name: str(path) for path in folder.iterdir()}


def status(address: str, method: str, path: str, **headers: str) -> int:
    return send(f"{address}{path}", {}, method=method, headers=headers).status_code


@pytest.mark.usefixtures("tritonserver")
def test_a_protected_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from launcher_scripts.clients.__main__ import main as clients
    from launcher_scripts.clients.remote import RemoteServer

    pem = certificates(tmp_path)
    secret = "a-secret-of-the-cloud"
    file = secrets_file(tmp_path, f"AWS_SECRET_ACCESS_KEY={secret}\nLAUNCHER_ADMIN_TOKEN=open-up\n")
    security = ServerSecurity(
        grpc_tls=ServerTls(pem["server.pem"], pem["server.key"], pem["ca.pem"]),
        secrets_file=str(file),
    )
    # The model is ready only when it has been given the secret.
    checks = f"assert os.environ['AWS_SECRET_ACCESS_KEY'] == {secret!r}; self.status('ready')"
    repository = make_repository(tmp_path, checks)
    with running(tmp_path / "job", repository, security=security) as step:
        ready = step.wait_until_ready()
        mutual = ClientTls(pem["ca.pem"], pem["client.pem"], pem["client.key"])
        for tls, answers in ((mutual, True), (ClientTls(pem["ca.pem"]), False), (None, False)):
            with RemoteServer(ready["grpc"], protocol="grpc", request_timeout=3, tls=tls) as server:
                assert server.is_ready("standin") is answers
        files = ["--ca", pem["ca.pem"], "--certificate", pem["client.pem"]]
        files += ["--key", pem["client.key"], "-i", "grpc", "-u", ready["grpc"]]
        assert clients(["identity_test", *files, "-m", "nobody"]) == 1
        assert "no such model; got 'nobody'; choices: standin" in capsys.readouterr().err
        address = ready["http"]
        assert address.startswith("127.0.0.1:")
        assert status(address, "GET", "/v2/health/ready") == 200
        assert status(address, "POST", "/v2/repository/models/standin/unload") >= 400
        for path in ("/v2/systemsharedmemory/status", "/v2/trace/setting", "/v2/logging"):
            assert status(address, "GET", path) == 403
            assert status(address, "GET", path, **{TOKEN_HEADER: "guess"}) == 403
            assert status(address, "GET", path, **{TOKEN_HEADER: "open-up"}) == 200
        assert status(address, "GET", "/v2/health/ready") == 200
        assert step.stop() == 0, step.err
        written = step.out + step.err + (tmp_path / "job" / "settings.yaml").read_text()
        assert f"{TOKEN_HEADER}=***" in written
        assert secret not in written
        assert "open-up" not in written
