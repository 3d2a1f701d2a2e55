"""What the login side finds out about secrets, keys and certificates, and a gateway's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from launcher_scripts.config.gateway import PRIVATE_FILES, DeployedGateway
from launcher_scripts.config.options import values_of
from launcher_scripts.config.security import ServerSecurity
from stages.checks import Checks
from stages.paths import absolute

KEY = "deploy.server.security"
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|STORAGE_KEY)(_|$)",
    re.IGNORECASE,
)
_PATH_NAME = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)


def with_absolute_files(security: ServerSecurity) -> ServerSecurity:
    """The same with files that do not depend on the working directory."""
    tls = security.grpc_tls
    if tls is not None:
        tls = replace(
            tls,
            certificate=absolute(tls.certificate),
            key=absolute(tls.key),
            client_ca=tls.client_ca and absolute(tls.client_ca),
        )
    secrets_file = security.secrets_file and absolute(security.secrets_file)
    return replace(security, grpc_tls=tls, secrets_file=secrets_file)


def check_files(checks: Checks, security: ServerSecurity) -> None:
    """Certificates, keys and secrets are there, and nobody else can read those that are secret."""
    private = security.private_files()
    for key, path in security.files().items():
        check = checks.private if key in private else checks.exists
        check(f"{key} of the server", path, f"{KEY}.{key}")


def gateway_with_absolute_files(gateway: DeployedGateway) -> DeployedGateway:
    """What is said of the gateway, with files that do not depend on the working directory."""

    def whole(path: str | None) -> str | None:
        return None if path is None else absolute(path)

    tls = gateway.grpc_tls
    if tls is not None:
        tls = replace(
            tls, ca=absolute(tls.ca), certificate=whole(tls.certificate), key=whole(tls.key)
        )
    return replace(
        DeployedGateway(**values_of(DeployedGateway, gateway)),
        api_keys=whole(gateway.api_keys),
        chat_template=whole(gateway.chat_template),
        tls_certificate=whole(gateway.tls_certificate),
        tls_key=whole(gateway.tls_key),
        grpc_tls=tls,
    )


def check_gateway(
    checks: Checks, gateway: DeployedGateway, server: ServerSecurity, key: str
) -> None:
    """Its files are there, those that are secret are private, and it speaks as its server does.

    key: of the configuration, where the gateway is said
    """
    for name, path in gateway.files().items():
        check = checks.private if name in PRIVATE_FILES else checks.exists
        check(f"{name} of the gateway", path, f"{key}.{name}")
    if server.grpc_tls is not None and gateway.grpc_tls is None:
        checks.problems.add(
            "the server's gRPC speaks TLS",
            change=f"{key}.grpc_tls={{ca: FILE}}, whose certificates the gateway trusts",
        )


def check_variables(checks: Checks, names: Iterable[str]) -> None:
    """Variables become lines of a script, which is no place for a secret."""
    for name in names:
        if _SECRET_NAME.search(name) and not _PATH_NAME.search(name):
            checks.problems.add(
                f"the value of {name} would be written into scripts: put the line {name}=... into "
                f"a file of mode 600",
                choices=("the environment you submit from", f"{KEY}.secrets_file (the file)"),
                change=f"env_vars.{name}",
            )
