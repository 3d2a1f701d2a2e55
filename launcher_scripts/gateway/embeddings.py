"""/v1/embeddings: texts as vectors, the means of an encoder's states over a text's tokens."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.gateway.admission import QueuedRow
from launcher_scripts.gateway.api_errors import ApiError, bad_request
from launcher_scripts.gateway.backend import RowRequest, merged
from launcher_scripts.gateway.generation import Limits, Record, check_length, check_rows
from launcher_scripts.gateway.schemas import EmbeddingsBody
from launcher_scripts.gateway.served_model import ServedModel

Vector = NDArray[np.float32]


class Embeddings:
    """One request on its way to its vectors."""

    def __init__(
        self,
        model: ServedModel,
        body: EmbeddingsBody,
        inputs: Sequence[tuple[int, ...]],
        record: Record,
        limits: Limits,
    ) -> None:
        """inputs: token ids. Raises ApiError if too many rows wait."""
        self._model = model
        self._body = body
        self._inputs = inputs
        self._record = record
        self._timeout = limits.timeout
        record.model = model.name
        record.prompt_tokens = sum(map(len, inputs))
        self._slots = limits.admission.reserve(record.client, len(inputs))

    @classmethod
    async def of(
        cls, model: ServedModel, body: EmbeddingsBody, record: Record, limits: Limits
    ) -> Embeddings:
        """Tokenize the inputs. Raises ApiError for inputs that the model cannot encode."""
        check_rows(len(body.input), 1, limits.admission)
        texts = [item for item in body.input if isinstance(item, str)]
        inputs = [tuple(item) for item in body.input if not isinstance(item, str)]
        if texts:
            threads, special = limits.threads.of(record.client), body.add_special_tokens
            inputs = await model.encode_aside(texts, threads, special_tokens=special)
        if not all(inputs):
            raise bad_request("an input is empty, and the encoder needs a token", "input")
        for ids in inputs:
            check_length(model, len(ids), 0, "input")
        return cls(model, body, inputs, record, limits)

    async def full(self) -> dict[str, Any]:
        """Return the response. Raises ApiError."""
        vectors: dict[int, Vector] = {}
        rows = [self._row(index, slot) for index, slot in enumerate(self._slots)]
        try:
            async with aclosing(merged(rows, self._timeout)) as results:
                async for index, vector in results:
                    vectors[index] = vector
        finally:
            for position in self._slots:
                position.leave()
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vectors[index])}
            for index in range(len(rows))
        ]
        count = self._record.prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "model": self._model.name, "data": data, "usage": usage}

    async def _row(self, index: int, slot: QueuedRow) -> AsyncGenerator[tuple[int, Vector], None]:
        name = self._record.request_id
        request = RowRequest(
            name if len(self._slots) == 1 else f"{name}-{index}",
            self._inputs[index],
            0,
            timeout=self._timeout,
            full=True,
        )
        increments = self._model.backend.generate(request)
        async with slot.taken(), aclosing(increments):
            async for increment in increments:
                if increment.states is not None:
                    yield index, increment.states.mean(axis=0)

    def _encoded(self, vector: Vector) -> list[float] | str:
        """Return the vector with the body's size and format. Raises ApiError."""
        dimensions = self._body.dimensions
        if dimensions is not None and dimensions > len(vector):
            raise bad_request(
                f"{self._model.name} has {len(vector)} dimensions; got {dimensions}", "dimensions"
            )
        vector = vector[:dimensions]
        if self._body.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values


def no_embeddings(models: Sequence[ServedModel]) -> ApiError:
    """The error of a model that gives none. models: those of the gateway"""
    encoders = ", ".join(model.name for model in models if model.embeds)
    message = f"the model gives no embeddings; encoders are: {encoders}"
    if not encoders:
        served = ", ".join(model.name for model in models)
        message = f"none of the models gives embeddings: {served}"
    return ApiError(404, message, code="no_embeddings", param="model")
