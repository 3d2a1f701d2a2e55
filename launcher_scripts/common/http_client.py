"""HTTP requests to a server. One that is unreachable, or answers without HTTP, is an OSError."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

UNIX = "unix:"  # prefix of an address that is the path of a socket


class HttpClient:
    """Requests to one server over one connection, which is opened anew after an error."""

    def __init__(
        self,
        address: str,
        timeout: float,
        *,
        tls: ssl.SSLContext | None = None,
        use_proxies: bool = False,
    ) -> None:
        """address:     http(s)://host:port/path, host:port (without TLS), or unix:PATH
        timeout:     seconds that the server may be silent
        tls:         trusted certificates, for https; None: the system's
        use_proxies: of the environment
        Raises OSError if the address is invalid.
        """
        import httpx  # takes a fifth of a second, which commands without a request do not need

        transport, url = None, address if "://" in address else f"http://{address}"
        if tls is None and url.startswith("https:"):
            tls = ssl.create_default_context()
        if address.startswith(UNIX):
            transport, url = httpx.HTTPTransport(uds=address[len(UNIX) :]), "http://localhost"
        try:
            self._client = httpx.Client(
                base_url=url,
                timeout=timeout,
                transport=transport,
                verify=tls or False,
                trust_env=use_proxies,
                headers={"Accept-Encoding": "identity"},
            )
        except httpx.InvalidURL as error:
            raise ConnectionError(f"{address}: {error}") from error

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: Any = None,
        max_bytes: float = float("inf"),
    ) -> tuple[int, str]:
        """Return the status and the text of the response.

        body: of JSON
        max_bytes: of the text, after which no more is read
        """
        import httpx

        try:
            with self._client.stream(method, path, headers=headers, json=body) as response:
                content = bytearray()
                for block in response.iter_bytes() if max_bytes else ():
                    content += block
                    if len(content) >= max_bytes:
                        break
                return response.status_code, content.decode("utf-8", "replace")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _os_error(error) from None


def query(
    address: str,
    path: str,
    timeout: float,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
    body: Any = None,
    max_bytes: float = float("inf"),
    tls: ssl.SSLContext | None = None,
) -> tuple[int, str]:
    """Return the status and the text of one response; arguments are those of HttpClient."""
    with HttpClient(address, timeout, tls=tls) as client:
        return client.request(method, path, headers=headers, body=body, max_bytes=max_bytes)


def any_certificate(*protocols: str) -> ssl.SSLContext:
    """TLS of a client that has no certificate and checks none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def _os_error(error: Exception) -> OSError:
    """Return the system's error that caused `error`, in whose words it is clearest."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return ConnectionError(f"{type(error).__name__}: {error}")
