"""What the gateway is told: by the deploy stage's settings file, or by flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.config.security import ClientTls

MIB = 1 << 20


@dataclass(frozen=True)
class GatewaySettings:
    """One gateway before one or several servers. Times in seconds, sizes in bytes.

    ready:           ready files of the servers, or the job folders that hold them
    port:            0: a free one
    models:          names of those to serve; (): all that generate
    tokenizer_dir:   tokenizer files and config.ini, where the servers' repository is not to be read
    chat_template:   a Jinja file for models whose checkpoint has no chat template
    api_keys:        a file of lines NAME=key that nobody else may read; None: everybody may ask
    max_running:     rows that the servers are given at a time
    max_waiting:     rows that wait for that; more are answered with 429
    max_body:        of a request
    max_model_len:   tokens of prompt and answer; None: the positions of the model
    chat_tokens:     tokens of a chat's answer that does not say how many
    request_timeout: how long an answer may take unless the request says `timeout`; None: any time
    ready_timeout:   how long to wait for the ready files and the models
    drain_timeout:   how long running requests may take after SIGTERM
    cors_origins:    whose pages a browser lets ask; () switches CORS off
    tls_certificate, tls_key: PEM files; None: the gateway speaks plain HTTP
    server_ca, server_certificate, server_key: PEM files for servers whose gRPC speaks TLS
    """

    ready: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] = ()
    tokenizer_dir: str | None = None
    chat_template: str | None = None
    api_keys: str | None = None
    max_running: int = 512
    max_waiting: int = 1024
    max_body: int = MIB
    max_model_len: int | None = None
    chat_tokens: int = 1024
    request_timeout: float | None = None
    ready_timeout: float = 600.0
    drain_timeout: float = 60.0
    cors_origins: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    server_ca: str | None = None
    server_certificate: str | None = None
    server_key: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the gateway's settings")
        if not self.ready:
            problems.add("no server is named", change="--ready")
        if not 0 <= self.port <= 65535:
            problems.add("port is not a valid port", got=self.port, change="--port")
        for name in ("max_running", "max_body", "chat_tokens"):
            flag = "--" + name.replace("_", "-")
            problems.check_at_least(name, getattr(self, name), 1, flag)
        problems.check_at_least("max_waiting", self.max_waiting, 0, "--max-waiting")
        if (self.tls_certificate is None) != (self.tls_key is None):
            problems.add("a certificate needs its key", change="--tls-certificate, --tls-key")
        if self.server_ca is None and (self.server_certificate or self.server_key):
            problems.add("whom to trust is not said", change="--server-ca")
        problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class DeployedGateway:
    """The gateway of a deployment; for what is not said here see GatewaySettings.

    key:      of the configuration, where this is said
    port:     None: there is no gateway; 0: a free one
    host:     None: the server's own
    grpc_tls: whom it trusts where the server's gRPC speaks TLS
    """

    key: ClassVar[str] = "deploy.gateway"

    port: int | None = None
    host: str | None = None
    models: tuple[str, ...] = ()
    api_keys: str | None = None
    chat_template: str | None = None
    max_running: int = 512
    max_waiting: int = 1024
    max_body: int = MIB
    max_model_len: int | None = None
    chat_tokens: int = 1024
    request_timeout: float | None = None
    cors_origins: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    grpc_tls: ClientTls | None = None

    def __post_init__(self) -> None:
        problems = Problems("the settings of the gateway")
        if self.port is not None and not 0 <= self.port < 65536:
            choices = ("null (no gateway)", "0 (a free one)", "1-65535")
            change = f"{self.key}.port"
            problems.add("port is not a valid port", got=self.port, choices=choices, change=change)
        for name, least in (
            ("max_running", 1),
            ("max_waiting", 0),
            ("max_body", 1),
            ("chat_tokens", 1),
        ):
            key = f"{self.key}.{name}"
            problems.check_at_least(name, getattr(self, name), least, key)
        if (self.tls_certificate is None) != (self.tls_key is None):
            keys = f"{self.key}.tls_certificate, {self.key}.tls_key"
            problems.add("a certificate needs its key", change=keys)
        problems.raise_if_any(ConfigError)

    def files(self) -> dict[str, str]:
        """Key below `key` -> file that must be there."""
        tls = self.grpc_tls
        files = {
            "api_keys": self.api_keys,
            "chat_template": self.chat_template,
            "tls_certificate": self.tls_certificate,
            "tls_key": self.tls_key,
            "grpc_tls.ca": tls and tls.ca,
            "grpc_tls.certificate": tls and tls.certificate,
            "grpc_tls.key": tls and tls.key,
        }
        return {key: path for key, path in files.items() if path}

    def settings(
        self,
        ready: Sequence[str],
        host: str,
        port: int,
        *,
        drain_timeout: float,
        ready_timeout: float = GatewaySettings.ready_timeout,
        tokenizer_dir: str | None = None,
    ) -> GatewaySettings:
        """The gateway before the servers of the ready files."""
        tls = self.grpc_tls
        return GatewaySettings(
            ready=tuple(ready),
            host=host,
            port=port,
            models=self.models,
            tokenizer_dir=tokenizer_dir,
            chat_template=self.chat_template,
            api_keys=self.api_keys,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_body=self.max_body,
            max_model_len=self.max_model_len,
            chat_tokens=self.chat_tokens,
            request_timeout=self.request_timeout,
            ready_timeout=ready_timeout,
            drain_timeout=drain_timeout,
            cors_origins=self.cors_origins,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            server_ca=tls.ca if tls else None,
            server_certificate=tls.certificate if tls else None,
            server_key=tls.key if tls else None,
        )


PRIVATE_FILES = ("api_keys", "tls_key", "grpc_tls.key")  # that nobody but their owner may read


def example_command(openai: str, model: str, *, keyed: bool) -> str:
    """A line of shell that asks the gateway at `openai` (http://host:port/v1) for a completion."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16})
    words = ["curl", f"{openai}/completions", "-H", "Content-Type: application/json", "-d", body]
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if keyed else ""
    return shlex.join(words) + key
