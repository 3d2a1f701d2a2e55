"""Metrics of the gateway and of its servers for Prometheus; metric_names describes them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from launcher_scripts.common.http_client import query
from launcher_scripts.contract import metric_names as names
from launcher_scripts.gateway.generation import RequestRecord

_OTHER = "other"
_SERVER_SECONDS = 2.0  # for a server's answer
_HEAD = re.compile(r"(# (?:HELP|TYPE)) (\S+)")
MAX_CLIENTS = 1000
_OTHER_CLIENTS = "(others)"


@dataclass
class ClientUsage:
    """The use of the models by one client. last_seen: in seconds since 1970"""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    last_seen: float = 0.0

    def add(self, other: ClientUsage) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens
        self.last_seen = max(self.last_seen, other.last_seen)


class ClientTable:
    """The use of every client since the start, by the name of its key or by its address.

    The MAX_CLIENTS that were seen last have a row of their own, all others share one.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, ClientUsage] = OrderedDict()
        self._others = ClientUsage()

    def count(self, record: RequestRecord, status: int) -> None:
        """Count a request that has reached a model."""
        if not record.model:
            return
        usage = self._clients.setdefault(record.client, ClientUsage())
        self._clients.move_to_end(record.client)
        failed, tokens = int(status >= 400), (record.prompt_tokens, record.generated_tokens)
        usage.add(ClientUsage(1, failed, *tokens, last_seen=round(time.time(), 3)))
        if len(self._clients) > MAX_CLIENTS:
            self._others.add(self._clients.popitem(last=False)[1])

    def rows(self, only: str | None = None) -> list[dict[str, Any]]:
        """Returns the rows of /clients, the latest client first. only: the name of one client"""
        rows = [
            {"client": name, **asdict(usage)}
            for name, usage in reversed(self._clients.items())
            if only in (None, name)
        ]
        if only is None and self._others.requests:
            rows.append({"client": _OTHER_CLIENTS, **asdict(self._others)})
        return rows


class Metrics:
    """The metrics of one gateway. All are written by the thread of its event loop."""

    def __init__(self, routes: Iterable[str] = ()) -> None:
        """routes: paths with a label of their own; one that ends in / has those below it, too"""
        self._routes = tuple(routes)
        self._registry = CollectorRegistry()
        self._requests = self._counter(names.GATEWAY_REQUESTS)
        self._prompt_tokens = self._counter(names.GATEWAY_PROMPT_TOKENS)
        self._generation_tokens = self._counter(names.GATEWAY_GENERATION_TOKENS)
        self._first_token = self._histogram(names.GATEWAY_FIRST_TOKEN)
        self._request = self._histogram(names.GATEWAY_REQUEST)
        self._recorded: dict[RequestRecord, int] = {}  # generated tokens of requests under way
        self.clients = ClientTable()

    def watch(self, metric: names.MetricSpec, level: Callable[[], float]) -> None:
        """Show what `level` says whenever somebody asks."""
        Gauge(metric.name, metric.meaning, registry=self._registry).set_function(level)

    def begin(self, record: RequestRecord) -> None:
        """Count the request's tokens as they come, until its answer has gone out."""
        self._recorded[record] = 0

    def count(self, path: str, record: RequestRecord, status: int) -> None:
        """The answer of a request has gone out. Times are those of requests that were answered."""
        self._requests.labels(self._route(path), str(status)).inc()
        self._count_tokens(record)
        self._recorded.pop(record, None)
        self.clients.count(record, status)
        if not record.model:
            return
        if status == 200:
            self._prompt_tokens.labels(record.model).inc(record.prompt_tokens)
            self._request.labels(record.model).observe(time.monotonic() - record.received)
        if record.first_token is not None:
            self._first_token.labels(record.model).observe(record.first_token - record.received)

    def response(self) -> Response:
        """All of them, in Prometheus' text format."""
        for record in self._recorded:
            self._count_tokens(record)
        text = generate_latest(self._registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _route(self, path: str) -> str:
        """The label of a path; those that are no routes may be made up, and share one."""
        if path in self._routes:
            return path
        parents = (route for route in self._routes if route.endswith("/") and route != "/")
        return next((parent for parent in parents if path.startswith(parent)), _OTHER)

    def _count_tokens(self, record: RequestRecord) -> None:
        """Count the tokens since the last call; none if a row has restarted."""
        before = self._recorded.get(record, 0)
        if record.generated_tokens > before:
            self._recorded[record] = record.generated_tokens
            self._generation_tokens.labels(record.model).inc(record.generated_tokens - before)

    def _counter(self, metric: names.MetricSpec) -> Any:
        return Counter(metric.name, metric.meaning, metric.labels, registry=self._registry)

    def _histogram(self, metric: names.MetricSpec) -> Any:
        return Histogram(
            metric.name,
            metric.meaning,
            metric.labels,
            registry=self._registry,
            buckets=metric.buckets,
        )


async def server_metrics(address: str | None) -> str:
    """A server's metrics in Prometheus' text format; nothing where it does not answer.

    address: host:port or unix:PATH
    """
    if address is None:
        return ""
    try:
        return (await asyncio.to_thread(query, address, "/metrics", _SERVER_SECONDS))[1]
    except OSError:
        return ""


def with_servers(texts: Mapping[str, str]) -> Response:
    """The metrics of several servers as one text, with the label `server`. texts: by address"""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for server, text in texts.items():
        name = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                name = head[2]
                if not any(item.startswith(head[1]) for item in heads.setdefault(name, [])):
                    heads[name].append(line)
            elif sample := names.parse_sample(line):
                labels = f'server="{server}"' + (f",{sample.labels}" if sample.labels else "")
                written = f"{sample.name}{{{labels}}} {sample.value}{sample.time}"
                samples.setdefault(name or sample.name, []).append(written)
    lines = [line for name in samples for line in (*heads.get(name, ()), *samples[name])]
    text = "".join(f"{line}\n" for line in lines)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def cache_use(text: str) -> float | None:
    """The share of a server's caches in use, all its models together, 0 to 1.

    text: its metrics, in Prometheus' text format; None where they do not say
    """
    values = names.parse_values(text)
    tokens, used = (sum(values.get(n.name, ())) for n in (names.CACHE_TOKENS, names.CACHE_USED))
    return used / tokens if tokens else None
