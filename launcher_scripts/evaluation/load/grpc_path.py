"""The way over gRPC: Triton's stream of a decoupled token model, or its whole answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from launcher_scripts.clients.async_connection import TritonServer
from launcher_scripts.config.security import ClientTls
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
