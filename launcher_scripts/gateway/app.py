"""The routes of the gateway: OpenAI's, Anthropic's, and what vLLM and operators add to them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from launcher_scripts.common.tokenizer import TokenizationError
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.contract import metric_names as names
from launcher_scripts.gateway.admission import Admission, ClientThreads, ThreadsOfClient
from launcher_scripts.gateway.api_errors import ApiError, bad_request, unsupported
from launcher_scripts.gateway.backend import Replica
from launcher_scripts.gateway.completions import Chat, Completion, RequestAnswer
from launcher_scripts.gateway.generation import RequestLimits, RequestRecord
from launcher_scripts.gateway.messages import (
    ConversationBody,
    MessageAnswer,
    MessagesBody,
    count_tokens,
)
from launcher_scripts.gateway.metrics import Metrics, server_metrics, with_servers
from launcher_scripts.gateway.middleware import (
    MAX_BODIES,
    BodyBudget,
    Browsers,
    Keys,
    Lifecycle,
    RequestMiddleware,
    read_body,
    refusal,
    unless_left,
)
from launcher_scripts.gateway.parameters import StrictBody, parsed
from launcher_scripts.gateway.responses import ResponseStore
from launcher_scripts.gateway.responses_schemas import ResponsesBody
from launcher_scripts.gateway.retelling import Retelling
from launcher_scripts.gateway.routes import (
    Embeddings,
    WeightsAdmin,
    json_response,
    large_json,
    no_embeddings,
    openapi,
    show_docs,
    show_page,
)
from launcher_scripts.gateway.row_text import token_names
from launcher_scripts.gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    TokenizeBody,
    TokenizeChatBody,
)
from launcher_scripts.gateway.served_model import Models, ServedModel

VERSION = "0.1.0"
Parsed = TypeVar("Parsed", bound=StrictBody)
Body = TypeVar("Body", CompletionBody, ChatBody, ResponsesBody, MessagesBody)
Rendered = TypeVar("Rendered", CompletionBody, ChatBody)


class GatewayHandlers:
    """The handlers of all routes."""

    def __init__(
        self, models: Sequence[ServedModel], settings: GatewaySettings, replicas: Sequence[Replica]
    ) -> None:
        self.models = Models(models)
        self._replicas = replicas
        self.life = Lifecycle()
        self.admission = Admission(settings.max_running, settings.max_waiting)
        self._limits = RequestLimits(
            self.admission, ClientThreads(), settings.request_timeout, settings.chat_tokens
        )
        self._max_body = settings.max_body
        self.bodies = BodyBudget(settings.max_body * MAX_BODIES)
        self._admins = frozenset(settings.admins)
        self._stored = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
        self.routes = self._routes()
        self.metrics = Metrics(route.path.partition("{")[0] for route in self.routes)
        self.metrics.watch(names.GATEWAY_WORKING, lambda: self.life.working)
        self.metrics.watch(names.GATEWAY_RUNNING, lambda: self.admission.running)
        self.metrics.watch(names.GATEWAY_WAITING, lambda: self.admission.waiting)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._generate(request, CompletionBody, Completion.of)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._generate(request, ChatBody, Chat.of)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses"""
        return await self._generate(request, ResponsesBody, self._stored.respond)

    async def stored_response(self, request: Request) -> Response:
        """GET /v1/responses/<id>: a stored response, or one that is in progress."""
        if request.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "a stored response is not streamed")
        return json_response(self._stored.read(*_owned(request)))

    async def delete_response(self, request: Request) -> Response:
        """DELETE /v1/responses/<id>"""
        client, response_id = _owned(request)
        self._stored.delete(client, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        """POST /v1/responses/<id>/cancel: end a response that is in progress."""
        return json_response(self._stored.cancel(*_owned(request), self.life))

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages"""
        return await self._generate(request, MessagesBody, MessageAnswer.of)

    async def render_completions(self, request: Request) -> Response:
        """POST /v1/completions/render: the rows' requests, which are not generated."""
        return JSONResponse(await self._render(request, CompletionBody, Completion.of))

    async def render_chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/render: a row's request, which is not generated."""
        return JSONResponse((await self._render(request, ChatBody, Chat.of))[0])

    async def message_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        body = await self._body(request, ConversationBody)
        model = self.models.find(body.model)
        threads, size = self._threads(request), request.state.record.body_size
        tokens = await count_tokens(model, body, threads, size)
        return JSONResponse({"input_tokens": tokens})

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        record: RequestRecord = request.state.record
        body = await self._body(request, EmbeddingsBody)
        model = self.models.find(body.model)
        if not model.embeds:
            raise no_embeddings(self.models.all)
        self.life.enter()
        self.metrics.begin(record)
        try:
            embeddings = await Embeddings.of(model, body, record, self._limits)
            content = await unless_left(request, self.life, embeddings.full())
            size = sum(len(item["embedding"]) for item in content["data"])
            return await self._threads(request).run(lambda: large_json(content), size)
        finally:
            self.life.leave()

    async def list_models(self, _: Request) -> Response:
        """GET /v1/models"""
        cards = [model.card() for model in self.models.listed]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **ends})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/<name>"""
        return JSONResponse(self.models.find(request.path_params["name"]).card())

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        threads = self._threads(request)
        body: TokenizeBody | TokenizeChatBody
        body = await self._body(request, TokenizeBody, TokenizeChatBody)
        if isinstance(body, TokenizeChatBody):
            model = self.models.find(body.model)
            text = await model.chat_text(body, threads)
        else:
            model = self.models.find(body.model)
            text = body.prompt
        (ids,) = await model.encode_aside([text], threads, special_tokens=body.add_special_tokens)
        names = None
        if body.return_token_strs:
            names = await threads.run(
                lambda: list(map(token_names(model.tokenizer), ids)), len(ids)
            )
        content = {
            "count": len(ids),
            "max_model_len": model.max_len,
            "tokens": list(ids),
            "token_strs": names,
        }
        return await threads.run(lambda: large_json(content), len(ids))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = await self._body(request, DetokenizeBody)
        model = self.models.find(body.model)
        try:
            text = await self._threads(request).run(
                lambda: model.tokenizer.decode(body.tokens), len(body.tokens)
            )
        except TokenizationError as error:
            raise bad_request(str(error), "tokens") from error
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info"""
        model = self.models.find(request.query_params.get("model"))
        return JSONResponse(
            {
                "tokenizer_class": type(model.tokenizer).__name__,
                "vocab_size": model.tokenizer.vocab_size,
                "model_max_length": model.max_len,
                **dict.fromkeys(("bos_token", "eos_token", "pad_token")),
                **model.token_names,
                "chat_template": model.template.text if model.template else None,
            }
        )

    async def health(self, _: Request) -> Response:
        """GET /health: the process lives."""
        return JSONResponse({"status": "ok"})

    async def load(self, _: Request) -> Response:
        """GET /load: the number of rows that run or wait."""
        running, waiting = self.admission.running, self.admission.waiting
        return JSONResponse(
            {"server_load": running + waiting, "running": running, "waiting": waiting}
        )

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json: these routes."""
        return json_response(self._document)

    @functools.cached_property
    def _document(self) -> bytes:
        return to_json(openapi(self.routes, VERSION))

    async def ready(self, _: Request) -> Response:
        """GET /ready: it takes work, and every model has a healthy server."""
        states = {
            model.name: any(server.takes(model.name) for server in self._replicas)
            for model in self.models.all
        }
        fine = all(states.values()) and not self.life.draining
        content = {"ready": fine, "draining": self.life.draining, "models": states}
        return JSONResponse(content, 200 if fine else 503)

    async def servers(self, _: Request) -> Response:
        """GET /servers"""
        return JSONResponse({"servers": [replica.facts() for replica in self._replicas]})

    async def show_server_metrics(self, _: Request) -> Response:
        """GET /servers/metrics: the servers' own metrics, as far as they can be read here."""
        addresses = {replica.address.partition("#")[0]: replica for replica in self._replicas}
        texts = await asyncio.gather(
            *(server_metrics(address.metrics_address) for address in addresses.values())
        )
        return with_servers(dict(zip(addresses, texts, strict=True)))

    async def clients(self, request: Request) -> Response:
        """GET /clients: their use of the models; with keys, those of admins show all clients."""
        owner = request.state.record.owner
        sees_all = owner is None or owner in self._admins
        return JSONResponse({"clients": self.metrics.clients.rows(None if sees_all else owner)})

    async def show_metrics(self, _: Request) -> Response:
        """GET /metrics"""
        return self.metrics.response()

    async def version(self, _: Request) -> Response:
        """GET /version: the gateway's, and the digests of the weights of every model."""
        models = {model.name: model.current_digests for model in self.models.all}
        return JSONResponse({"version": VERSION, "models": models})

    async def _body(self, request: Request, *kinds: type[Parsed]) -> Parsed:
        """The body of a request, parsed by a thread if it is long. Raises ApiError.

        kinds: of two, the second one is for messages
        """
        record: RequestRecord = request.state.record
        body = await read_body(request, self._max_body, functools.partial(self.bodies.add, record))
        threads = self._threads(request)
        return await threads.run_on_body(
            lambda: parsed(kinds, body, record.warnings), record.body_size
        )

    def count(self, path: str, record: RequestRecord, status: int) -> None:
        """The response of a request has gone out."""
        self.bodies.remove(record)
        self.metrics.count(path, record, status)

    def _threads(self, request: Request) -> ThreadsOfClient:
        """Threads for the work of the request's client."""
        return self._limits.threads.of(request.state.record.client)

    def _routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        weights = WeightsAdmin(self.models, self._replicas, self._admins, self._body)
        return [
            Route("/", show_page, methods=get),
            Route("/docs", show_docs, methods=get),
            Route("/openapi.json", self.openapi, methods=get),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/completions/render", self.render_completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/chat/completions/render", self.render_chat, methods=post),
            Route("/v1/responses", self.responses, methods=post),
            Route("/v1/responses/{id:path}/cancel", self.cancel_response, methods=post),
            Route("/v1/responses/{id:path}", self.stored_response, methods=get),
            Route("/v1/responses/{id:path}", self.delete_response, methods=["DELETE"]),
            Route("/v1/messages", self.messages, methods=post),
            Route("/v1/messages/count_tokens", self.message_tokens, methods=post),
            Route("/v1/embeddings", self.embeddings, methods=post),
            Route("/v1/models", self.list_models, methods=get),
            Route("/v1/models/{name:path}", self.one_model, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/tokenizer_info", self.tokenizer_info, methods=get),
            *weights.routes,
            Route("/health", self.health, methods=get),
            Route("/ping", self.health, methods=[*get, *post]),
            Route("/load", self.load, methods=get),
            Route("/ready", self.ready, methods=get),
            Route("/servers", self.servers, methods=get),
            Route("/servers/metrics", self.show_server_metrics, methods=get),
            Route("/clients", self.clients, methods=get),
            Route("/version", self.version, methods=get),
            Route("/metrics", self.show_metrics, methods=get),
        ]

    def _generating(self, name: str | None) -> ServedModel:
        """The model called so. Raises ApiError for an encoder."""
        model = self.models.find(name)
        if model.embeds:
            raise unsupported("model", f"{model.name} is an encoder: ask /v1/embeddings")
        return model

    async def _render(
        self,
        request: Request,
        kind: type[Rendered],
        answering_of: Callable[
            [ServedModel, Rendered, RequestRecord, RequestLimits], Awaitable[RequestAnswer]
        ],
    ) -> list[dict[str, Any]]:
        record: RequestRecord = request.state.record
        body = await self._body(request, kind)
        answering = await answering_of(self._generating(body.model), body, record, self._limits)
        answering.generation.abort()
        return answering.generation.rendered()

    async def _generate(
        self,
        request: Request,
        kind: type[Body],
        answering_of: Callable[
            [ServedModel, Body, RequestRecord, RequestLimits],
            Awaitable[RequestAnswer | Retelling[Any]],
        ],
    ) -> Response:
        """The answer to a body of this kind.

        Raises ClientDisconnect when nobody waits for it any more.
        """
        record: RequestRecord = request.state.record
        body = await self._body(request, kind)
        model = self._generating(body.model)
        self.life.enter()
        self.metrics.begin(record)
        stays = False
        try:
            answering = await answering_of(model, body, record, self._limits)
            if not answering.body.stream:
                content = await unless_left(request, self.life, answering.full())
                size = record.prompt_tokens + record.generated_tokens
                return await self._threads(request).run(lambda: large_json(content), size)
            events = answering.events()
            # An error before the first event has a status of its own.
            first = await unless_left(request, self.life, anext(events))
            stays = True
            return EventResponse(first, events, self.life, record, answering.failed)
        finally:
            if not stays:
                self.life.leave()


class EventResponse(StreamingResponse):
    """Server-sent events; when the client goes, what makes them is closed at once."""

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        life: Lifecycle,
        record: RequestRecord,
        failed: Callable[[ApiError], bytes],
    ) -> None:
        """failed: makes the last event of a stream that cannot go on"""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._first = first
        self._events = events
        self._life = life
        self._record = record
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._life.leave()

    async def stream_response(self, send: Send) -> None:
        """See StreamingResponse."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        last = b""
        try:
            with self._life.limited(asyncio.current_task(), self._record):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except asyncio.CancelledError:
            error = self._life.error(self._record)
            if error is None:
                raise
            last = self._failed(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _owned(request: Request) -> tuple[str, str]:
    """Returns the client of a request about a stored response, and the response's id."""
    return request.state.record.client, request.path_params["id"]


async def _no_route(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's form."""
    status, headers = 404, None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers  # of a wrong method those allowed
    message = f"there is no {request.method} {request.url.path[:200]}"
    code = "method_not_allowed" if status == 405 else "not_found"
    return refusal(ApiError(status, message, code=code, headers=headers))


def make_app(
    models: Sequence[ServedModel],
    settings: GatewaySettings,
    keys: Keys | None = None,
    replicas: Sequence[Replica] = (),
) -> Starlette:
    """The ASGI application. `app.state.gateway` is its Gateway.

    replicas: the servers, for /servers and /ready; their owner may change them at any time
    """
    gateway = GatewayHandlers(models, settings, replicas)
    browsers = Browsers((*settings.allowed_hosts, settings.host), settings.cors_origins)
    middleware = [
        Middleware(
            RequestMiddleware,
            keys=keys or Keys({}),
            browsers=browsers,
            count=gateway.count,
        )
    ]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", "X-Request-Id"],
        )
        middleware.insert(0, cors)

    app = Starlette(
        routes=gateway.routes,
        middleware=middleware,
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app
