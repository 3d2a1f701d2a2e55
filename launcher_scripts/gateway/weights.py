"""Administration of the served weights: POST /admin/weights, for the keys of admins alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from launcher_scripts.gateway.api_errors import ApiError, bad_request, unavailable
from launcher_scripts.gateway.backend import Replica
from launcher_scripts.gateway.schemas import WeightsBody
from launcher_scripts.gateway.served_model import Models

# Kinds of errors of a server's operation -> status; any other one is the server's.
_STATUSES = {"ConfigError": 400, "CheckpointError": 400, "OperationError": 409, "BusyError": 409}


class WeightsAdmin:
    """The handler of the route."""

    def __init__(
        self,
        models: Models,
        replicas: Sequence[Replica],
        admins: Collection[str],
        read: Callable[[Request, type[WeightsBody]], Awaitable[WeightsBody]],
    ) -> None:
        """read: gives the body of a request. Raises ApiError."""
        self._models = models
        self._replicas = replicas
        self._admins = admins
        self._read = read

    async def exchange(self, request: Request) -> Response:
        """POST /admin/weights: serve the weights of another export, on every server of the model.

        One server after the other: each has them or keeps its own. The first error ends it.
        """
        check_admin(request.state.record.owner, self._admins)
        body = await self._read(request, WeightsBody)
        model = self._models.find(body.model)
        if model.parent is not None:
            raise bad_request(f"{model.name} is an adapter of {model.parent}", "model")
        servers = [server for server in self._replicas if server.takes(model.name)]
        if not servers:
            raise unavailable(f"no server of {model.name} is healthy")
        operation = {"operation": "swap", **body.model_dump(exclude={"model"})}
        results: list[dict[str, Any]] = []
        for server in servers:
            reply = await server.backends[model.name].operate(operation)
            if "error" in reply:
                message = f"the server at {server.address}: {reply['error']}"
                if results:
                    names = ", ".join(result["server"] for result in results)
                    message += f"; these have the new weights already: {names}"
                status = _STATUSES.get(reply["kind"], 500)
                raise ApiError(status, message, code="weights_not_exchanged")
            results.append({"server": server.address.partition("#")[0], **reply})
        return JSONResponse({"model": model.name, "servers": results})


def check_admin(owner: str | None, admins: Collection[str]) -> None:
    """Raise ApiError for a request whose key is not an admin's, and where there are no keys."""
    if owner is None or owner not in admins:
        message = (
            "this needs the key of an admin: deploy.gateway.api_keys and deploy.gateway.admins"
        )
        raise ApiError(403, message, code="admins_only")
