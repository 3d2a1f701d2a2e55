"""Routes of the gateway besides generating: embeddings, administration of weights, and pages."""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from launcher_scripts.gateway.admission import QueuedRow
from launcher_scripts.gateway.api_errors import ApiError, bad_request, unavailable
from launcher_scripts.gateway.backend import Replica, RowRequest, ServedLoRA, merged
from launcher_scripts.gateway.generation import (
    RequestLimits,
    RequestRecord,
    check_length,
    check_rows,
)
from launcher_scripts.gateway.messages import ConversationBody, MessagesBody
from launcher_scripts.gateway.parameters import StrictBody
from launcher_scripts.gateway.responses_schemas import ResponsesBody
from launcher_scripts.gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    LoadLoRABody,
    ModelBody,
    RefitBody,
    TokenizeBody,
    TokenizeChatBody,
    UnloadLoRABody,
    WeightsBody,
)
from launcher_scripts.gateway.served_model import Models, ServedModel

Vector = NDArray[np.float32]


class Embeddings:
    """One request on its way to its vectors."""

    def __init__(
        self,
        model: ServedModel,
        body: EmbeddingsBody,
        inputs: Sequence[tuple[int, ...]],
        record: RequestRecord,
        limits: RequestLimits,
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
        cls, model: ServedModel, body: EmbeddingsBody, record: RequestRecord, limits: RequestLimits
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


# Kinds of errors of a server's operation -> status; any other one is the server's.
_STATUSES = {"ConfigError": 400, "CheckpointError": 400, "OperationError": 409, "BusyError": 409}
_LORA_STATUSES = {**_STATUSES, "OperationError": 400}
_NEW_WEIGHTS, _ASLEEP = "these have the new weights already", "these sleep already"
Body = TypeVar("Body", bound=StrictBody)


class WeightsAdmin:
    """The handlers of the routes."""

    def __init__(
        self,
        models: Models,
        replicas: Sequence[Replica],
        admins: Collection[str],
        read: Callable[..., Awaitable[Any]],
    ) -> None:
        """read: gives the body of a request as of a class. Raises ApiError."""
        self._models = models
        self._replicas = replicas
        self._admins = admins
        self._read = read
        self._changing = asyncio.Lock()  # the adapters
        self.routes = [
            Route("/admin/weights", self.exchange, methods=["POST"]),
            Route("/admin/refit", self.refit, methods=["POST"]),
            Route("/admin/refit_socket", self.refit_socket, methods=["POST"]),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping, methods=["GET"]),
            Route("/v1/load_lora_adapter", self.load_lora, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_lora, methods=["POST"]),
        ]

    async def exchange(self, request: Request) -> Response:
        """POST /admin/weights: serve the weights of another export, on every server of the model.

        One server after the other: each has them or keeps its own. The first error ends it.
        """
        body = await self._body(request, WeightsBody)
        operation = {"operation": "swap", **body.model_dump(exclude={"model"})}
        return await self._on_all(body.model, operation, "weights_not_exchanged", _NEW_WEIGHTS)

    async def refit(self, request: Request) -> Response:
        """POST /admin/refit: serve the weights of a transformers folder, on every server of the
        model, one after the other."""
        body = await self._body(request, RefitBody)
        operation = {"operation": "refit", **body.model_dump(exclude={"model"})}
        return await self._on_all(body.model, operation, "weights_not_exchanged", _NEW_WEIGHTS)

    async def refit_socket(self, request: Request) -> Response:
        """POST /admin/refit_socket: the path of a socket on every server of the model, to which
        tensors may be sent by name. The query or the body, which may be absent, has the model."""
        headers, name = request.headers, self._named(request)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            name = (await self._body(request, ModelBody)).model or name
        return await self._on_all(name, {"operation": "refit_socket"}, "no_socket")

    async def sleep(self, request: Request) -> Response:
        """POST /sleep: every server of the model gives its device's memory back until /wake_up.

        Query: model; level is vLLM's and changes nothing, mode=abort is not known.
        """
        operation = {"operation": "sleep"}
        return await self._on_all(self._named(request), operation, "not_asleep", _ASLEEP)

    async def wake(self, request: Request) -> Response:
        """POST /wake_up: every server of the model serves again, with an empty cache."""
        return await self._on_all(self._named(request), {"operation": "wake"}, "not_awake")

    async def is_sleeping(self, request: Request) -> Response:
        """GET /is_sleeping: whether any server of the model sleeps."""
        model, servers = self._servers(self._named(request))
        for server in servers:
            await server.backends[model.name].operate({"operation": "weights"})
        return JSONResponse(
            {"is_sleeping": any(server.backends[model.name].sleeping for server in servers)}
        )

    def _named(self, request: Request) -> str | None:
        """Return the model that the query of an admin's request names. Raises ApiError."""
        check_admin(request.state.record.owner, self._admins)
        return request.query_params.get("model")

    async def _on_all(
        self, name: str | None, operation: Mapping[str, Any], code: str, done: str = ""
    ) -> Response:
        """Have every server of a model do an operation, one after the other; the first error ends
        it.  code: of that error;  done: what those before have done, for its message
        """
        model, servers = self._servers(name)
        results: list[dict[str, Any]] = []
        for server in servers:
            address = server.address.partition("#")[0]  # without credentials
            reply = await server.backends[model.name].operate(operation)
            if "error" in reply:
                message = f"the server at {address}: {reply['error']}"
                if results and done:
                    names = ", ".join(result["server"] for result in results)
                    message += f"; {done}: {names}"
                raise ApiError(_STATUSES.get(reply["kind"], 500), message, code=code)
            results.append({"server": address, **reply})
        return JSONResponse({"model": model.name, "servers": results})

    async def load_lora(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: add an adapter to every server of the model, or to none.

        A server that joins later gets it with its first row of the adapter.
        """
        body = await self._body(request, LoadLoRABody)
        async with self._changing:
            model, servers = self._servers(body.model)
            lora = self._models.new_lora(model, body.lora_name, body.lora_path)
            for number, server in enumerate(servers):
                try:
                    _check(server, await server.backends[model.name].operate(lora.loading))
                except ApiError:
                    await _unload(lora, model, servers[:number])
                    raise
            self._models.put(replace(model, added_loras=(*model.added_loras, lora)))
        return PlainTextResponse(f"Success: LoRA adapter '{lora.name}' added successfully.")

    async def unload_lora(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: rows that run keep it to their end."""
        body = await self._body(request, UnloadLoRABody)
        async with self._changing:
            model, servers = self._servers(body.model)
            by_name = {lora.name: lora for lora in model.added_loras}
            lora = by_name.pop(body.lora_name, None)
            if lora is None:
                message = f"no such adapter was added: {body.lora_name[:100]!r}"
                message += f"; choices: {', '.join(by_name) or 'none'}"
                raise ApiError(404, message, code="not_found", param="lora_name")
            self._models.put(replace(model, added_loras=tuple(by_name.values())))
            await _unload(lora, model, servers)
        return PlainTextResponse(f"Success: LoRA adapter '{lora.name}' removed successfully.")

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """Read the body of an admin's request. Raises ApiError."""
        check_admin(request.state.record.owner, self._admins)
        body: Body = await self._read(request, kind)
        return body

    def _servers(self, name: str | None) -> tuple[ServedModel, list[Replica]]:
        """Return a model and its servers. Raises ApiError for an adapter, or without a server."""
        model = self._models.find(name)
        if model.parent is not None:
            raise bad_request(f"{model.name} is an adapter of {model.parent}", "model")
        servers = [server for server in self._replicas if server.serves(model.name)]
        if not servers:
            raise unavailable(f"no server of {model.name} is healthy")
        return model, servers


def _check(server: Replica, reply: Mapping[str, Any]) -> None:
    """Raise ApiError for a server that has not loaded an adapter."""
    if "error" in reply:
        status = _LORA_STATUSES.get(reply["kind"], 500)
        message = f"the server at {server.address.partition('#')[0]}: {reply['error']}"
        raise ApiError(status, message, code="adapter_not_loaded", param="lora_path")


async def _unload(lora: ServedLoRA, model: ServedModel, servers: Sequence[Replica]) -> None:
    """Have servers forget an adapter; one that has started again has done so already."""
    for server in servers:
        with suppress(ApiError):
            operation = {"operation": "unload_lora", "name": lora.name}
            await server.backends[model.name].operate(operation)


def check_admin(owner: str | None, admins: Collection[str]) -> None:
    """Raise ApiError for a request whose key is not an admin's, and where there are no keys."""
    if owner is None or owner not in admins:
        message = (
            "this needs the key of an admin: deploy.gateway.api_keys and deploy.gateway.admins"
        )
        raise ApiError(403, message, code="admins_only")


_FILE = Path(__file__).with_name("page.html")
_DOCS = Path(__file__).with_name("docs.html")
# A page is one file: nothing comes from elsewhere, and nothing is sent elsewhere.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def show_page(_: Request) -> Response:
    """GET /"""
    return HTMLResponse(_FILE.read_bytes(), headers=_HEADERS)


async def show_docs(_: Request) -> Response:
    """GET /docs: the page that shows /openapi.json."""
    return HTMLResponse(_DOCS.read_bytes(), headers=_HEADERS)


_SCHEMAS = "#/components/schemas/"
# Path -> the classes of which its request is one.
_BODIES: dict[str, tuple[type[StrictBody], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/completions/render": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/chat/completions/render": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (ConversationBody,),
    "/v1/embeddings": (EmbeddingsBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
    "/admin/weights": (WeightsBody,),
    "/v1/load_lora_adapter": (LoadLoRABody,),
    "/v1/unload_lora_adapter": (UnloadLoRABody,),
}


def openapi(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "summary": (inspect.getdoc(route.endpoint) or "").split("\n")[0],
            "responses": {
                "200": {"description": "the response"},
                "4XX": {"description": "an error in the form of OpenAI and Anthropic"},
            },
        }
        if names := route.param_convertors:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if kinds := _BODIES.get(route.path, ()):
            references = [{"$ref": _add(schemas, kind)} for kind in kinds]
            schema = references[0] if len(references) == 1 else {"anyOf": references}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths.setdefault(path, {}).update({method.lower(): operation for method in methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _add(schemas: dict[str, Any], kind: type[StrictBody]) -> str:
    """Add a body's schema and those it refers to; return its reference."""
    schema = kind.model_json_schema(ref_template=_SCHEMAS + "{model}")
    for name, definition in schema.pop("$defs", {}).items():
        # Two modules may have a class of one name.
        if schemas.setdefault(name, definition) != definition:
            raise ValueError(f"two schemas are called {name}")
    schemas[kind.__name__] = schema
    return _SCHEMAS + kind.__name__


def large_json(content: Mapping[str, Any]) -> Response:
    """Serialize in pieces, between which other threads run."""
    parts = (
        to_json(name) + b":" + (_list(value) if isinstance(value, list) else to_json(value))
        for name, value in content.items()
    )
    return json_response(b"{" + b",".join(parts) + b"}")


def _list(values: Sequence[Any]) -> bytes:
    if values and not isinstance(values[0], dict):
        return to_json(values)
    return b"[" + b",".join(map(to_json, values)) + b"]"


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")
