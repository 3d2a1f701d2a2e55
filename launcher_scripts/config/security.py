"""Security of a server: addresses, restricted interfaces, TLS, and its secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.config.options import ConfigPath, SecretPath

# Triton's names of the parts of its interface that can be restricted.
RESTRICTABLE = (
    *("health", "metadata", "inference", "shared-memory", "model-config"),
    *("model-repository", "statistics", "trace", "logging"),
)
_GATEWAY_NEEDS = ("health", "inference", "model-config", "model-repository")
LOOPBACK = "127.0.0.1"
# In the certificate of a closed server's start, whatever its address.
SERVER_NAME = "launcher-server"
_GROUP_OR_OTHERS = 0o077
SIGN, VERIFY_SIGNATURE = "export.sign", "deploy.verify_signature"


@dataclass(frozen=True)
class ServerTls:
    """PEM files of a server whose gRPC speaks TLS. client_ca: clients need a certificate of it."""

    certificate: ConfigPath
    key: SecretPath
    client_ca: ConfigPath | None = None


@dataclass(frozen=True)
class ClientTls:
    """PEM files of a client: whom it trusts, and its own certificate where the server wants one."""

    ca: ConfigPath
    certificate: ConfigPath | None = None
    key: SecretPath | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                problem("a certificate needs its key", change="evaluate.grpc_tls.certificate, key")
            )


@dataclass(frozen=True)
class SigningKey:
    """PEM files that sign an export: the private key (of an elliptic curve, not encrypted), and
    where those who verify know authorities and not the key, its certificate and the chain of it.
    """

    key: SecretPath
    certificate: ConfigPath | None = None
    chain: tuple[ConfigPath, ...] = ()

    def __post_init__(self) -> None:
        if self.chain and self.certificate is None:
            raise ConfigError(
                problem("a chain needs the certificate", change=f"{SIGN}.certificate")
            )


@dataclass(frozen=True)
class TrustedSigner:
    """PEM files of one who may sign exports: the public key, or certificates of authorities."""

    public_key: ConfigPath | None = None
    certificates: tuple[ConfigPath, ...] = ()

    def __post_init__(self) -> None:
        if (self.public_key is None) != bool(self.certificates):
            raise ConfigError(
                problem(
                    "a signature is verified by a public key or by certificates",
                    got=vars(self),
                    choices=("{public_key: FILE}", "{certificates: [FILE, ...]}"),
                    change=VERIFY_SIGNATURE,
                )
            )


@dataclass(frozen=True)
class ServerSecurity:
    """http_host: address for HTTP and metrics, which Triton cannot encrypt; None: the server's,
    or this node alone where gRPC speaks TLS
    restricted_apis: of RESTRICTABLE; they answer only those who send this run's token
    grpc_tls: None: gRPC is not encrypted
    secrets_file: lines NAME=value for the server's environment; nobody else may read it
    """

    http_host: str | None = None
    restricted_apis: tuple[str, ...] = ("shared-memory", "trace", "logging")
    grpc_tls: ServerTls | None = None
    secrets_file: SecretPath | None = None

    def __post_init__(self) -> None:
        problems = Problems("the server's security")
        for name in self.restricted_apis:
            if name not in RESTRICTABLE:
                problems.add(
                    "not a part of Triton's interface",
                    got=name,
                    choices=RESTRICTABLE,
                    change="deploy.server.security.restricted_apis",
                )
        problems.raise_if_any(ConfigError)

    def check_closed(self, problems: Problems) -> None:
        """Note settings that would open a server whose gateway has keys."""
        keys = "deploy.gateway.api_keys"
        if self.grpc_tls is not None and self.grpc_tls.client_ca is None:
            problems.add(
                f"with {keys} the server's gRPC must know its clients by their certificates",
                change="deploy.server.security.grpc_tls.client_ca",
            )
        if self.http_host is not None:
            problems.add(
                f"with {keys} Triton's HTTP and metrics have no address, but a socket on the node",
                got=self.http_host,
                change="deploy.server.security.http_host",
            )

    def check_gateway(self, problems: Problems) -> None:
        """Note restrictions that would shut out the gateway, which sends no token."""
        if shut := [name for name in self.restricted_apis if name in _GATEWAY_NEEDS]:
            problems.add(
                "the gateway needs these parts of Triton's interface",
                got=shut,
                change="deploy.server.security.restricted_apis, or set deploy.gateway.api_keys, "
                "which closes Triton to everybody but the gateway",
            )

    def hosts(self, host: str) -> dict[str, str]:
        """The address that every interface listens on, of a server with the address `host`."""
        plain = self.http_host or (LOOPBACK if self.grpc_tls else host)
        return {"http": plain, "grpc": host, "metrics": plain}


def too_open(path: Path) -> str | None:
    """Why a file is no place for a secret; None when it is."""
    mode = path.stat().st_mode & 0o777
    if mode & _GROUP_OR_OTHERS:
        return f"others than its owner may use it (mode {mode:03o}): chmod 600"
    return None


def read_keys(path: Path, change: str) -> dict[str, str]:
    """The API keys of a file, by the names of their owners; at least one.

    change: the setting that names the file
    Raises ServerError, see read_secrets: a file without a key must not open a gateway.
    """
    keys = {name: key.strip() for name, key in read_secrets(path, change).items()}
    if not keys:
        message = "it holds no key, so the gateway would serve everybody"
        raise ServerError(problem(f"{path}: {message}", change=change))
    return keys


def read_secrets(path: Path, change: str = "deploy.server.security.secrets_file") -> dict[str, str]:
    """The variables of a secrets file: lines NAME=value; empty lines and # are skipped.

    change: the setting that names the file
    Raises ServerError that never shows a value. An empty value is refused: a script may have
    written a variable that was not set.
    """
    problems = Problems(f"the secrets file {path}")
    variables: dict[str, str] = {}
    try:
        reason = too_open(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason, lines = type(error).__name__, []
    if reason is not None:
        problems.add(reason, change=change)
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals or not name.isidentifier():
            problems.add(f"line {number} is not NAME=value", change=change)
        elif not value.strip():
            problems.add(f"line {number}: {name} has no value", change=change)
        elif name in variables:
            problems.add(f"line {number}: {name} is there for a second time", change=change)
        variables[name] = value
    problems.raise_if_any(ServerError)
    return variables
