"""Which way the requests go: everything that a client process has to know to open it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_scripts.config.security import ClientTls
from launcher_scripts.evaluation.load.grpc_path import GrpcPath
from launcher_scripts.evaluation.load.http_paths import GatewayPath, TritonHttpPath
from launcher_scripts.evaluation.load.tokens import TokenRequest

Path = GatewayPath | GrpcPath | TritonHttpPath


@dataclass(frozen=True)
class Target:
    """One path to one model.

    addresses: host:port of each server, or the gateway's http://host:port/v1
    stream:    answers are read as they come; of Triton's paths: the model is decoupled
    """

    path: str
    addresses: tuple[str, ...]
    tokens: TokenRequest
    stream: bool
    api_key: str | None = None
    tls: ClientTls | None = None

    def open(self) -> Path:
        """To be called, used and closed in one event loop."""
        if self.path == "gateway":
            return GatewayPath(
                self.addresses[0],
                self.tokens.model_name,
                stream=self.stream,
                api_key=self.api_key,
                ca=None if self.tls is None else self.tls.ca,
            )
        if self.path == "grpc":
            return GrpcPath(self.addresses, self.tokens, stream=self.stream, tls=self.tls)
        return TritonHttpPath(self.addresses, self.tokens, stream=self.stream)
