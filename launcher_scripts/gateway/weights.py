"""Administration of the served weights and LoRA adapters, for the keys of admins alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from launcher_scripts.gateway.api_errors import ApiError, bad_request, unavailable
from launcher_scripts.gateway.backend import AddedLoRA, Replica
from launcher_scripts.gateway.schemas import (
    LoadLoRABody,
    ModelBody,
    RefitBody,
    StrictBody,
    UnloadLoRABody,
    WeightsBody,
)
from launcher_scripts.gateway.served_model import Models, ServedModel

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
        tensors may be sent by name."""
        body = await self._body(request, ModelBody)
        return await self._on_all(body.model, {"operation": "refit_socket"}, "no_socket")

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


async def _unload(lora: AddedLoRA, model: ServedModel, servers: Sequence[Replica]) -> None:
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
