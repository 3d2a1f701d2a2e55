"""Options of the gateway, from the deploy stage's settings file or from flags."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.files import READY
from launcher_scripts.config.options import (
    PORTS,
    ConfigPath,
    SecretPath,
    check_options,
    option,
    option_metadata,
    values_of,
)
from launcher_scripts.config.security import LOOPBACK, ClientTls

MIB = 1 << 20
# Whoever asks whether the gateway is there need not have a key, nor does the page that asks for it.
OPEN_PATHS = frozenset(
    {"/", "/docs", "/health", "/metrics", "/openapi.json", "/ping", "/ready", "/version"}
)


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of a gateway wherever it runs. Times in seconds, sizes in bytes.

    key:   of the configuration, where this is said
    ports: the choices of `port`
    """

    key: ClassVar[str]
    ports: ClassVar[tuple[str, ...]] = PORTS

    port: int | None = None
    host: str | None = None
    models: tuple[str, ...] = option(
        (), "models to serve; by default all that generate or encode text", metavar="NAME"
    )
    api_keys: SecretPath | None = option(
        None, "file with lines NAME=key, readable by its owner only", metavar="FILE"
    )
    admins: tuple[str, ...] = option(
        (),
        "names of keys that see the use of all clients in /clients, and may exchange weights",
        metavar="NAME",
    )
    chat_template: ConfigPath | None = option(
        None, "Jinja chat template, instead of the checkpoints' own", metavar="FILE"
    )
    max_running: int = option(512, "most rows that the servers work on at the same time", lower=1)
    max_waiting: int = option(
        1024, "most rows that wait for their turn; more get status 429", lower=0
    )
    max_body: int = option(MIB, "largest request, in bytes", lower=1)
    max_model_len: int | None = option(
        None, "most tokens of prompt and answer; by default the model's positions", lower=0
    )
    max_prompt_chars: int | None = option(
        None, "most characters of a prompt; by default 32 for each token that fits", lower=1
    )
    chat_tokens: int = option(1024, "tokens of an answer if a chat request sets no limit", lower=1)
    request_timeout: float | None = option(
        None, "seconds until an answer must be complete, unless the request sets a timeout", lower=0
    )
    cors_origins: tuple[str, ...] = option(
        (), "origins of web pages that may send requests (CORS)", metavar="URL"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "names with a dot by which clients without keys reach the gateway", metavar="NAME"
    )
    trusted_proxies: tuple[str, ...] = option(
        (), "addresses or networks of proxies whose X-Forwarded-For is believed", metavar="ADDRESS"
    )
    max_stored_responses: int = option(
        0, "responses of /v1/responses that later requests may read and continue", lower=0
    )
    max_stored_bytes: int = option(
        64 * MIB, "their size with their conversations; the oldest go first", lower=1
    )
    keep_alive_timeout: int = option(
        75, "seconds until a connection without requests is closed", lower=1
    )
    tls_certificate: ConfigPath | None = option(None, "PEM certificate for HTTPS", metavar="FILE")
    tls_key: SecretPath | None = option(None, "PEM private key of the certificate", metavar="FILE")

    @classmethod
    def key_of(cls, name: str) -> str:
        """Return the key where an option is changed."""
        return f"{cls.key}.{name}"

    def __post_init__(self) -> None:
        problems = Problems("the gateway's settings")
        self.check(problems)
        problems.raise_if_any(ConfigError)

    def check(self, problems: Problems) -> None:
        if self.port is not None and not 0 <= self.port < 65536:
            problems.add(
                "port is not a valid port",
                got=self.port,
                choices=self.ports,
                change=self.key_of("port"),
            )
        check_options(self, problems, self.key_of)
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError:
                problems.add(
                    "not the address of a proxy",
                    got=proxy,
                    choices=("an IP address", "a network: 10.1.0.0/16"),
                    change=self.key_of("trusted_proxies"),
                )
        if self.admins and self.api_keys is None:
            names = [self.key_of(name) for name in ("admins", "api_keys")]
            problems.add("admins are names of API keys", got=self.admins, change=" or ".join(names))
        if (self.tls_certificate is None) != (self.tls_key is None):
            keys = f"{self.key_of('tls_certificate')}, {self.key_of('tls_key')}"
            problems.add("a certificate needs its key, and a key its certificate", change=keys)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(GatewayOptions):
    """One gateway before one or several servers.

    ready:      ready files of the servers, or the job folders that hold them
    server_ca, server_certificate, server_key: for servers whose gRPC speaks TLS
    """

    ready: tuple[str, ...] = field(
        kw_only=False,
        metadata=option_metadata(
            "ready files of the servers, or their job folders", metavar="PATH"
        ),
    )
    host: str = option("127.0.0.1", "the address to listen on")
    port: int = option(0, "port to listen on; 0: a free one")
    tokenizer_dir: str | None = option(
        None, "folder with tokenizer and config.ini, if not the repository's", metavar="FOLDER"
    )
    ready_timeout: float = option(600.0, "seconds to wait until the servers are ready", lower=0)
    drain_timeout: float = option(
        60.0, "seconds that running requests may take after SIGTERM", lower=0
    )
    server_ca: str | None = option(
        None, "PEM certificates of authorities to trust for the servers' gRPC", metavar="FILE"
    )
    server_certificate: str | None = option(
        None, "PEM certificate that the gateway shows to the servers", metavar="FILE"
    )
    server_key: str | None = option(None, "PEM private key of the certificate", metavar="FILE")

    @classmethod
    def key_of(cls, name: str) -> str:
        return "--" + name.replace("_", "-")

    def check(self, problems: Problems) -> None:
        super().check(problems)
        if not self.ready:
            problems.add("no server is named", change="--ready")
        if self.server_ca is None and (self.server_certificate or self.server_key):
            problems.add("whom to trust is not said", change="--server-ca")


@dataclass(frozen=True, kw_only=True)
class DeployedGateway(GatewayOptions):
    """The gateway of a deployment.

    port:     None: there is no gateway; 0: a free one
    host:     None: the server's own
    grpc_tls: whom it trusts where the server's gRPC speaks TLS
    """

    key: ClassVar[str] = "deploy.gateway"
    ports: ClassVar[tuple[str, ...]] = ("null (no gateway)", *PORTS)

    grpc_tls: ClientTls | None = None

    def settings(
        self,
        ready: Sequence[str],
        host: str,
        port: int,
        *,
        drain_timeout: float,
        ready_timeout: float = GatewaySettings.ready_timeout,
        tokenizer_dir: str | None = None,
        public_host: str | None = None,
    ) -> GatewaySettings:
        """The gateway before the servers of the ready files. public_host: that clients are told"""
        tls = self.grpc_tls
        values = values_of(GatewayOptions, self) | {"host": host, "port": port}
        if public_host is not None:
            values["allowed_hosts"] = (*self.allowed_hosts, public_host)
        return GatewaySettings(
            tuple(ready),
            **values,
            tokenizer_dir=tokenizer_dir,
            ready_timeout=ready_timeout,
            drain_timeout=drain_timeout,
            server_ca=tls.ca if tls else None,
            server_certificate=tls.certificate if tls else None,
            server_key=tls.key if tls else None,
        )


def example_command(openai: str, model: str, *, keyed: bool) -> str:
    """A line of shell that asks the gateway at `openai` (http://host:port/v1) for a completion."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    words = ["curl", f"{openai}/completions", "-H", "Content-Type: application/json"]
    words += ["-d", json.dumps(body)]
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if keyed else ""
    return shlex.join(words) + key


@dataclass(frozen=True)
class GatewayJobSettings:
    """One gateway before all servers of `ready`, as a job of its own. Times in seconds.

    ready: ready files of the servers, or the folders that hold them. host and public_host are as
    in DeploySettings. ready_timeout: how long to wait until each of `ready` has a server.
    stop_timeout: for running requests, once it is stopped. restarts: how often a gateway that was
    ready may be started again. idle_timeout: seconds without servers after which it ends; None: it
    waits for others. tokenizer_dir: see GatewaySettings.
    """

    stage: ClassVar[str] = "gateway"

    ready: tuple[ConfigPath, ...]
    results_dir: str
    gateway: DeployedGateway
    host: str | None = LOOPBACK
    public_host: str | None = None
    tokenizer_dir: ConfigPath | None = None
    ready_timeout: float = 1800.0
    stop_timeout: float = 30.0
    restarts: int = 0
    idle_timeout: float | None = None
    job_folder: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the settings of the gateway's job")
        if not self.ready:
            problems.add("no server is named", change="gateway.ready")
        for name in ("ready_timeout", "stop_timeout"):
            problems.check_minimum(name, getattr(self, name), 0, f"gateway.{name}")
        problems.check_minimum("restarts", self.restarts, 0, "deploy.restarts")
        problems.raise_if_any(ConfigError)

    @property
    def ready_file(self) -> Path:
        """Written when the gateway answers: openai as http://host:port/v1, and models."""
        return Path(self.results_dir) / READY
