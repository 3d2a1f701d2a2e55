"""A tritonserver's gRPC for asyncio: one call for each request, so cancelling it gives it up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from launcher_scripts.clients.connection import GRPC_ARGUMENTS, infer_inputs, infer_outputs
from launcher_scripts.config.security import ClientTls

ServerFailure = InferenceServerException
_READY_SECONDS = 5.0
# gRPC itself would wait up to two minutes before it looks for a server again.
_CHANNEL = [
    *GRPC_ARGUMENTS,
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class TritonServer:
    """One tritonserver's gRPC address."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self.address = address
        self._client = triton.InferenceServerClient(
            address,
            ssl=tls is not None,
            root_certificates=tls and tls.ca,
            private_key=tls and tls.key,
            certificate_chain=tls and tls.certificate,
            channel_args=_CHANNEL,
        )

    async def is_ready(self, model: str) -> bool:
        """Whether the server answers and serves the model."""
        try:
            return bool(await self._client.is_model_ready(model, client_timeout=_READY_SECONDS))
        except ServerFailure:
            return False

    async def models(self) -> list[str]:
        """The names of the models that it serves."""
        index = await self._client.get_model_repository_index(
            as_json=True, client_timeout=_READY_SECONDS
        )
        return sorted(
            each["name"] for each in index.get("models", []) if each.get("state") == "READY"
        )

    async def model_config(self, model: str) -> dict[str, Any]:
        """The model's config.pbtxt as JSON."""
        answer = await self._client.get_model_config(
            model, as_json=True, client_timeout=_READY_SECONDS
        )
        return dict(answer["config"])

    async def infer(
        self, model: str, tensors: Mapping[str, Any], outputs: Sequence[str], **more: Any
    ) -> dict[str, Any]:
        """The answer of a model that gives one."""
        answer = await self._client.infer(
            model, infer_inputs(triton, tensors), outputs=infer_outputs(triton, outputs), **more
        )
        return _arrays(answer)

    async def stream(
        self, model: str, tensors: Mapping[str, Any], outputs: Sequence[str], **more: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Every response of a decoupled model; closing the generator cancels the request."""

        async def once() -> AsyncGenerator[dict[str, Any], None]:
            yield {
                "model_name": model,
                "inputs": infer_inputs(triton, tensors),
                "outputs": infer_outputs(triton, outputs),
                **more,
            }

        responses = self._client.stream_infer(once())
        try:
            async for result, error in responses:
                if error is not None:
                    raise error
                yield _arrays(result)
        finally:
            responses.cancel()

    async def close(self) -> None:
        await self._client.close()


def _arrays(answer: Any) -> dict[str, Any]:
    """The tensors of a response by name; none in an empty last one."""
    outputs = answer.get_response().outputs
    return {output.name: answer.as_numpy(output.name) for output in outputs}
