"""Which way the requests go: everything that a client process has to know to open it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from launcher_scripts.clients.async_connection import TritonServer
from launcher_scripts.config.security import ClientTls
from launcher_scripts.evaluation.load.http_paths import GatewayPath, TritonHttpPath
from launcher_scripts.evaluation.load.plan import LoadRequest
from launcher_scripts.evaluation.load.tokens import OUTPUTS, TokenRequest


class GrpcPath:
    """One connection to each server, which take turns."""

    def __init__(
        self,
        addresses: Sequence[str],
        tokens: TokenRequest,
        *,
        stream: bool,
        tls: ClientTls | None,
    ) -> None:
        self._servers = [TritonServer(each, tls) for each in addresses]
        self._tokens, self._stream, self._asked = tokens, stream, 0

    async def ask(self, request: LoadRequest) -> AsyncGenerator[int, None]:
        server = self._servers[self._asked % len(self._servers)]
        self._asked += 1
        name, tensors = self._tokens.model_name, self._tokens.tensors(request)
        if not self._stream:
            yield self._tokens.generated(await server.infer(name, tensors, OUTPUTS), request)
            return
        async for answer in server.stream(name, tensors, OUTPUTS):
            if answer:
                yield self._tokens.generated(answer, request)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


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
