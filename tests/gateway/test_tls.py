"""A gateway that speaks TLS on both sides."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from launcher_scripts.config.security import ServerSecurity, ServerTls
from tests.gateway.processes import gateway
from tests.server.processes import running
from tests.server.repositories import export, text_config
from tests.server.test_protection import certificates


@pytest.mark.usefixtures("tritonserver")
def test_everything_may_be_encrypted(tmp_path: Path) -> None:
    """HTTPS before the gateway, and gRPC with TLS and certificates of both behind it."""
    pem = certificates(tmp_path)
    settings = export(tmp_path, text_config(), name="tiny", decoupled=True)
    security = ServerSecurity(
        grpc_tls=ServerTls(pem["server.pem"], pem["server.key"], pem["ca.pem"])
    )
    with running(tmp_path / "job", settings.model_repository, security=security) as step:
        step.wait_until_ready()
        arguments = ["--ready", str(step.settings.ready_file)]
        arguments += ["--tls-certificate", pem["server.pem"], "--tls-key", pem["server.key"]]
        arguments += ["--server-ca", pem["ca.pem"], "--server-certificate", pem["client.pem"]]
        with gateway(tmp_path / "run", *arguments, "--server-key", pem["client.key"]) as started:
            assert started.address.startswith("https://127.0.0.1:")
            command = re.search("^try: (.*)$", started.out, re.MULTILINE)[1]
            command = f"{command} -s --cacert {pem['ca.pem']}"
            ran = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
            assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 8
