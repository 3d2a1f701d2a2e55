"""What the login side finds out about the files of a gateway."""

from __future__ import annotations

from dataclasses import replace

from launcher_scripts.config.gateway import PRIVATE_FILES, DeployedGateway
from launcher_scripts.config.options import values_of
from launcher_scripts.config.security import ServerSecurity
from stages.checks import Checks
from stages.paths import absolute


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
