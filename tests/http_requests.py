"""HTTP requests of the tests, which no proxy of the environment gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT, POLL_TIMEOUT = 300.0, 60.0
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def open_client(timeout: float = TIMEOUT) -> httpx.Client:
    return httpx.Client(timeout=timeout, trust_env=False, verify=False)


def _arguments(
    url: str, body: Any, key: str | None, headers: Mapping[str, str], method: str | None
) -> dict[str, Any]:
    content = {} if body is None else {"content" if isinstance(body, bytes) else "json": body}
    return {
        "method": method or ("GET" if body is None else "POST"),
        "url": url if "://" in url else f"http://{url}",
        "headers": {**headers, **({"Authorization": f"Bearer {key}"} if key else {})},
        **content,
    }


def send(
    url: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
    method: str | None = None,
    timeout: float = TIMEOUT,
) -> httpx.Response:
    """Send a GET request, or a POST request of `body`: bytes, or what becomes JSON."""
    with open_client(timeout) as client:
        return client.request(**_arguments(url, body, key, headers, method))


def receive(url: str, body: Any = None, *, key: str | None = None) -> Any:
    """Return the JSON of a response with status 200."""
    return send(url, body, key=key).raise_for_status().json()


def is_served(url: str, body: Any = None, *, key: str | None = None) -> bool:
    """Return whether the response has status 200; False if the server is unreachable."""
    try:
        return send(url, body, key=key, timeout=POLL_TIMEOUT).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def stream(url: str, body: Any, *, key: str | None = None) -> Iterator[Iterator[str]]:
    """The texts of a stream of events after its first, which has arrived."""
    with (
        open_client() as client,
        client.stream(**_arguments(url, body, key, NO_HEADERS, None)) as response,
    ):
        texts = response.iter_text()
        assert response.status_code == 200 and next(texts).startswith("data: ")
        yield texts


def metric_families(url: str, *, key: str | None = None) -> dict[str, Metric]:
    """The metrics at an address as Prometheus' own client library reads them, by name."""
    text = send(url, key=key).raise_for_status().text
    return {family.name: family for family in text_string_to_metric_families(text)}
