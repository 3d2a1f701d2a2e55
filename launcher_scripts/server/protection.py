"""Triton's arguments for what a server lets whom do, and the token of its restricted interfaces."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from launcher_scripts.config.security import ServerSecurity, read_secrets

TOKEN_HEADER = "launcher-admin"
# In the secrets file: a token that people know; without it, it is one that nobody does.
TOKEN_VARIABLE = "LAUNCHER_ADMIN_TOKEN"


class Protection:
    """The secrets of one run of a server."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security
        path = security.secrets_file
        self.environment: Mapping[str, str] = {} if path is None else read_secrets(Path(path))
        self._token = self.environment.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)

    @property
    def headers(self) -> dict[str, str]:
        """What opens the restricted parts of the HTTP interface."""
        return {TOKEN_HEADER: self._token}

    def arguments(self) -> list[str]:
        """Of tritonserver. Models are those of the repository: nobody loads others."""
        arguments = ["--model-control-mode=none"]
        if self._security.restricted_apis:
            restricted = f"{','.join(self._security.restricted_apis)}:{TOKEN_HEADER}={self._token}"
            arguments += [f"--http-restricted-api={restricted}"]
            arguments += [f"--grpc-restricted-protocol={restricted}"]
        tls = self._security.grpc_tls
        if tls is not None:
            kind = "grpc-use-ssl" if tls.client_ca is None else "grpc-use-ssl-mutual"
            arguments += [f"--{kind}=true"]
            arguments += [f"--grpc-server-cert={tls.certificate}", f"--grpc-server-key={tls.key}"]
            if tls.client_ca is not None:
                arguments += [f"--grpc-root-cert={tls.client_ca}"]
        return arguments

    def hide(self, text: str) -> str:
        """`text` without the token, for logs."""
        return text.replace(self._token, "***")
