"""The middleware of every request: its id, its API key, its size, and its line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launcher_scripts.common.tokenizer import TokenizationError
from launcher_scripts.config.gateway import OPEN_PATHS
from launcher_scripts.gateway.api_errors import (
    ApiError,
    aborted,
    bad_request,
    busy,
    cancelled,
    unavailable,
)
from launcher_scripts.gateway.generation import RequestRecord

LOG = logging.getLogger("gateway")
Result = TypeVar("Result")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_LEFT = 499  # the client has gone; nobody reads it
MAX_BODIES = 256  # the bodies of one client together are not larger than so many of the largest
_MAX_WARNING = 1000  # characters
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


@dataclass
class Lifecycle:
    """The gateway's state: whether it accepts new work, and how much it has.

    draining: it is about to end
    over:     what still ran then has had its time
    """

    draining: bool = False
    over: bool = False
    working: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _limited: dict[asyncio.Future[Any], RequestRecord] = field(default_factory=dict)

    def enter(self) -> None:
        """Begin a request that generates. Raises ApiError while the gateway drains."""
        if self.draining:
            raise unavailable("the gateway is about to end and takes no new requests", 5)
        self.working += 1
        self.idle.clear()

    def leave(self) -> None:
        self.working -= 1
        if not self.working:
            self.idle.set()

    @contextlib.contextmanager
    def limited(self, task: asyncio.Future[Any] | None, record: RequestRecord) -> Iterator[None]:
        """Inside, the task makes an answer, and is cancelled when the time is over, or when the
        request of this record is cancelled.
        """
        if task is None:
            yield
            return
        self._limited[task] = record
        if self.error(record) is not None:
            task.cancel()
        try:
            yield
        finally:
            del self._limited[task]

    def error(self, record: RequestRecord) -> ApiError | None:
        """Returns the reason for which a request was ended before its answer was complete."""
        if record.cancelled:
            return cancelled()
        return aborted() if self.over else None

    def cancel(self, record: RequestRecord) -> None:
        """End one request."""
        record.cancelled = True
        for task in [task for task, item in self._limited.items() if item is record]:
            task.cancel()

    def abort(self) -> None:
        """End the requests that are still running; each client is told so."""
        self.over = True
        for task in self._limited:
            task.cancel()

    async def drained(self) -> None:
        """Wait until nothing is at work."""
        if self.working:
            await self.idle.wait()


async def unless_left(request: Request, life: Lifecycle, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. It is cancelled when the client goes or cancels it, or when the
    gateway's time is over.

    Raises ClientDisconnect and ApiError then.
    """
    record: RequestRecord = request.state.record
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(request))
    try:
        with life.limited(working, record):
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise life.error(record) or aborted()
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Keys:
    """API keys by the names of their owners; without any, everybody may ask."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}

    def owner(self, headers: Headers) -> str | None:
        """Whose key the request has; None: there are no keys. Raises ApiError for another one.

        All keys are compared, in constant time.
        """
        if not self._digests:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # Anthropic's clients
        digest = _digest(key.strip())
        names = [name for name, item in self._digests.items() if hmac.compare_digest(item, digest)]
        if not names:
            raise ApiError(
                401,
                "the key is missing or wrong: Authorization: Bearer <key>, or X-Api-Key: <key>",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return names[0]


class Browsers:
    """Web pages that may send requests if no key is needed.

    A browser sends what any page asks it to, and its name for an address can be made to mean
    another one (DNS rebinding). Such a name has a dot; an address cannot be made to mean another.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """hosts: names of the gateway; origins: of pages that may send requests"""
        names = (*hosts, socket.gethostname(), socket.getfqdn())
        self._hosts = {name.lower().rstrip(".") for name in names}
        self._origins = frozenset(origins)

    def check(self, headers: Headers) -> None:
        """Raises ApiError for a page of somebody else."""
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_own(_host_name(host)):
                raise _foreign("Host", host, "--allowed-hosts")
        for origin in headers.getlist("origin"):
            named = self._origins & {origin, "*"} or _host_name(origin) in self._hosts
            if not named and origin.partition("://")[2] not in hosts:
                raise _foreign("Origin", origin, "--cors-origins")

    def _is_own(self, name: str) -> bool:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return "." not in name or name in self._hosts or name.endswith(".localhost")


def _host_name(value: str) -> str:
    """The host of `host:port`, or of `scheme://host:port`."""
    try:
        return (urlsplit(f"//{value.partition('://')[2] or value}").hostname or "").rstrip(".")
    except ValueError:
        return value


def _foreign(header: str, value: str, flag: str) -> ApiError:
    message = f"{header} {_field(value)} is not one of this gateway's; {flag} allows it"
    return ApiError(403, message, code="forbidden_origin")


class RequestMiddleware:
    """Gives a request its Record, checks its key, logs and counts how it ended."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        browsers: Browsers,
        count: Callable[[str, RequestRecord, int], None],
    ) -> None:
        """browsers: asked where there are no keys
        count: is told the path, the Record and the status of every answer
        """
        self._app = app
        self._keys = keys
        self._browsers = browsers
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A redirect would name the address and the scheme that this process sees, not the proxy's.
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = Headers(scope=scope)
        values = headers.get("x-request-id", "")
        request_id = values if _REQUEST_ID.fullmatch(values) else uuid.uuid4().hex
        address = _field((scope.get("client") or ("-",))[0])
        record = RequestRecord(request_id, address, received=time.monotonic())
        scope.setdefault("state", {})["record"] = record
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["X-Request-Id"] = request_id
                if record.warnings:
                    response_headers["X-Warning"] = _header(record.warnings)
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                record.owner = self._keys.owner(headers)
                if record.owner is None:
                    self._browsers.check(headers)
                record.client = record.owner or address
            await self._app(scope, receive, tagged)
        except ApiError as error:
            await refusal(error)(scope, receive, tagged)
        except TokenizationError as error:  # of a text in a parameter other than the prompt
            if status:
                raise
            await refusal(bad_request(str(error)))(scope, receive, tagged)
        except ClientDisconnect:
            if not status:
                left = ApiError(_LEFT, "the client closed the connection", code="client_left")
                await refusal(left)(scope, receive, tagged)
        except Exception:
            LOG.exception("request_id=%s failed", request_id)
            if status:  # half of an answer is out; the connection is closed
                raise
            failed = ApiError(500, "the gateway failed; see its log", code="internal_error")
            await refusal(failed)(scope, receive, tagged)
        finally:
            self._log(scope, record, status)
            self._count(scope["path"], record, status)

    @staticmethod
    def _log(scope: Scope, record: RequestRecord, status: int) -> None:
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
        LOG.log(
            level,
            "request_id=%s client=%s %s %s status=%d seconds=%.3f model=%s prompt_tokens=%d "
            "generated_tokens=%d",
            record.request_id,
            record.client,
            scope["method"],
            _field(scope["path"]),
            status,
            time.monotonic() - record.received,
            record.model or "-",
            record.prompt_tokens,
            record.generated_tokens,
        )


class BodyBudget:
    """Bytes of bodies that the requests of each client have in memory."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of one client"""
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    def add(self, record: RequestRecord, size: int) -> None:
        """Count a part of a request's body. Raises ApiError where the client has too many."""
        count = self._bytes[record.client]
        if count + size > self._max_bytes:
            raise busy(f"the bodies of this client's requests have {count} bytes; send fewer")
        self._bytes[record.client] += size
        record.body_size += size

    def remove(self, record: RequestRecord) -> None:
        """The request has ended."""
        self._bytes[record.client] -= record.body_size
        if not self._bytes[record.client]:
            del self._bytes[record.client]
        record.body_size = 0


async def read_body(request: Request, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """The body of a request. Raises ApiError for one that is compressed or too large.

    count: is told the size of each part, and may raise ApiError
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        message = f"the body must not be compressed; got Content-Encoding {coding[:50]!r}"
        raise ApiError(400, message, code="unsupported_encoding")
    too_large = ApiError(
        413, f"the body is larger than {max_bytes} bytes; change --max-body", code="body_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        count(len(part))
        parts.append(part)
    return b"".join(parts)


def refusal(error: ApiError) -> JSONResponse:
    """The error as a response."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _field(text: str) -> str:
    """A client's text as one field of a log's line: without blanks, controls and its end."""
    return ascii(text)[1:-1].replace(" ", "\\x20")[:200]


def _header(warnings: Sequence[str]) -> str:
    """Texts that may have a client's words, as one header."""
    text = "; ".join(warnings)[:_MAX_WARNING]
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)[:_MAX_WARNING]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
