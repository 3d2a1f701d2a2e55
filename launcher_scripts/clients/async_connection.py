"""A tritonserver's gRPC for asyncio: one call for each request, so cancelling it gives it up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from launcher_scripts.clients.connection import (
    GRPC_ARGUMENTS,
    Tensors,
    channel_arguments,
    infer_arguments,
    ready_names,
    received,
)
from launcher_scripts.config.security import ClientTls

ServerFailure = InferenceServerException
_READY_SECONDS = 5.0
# gRPC itself would wait up to two minutes before it looks for a server again, and indefinitely for
# one that is frozen, or whose node is cut off: its requests fail after half a minute. A server
# allows pings as long as it sends something in between, at least the answers to a fleet's checks.
_CHANNEL = [
    *GRPC_ARGUMENTS,
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class TritonServer:
    """One tritonserver's gRPC address."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self.address = address
        self._client = triton.InferenceServerClient(**channel_arguments(address, tls, _CHANNEL))

    async def is_ready(self, model: str) -> bool:
        """Return whether the server answers and serves the model."""
        try:
            return bool(await self._client.is_model_ready(model, client_timeout=_READY_SECONDS))
        except ServerFailure:
            return False

    async def models(self) -> list[str]:
        """The names of the models that it serves."""
        index = await self._client.get_model_repository_index(
            as_json=True, client_timeout=_READY_SECONDS
        )
        return ready_names(index.get("models", []))

    async def model_config(self, model: str) -> dict[str, Any]:
        """The model's config.pbtxt as JSON."""
        answer = await self._client.get_model_config(
            model, as_json=True, client_timeout=_READY_SECONDS
        )
        return dict(answer["config"])

    async def infer(
        self, model: str, tensors: Mapping[str, Any], outputs: Sequence[str], **more: Any
    ) -> Tensors:
        """The answer of a model that gives one."""
        request = infer_arguments(triton, model, tensors, outputs)
        return received(await self._client.infer(**request, **more))

    async def stream(
        self, model: str, tensors: Mapping[str, Any], outputs: Sequence[str], **more: Any
    ) -> AsyncGenerator[Tensors, None]:
        """Every response of a decoupled model; closing the generator cancels the request."""

        async def once() -> AsyncGenerator[dict[str, Any], None]:
            yield {**infer_arguments(triton, model, tensors, outputs), **more}

        responses = self._client.stream_infer(once())
        try:
            async for result, error in responses:
                if error is not None:
                    raise error
                yield received(result)
        finally:
            responses.cancel()

    async def close(self) -> None:
        await self._client.close()
