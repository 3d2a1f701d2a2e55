"""Triton's arguments for what a server lets whom do, and the secrets of its start."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import quote

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.http_answer import UNIX
from launcher_scripts.config.security import SERVER_NAME, ServerTls, read_secrets
from launcher_scripts.config.settings import DeploySettings

TOKEN_HEADER = "launcher-admin"
# In the secrets file: a token that people know; without it, it is one that nobody does.
TOKEN_VARIABLE = "LAUNCHER_ADMIN_TOKEN"


# Of a closed server, in its own folder, which nobody else may enter.
SOCKETS = {"http": "http.sock", "metrics": "metrics.sock"}
_MAX_SOCKET_PATH = 108  # unix(7)
_VALID = timedelta(days=3650)


@contextlib.contextmanager
def launch_credentials(settings: DeploySettings) -> Iterator[Path | None]:
    """The credentials of one start of a closed server, until the end of the block.

    A file of mode 600 beside the ready file: a private key, and a certificate of it which the
    server and its clients both show, and which is all that either of them trusts. None for a server
    that is not closed, or has certificates of its own.
    """
    if not settings.is_closed or settings.security.grpc_tls is not None:
        yield None
        return
    folder = settings.ready_file.absolute().parent / "credentials"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / f"{secrets.token_hex(8)}.pem"
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(_self_signed())
    except OSError as error:
        what = f"cannot write the credentials of the server: {error}"
        raise ServerError(problem(what, change="deploy.run.results_dir")) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # those of other replicas are there
            folder.rmdir()


def _self_signed() -> bytes:
    """A new private key and a certificate of it, in PEM."""
    # Only closed servers need the package.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of nodes differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


class Protection:
    """What one run of a server lets whom do.

    sockets: name -> path of the interfaces that only the owner of `folder` reaches
    """

    def __init__(
        self, settings: DeploySettings, folder: Path, credentials: Path | None = None
    ) -> None:
        """folder:   the server's own, of mode 700
        credentials: see launch_credentials
        """
        security = settings.security
        if settings.is_closed:
            security = replace(security, restricted_apis=())
        if credentials is not None:
            pem = str(credentials)
            security = replace(security, grpc_tls=ServerTls(pem, pem, client_ca=pem))
        self._credentials = credentials
        self.sockets = {name: folder / file for name, file in SOCKETS.items()}
        if not settings.is_closed:
            self.sockets = {}
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
        for port, (name, path) in enumerate(self.sockets.items(), start=1):
            if len(os.fsencode(path)) >= _MAX_SOCKET_PATH:
                what = "the path of a server's socket is too long"
                raise ServerError(problem(what, got=str(path), change="TMPDIR"))
            # No port is opened, but Triton wants its numbers to differ.
            arguments += [f"--{name}-address={UNIX}{path}", f"--{name}-port={port}"]
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

    def client_address(self, address: str) -> str:
        """host:port of gRPC, as clients take it: with the credentials; see clients/connection.py"""
        if self._credentials is None:
            return address
        return f"{address}#{quote(str(self._credentials))}"

    def hide(self, text: str) -> str:
        """`text` without the token, for logs."""
        return text.replace(self._token, "***")
