"""The gateway's process: from its settings to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from launcher_scripts.common.errors import Problems, ServerError, problem
from launcher_scripts.common.hosts import host_port
from launcher_scripts.config.gateway import GatewaySettings, example_command
from launcher_scripts.config.security import read_keys
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.app import GatewayHandlers, make_app
from launcher_scripts.gateway.fleet import Fleet, load_models
from launcher_scripts.gateway.middleware import Keys
from launcher_scripts.gateway.served_model import ServedModel

MAX_HEAD = 64 << 10
_LINGER_SECONDS = 2.0  # in which a client may read why it is refused, while it still sends
_LINGER_BYTES = 1 << 20


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request may have so many bytes beside its body, and so much time.

    max_head: bytes of the request line, headers, chunk sizes and their extensions, and trailers
    seconds:  until a request is complete, and one more for every `rate` bytes
    unread_seconds: in which a client may read nothing of its answer, which keeps its places
    """

    max_head = MAX_HEAD
    seconds = 30.0
    rate = 10_000.0
    unread_seconds = 300.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head = 0  # bytes of the request that are not its body
        self._chunk = 0  # bytes that came last and have not been part of a body
        self._received = 0
        self._since = 0.0
        self._receives = False
        self._timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self._unread = 0
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self._inspect_reader)

    def _inspect_reader(self) -> None:
        """Give up a client that has read nothing."""
        if self.transport.get_write_buffer_size() < self._unread:
            self._await_reader()
            return
        client = self.client[0] if self.client else "-"
        self.logger.warning(
            "client=%s has read nothing for %g s, and is given up", client, self.unread_seconds
        )
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._receives:
            self._begin()
        self._received += len(data)
        if self._rejected:
            if self._received > _LINGER_BYTES:
                self.transport.abort()
            return
        self._chunk = len(data)
        self._head += len(data)
        super().data_received(data)
        if self._head > self.max_head and not self.transport.is_closing():
            self._reject(
                ApiError(
                    431,
                    f"the request has more than {self.max_head} bytes beside its body",
                    code="head_too_large",
                )
            )

    def on_message_begin(self) -> None:
        self._begin()
        self._head = self._received = self._chunk
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._head -= len(body)
        self._chunk -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receives = False
        super().on_message_complete()

    def _begin(self) -> None:
        """A request may come from now on, or does."""
        self._receives = True
        self._since, self._received = self.loop.time(), 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._inspect)

    def _inspect(self) -> None:
        """Give up a request that has had its time."""
        self._timer = None
        if not self._receives or self._rejected or self.transport.is_closing():
            return
        if self.flow.read_paused:  # until an earlier request is answered
            self._since = self.loop.time()
        left = self._since + self.seconds + self._received / self.rate - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._inspect)
        elif self._received:
            self._reject(ApiError(408, "the request was not complete in time", code="too_slow"))
        else:
            self.transport.close()

    def _reject(self, error: ApiError) -> None:
        """Answer with the error if nothing was answered yet, and close the connection."""
        client = self.client[0] if self.client else "-"
        self.logger.warning("client=%s status=%d %s", client, error.status, error.message)
        cycle, answered = self.cycle, False
        if cycle is not None and not cycle.response_complete:
            answered = cycle.response_started
            cycle.disconnected = True  # the application writes nothing more
            cycle.message_event.set()
        if answered or not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing at once, with unread bytes on their way, would take the answer back.
        self._rejected = True
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


_BACKLOG = 2048
_LAST_SECONDS = 2  # for requests that are given up, and then for connections that are still open


def serve_gateway_settings(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; requests that are running then are answered first.

    Raises ServerError where the port, the servers or the files cannot be used, ConfigError where
    no model can be served.
    """
    _check_files(settings)
    keys = Keys(read_keys(Path(settings.api_keys), "--api-keys") if settings.api_keys else {})
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per look at a server's metrics
    with _listening(settings) as opened:
        uvloop.run(_serve(settings, keys, opened))


async def _serve(settings: GatewaySettings, keys: Keys, opened: socket.socket) -> None:
    fleet = Fleet(settings)
    models = await load_models(settings, fleet)
    app = make_app(models, settings, keys, fleet.replicas)
    config = uvicorn_config(app, settings)
    greeting = ready_lines(_address(settings, opened), models, keyed=bool(settings.api_keys))
    server = DrainingServer(config, app.state.gateway, settings.drain_timeout, greeting)
    watching = asyncio.create_task(fleet.watch())
    try:
        await server.serve(sockets=[opened])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()


def uvicorn_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    """Return the configuration of the HTTP server in front of the application."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=_LAST_SECONDS,
        timeout_keep_alive=settings.keep_alive_timeout,
    )


class DrainingServer(uvicorn.Server):
    """Answers what is running before it ends; new requests are told to go elsewhere meanwhile."""

    def __init__(
        self, config: uvicorn.Config, gateway: GatewayHandlers, drain_seconds: float, greeting: str
    ) -> None:
        """greeting: what is printed when it answers"""
        super().__init__(config)
        self._greeting = greeting
        self._gateway = gateway
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _say(self._greeting)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal begins to drain, a second one ends everything at once."""
        if self._gateway.life.draining:
            self.should_exit = self.force_exit = True
            return
        self._gateway.life.draining = True
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._until_drained())
        _say(f"draining: {self._gateway.life.working} requests are running")

    async def _until_drained(self) -> None:
        life = self._gateway.life
        try:
            await asyncio.wait_for(life.drained(), self._drain_seconds)
        except asyncio.TimeoutError:
            _say(f"{life.working} requests are given up after {self._drain_seconds:g} s")
            life.abort()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(life.drained(), _LAST_SECONDS)
        self.should_exit = True


def _say(lines: str) -> None:
    """Print; whoever read what this process prints may be gone, and then nothing is lost."""
    with contextlib.suppress(BrokenPipeError):
        print(lines, flush=True)


def ready_lines(address: str, models: Sequence[ServedModel], *, keyed: bool) -> str:
    """Return the lines that are printed when the gateway is ready: its address, and a command to
    paste."""
    lines = {"openai": f"{address}/v1", "models": [model.name for model in models]}
    command = example_command(f"{address}/v1", models[0].name, keyed=keyed)
    return f"ready: {json.dumps(lines)}\ntry: {command}"


def _check_files(settings: GatewaySettings) -> None:
    """Raises ServerError that names every file that is not there."""
    problems = Problems("the gateway's files")
    names = ("chat_template", "api_keys", "tls_certificate", "tls_key")
    for name in (*names, "server_ca", "server_certificate", "server_key"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            flag = "--" + name.replace("_", "-")
            problems.add("there is no such file", got=path, change=flag)
    if settings.tokenizer_dir is not None and not Path(settings.tokenizer_dir).is_dir():
        got = settings.tokenizer_dir
        problems.add("there is no such folder", got=got, change="--tokenizer-dir")
    problems.raise_if_any(ServerError)


@contextlib.contextmanager
def _listening(settings: GatewaySettings) -> Iterator[socket.socket]:
    """The gateway's socket. Raises ServerError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        opened = socket.create_server(
            (settings.host, settings.port), family=family, backlog=_BACKLOG
        )
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code >= 0 else "the host's name stands for no address"
        raise ServerError(
            problem(
                f"cannot listen: {reason}",
                got=f"{settings.host}:{settings.port}",
                change="--host or --port",
            )
        ) from error
    with opened:
        yield opened


def _address(settings: GatewaySettings, opened: socket.socket) -> str:
    """Return the address to connect to; the machine's name instead of all interfaces."""
    port = opened.getsockname()[1]
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{host_port(host, port)}"
