"""What a running server says of itself over HTTP: whether it is ready, and how busy it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.http_answer import ask
from launcher_scripts.config.security import read_keys
from launcher_scripts.contract import metric_names as names

_SECONDS = 2.0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_GIB = 2.0**30

GPU_USE, GPU_USED, GPU_TOTAL = (
    f"nv_gpu_{name}" for name in ("utilization", "memory_used_bytes", "memory_total_bytes")
)


@dataclass(frozen=True)
class Load:
    """How busy a server is; None for what it does not say.

    gpu_use:  mean share of the GPUs' time, 0 to 1
    gpu_used, gpu_total: bytes of memory of all GPUs
    kv_use:   share of the caches' tokens that hold keys and values, 0 to 1
    requests: rows answered since the start
    running, waiting: rows that run, and that wait for a place
    """

    gpu_use: float | None = None
    gpu_used: float | None = None
    gpu_total: float | None = None
    kv_use: float | None = None
    requests: int | None = None
    running: int | None = None
    waiting: int | None = None

    def gpu_text(self) -> str:
        if self.gpu_total is None or self.gpu_used is None:
            return ""
        share = "" if self.gpu_use is None else f"{self.gpu_use:.0%} "
        return f"{share}{self.gpu_used / _GIB:.1f}/{self.gpu_total / _GIB:.1f} GiB"

    def kv_text(self) -> str:
        return "" if self.kv_use is None else f"{self.kv_use:.0%}"

    def rows_text(self) -> str:
        """Rows that run, and where some wait, how many."""
        if self.running is None:
            return ""
        return f"{self.running}+{self.waiting}" if self.waiting else str(self.running)


def is_ready(ready: Mapping[str, Any]) -> bool | None:
    """Whether the server of a ready file has loaded every model; None: nobody here can ask it.

    A closed server is asked through its gateway.
    """
    if "http" in ready:
        return _answer(str(ready["http"]), "/v2/health/ready") is not None
    address = _gateway(ready)
    return None if address is None else _answer(address, "/ready") is not None


def load_of(ready: Mapping[str, Any]) -> Load:
    """The load of the server of a ready file.

    A closed server is asked through its gateway, with the first of its keys, where they may be
    read.
    """
    if "metrics" in ready:
        return load(str(ready["metrics"]))
    address = _gateway(ready)
    if address is None or "api_keys" not in ready:
        return Load()
    try:
        keys = read_keys(Path(str(ready["api_keys"])), "deploy.gateway.api_keys")
    except (OSError, ServerError):  # another user's
        return Load()
    headers = {"Authorization": f"Bearer {next(iter(keys.values()))}"}
    return load(address, "/servers/metrics", headers)


def load(address: str, path: str = "/metrics", headers: Mapping[str, str] = _NO_HEADERS) -> Load:
    """The load of the server whose metrics are at host:port."""
    text = _answer(address, path, headers)
    return Load() if text is None else parse_load(text)


def _gateway(ready: Mapping[str, Any]) -> str | None:
    """host:port of a server's gateway; None: it has none, or one that speaks TLS."""
    scheme, _, address = str(ready.get("openai", "")).partition("://")
    if scheme != "http" or "ranks" not in ready:  # a gateway's job has none
        return None
    return address.partition("/")[0]


def parse_load(text: str) -> Load:
    """The load in Prometheus' text format; samples of several GPUs and models are combined."""
    samples: dict[str, list[float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line.strip())
        if found:
            with suppress(ValueError):  # the address may be another server's by now
                value = float(found["value"])
                samples.setdefault(found["name"], []).append(value)

    def total(name: str) -> float | None:
        return sum(samples[name]) if name in samples else None

    def count(metric: names.Metric) -> int | None:
        found = total(metric.name)
        return None if found is None else int(found)

    use, tokens = samples.get(GPU_USE), total(names.CACHE_TOKENS.name)
    used_tokens = total(names.CACHE_USED.name)
    return Load(
        gpu_use=sum(use) / len(use) if use else None,
        gpu_used=total(GPU_USED),
        gpu_total=total(GPU_TOTAL),
        kv_use=used_tokens / tokens if tokens and used_tokens is not None else None,
        requests=count(names.SUCCESS),
        running=count(names.RUNNING),
        waiting=count(names.WAITING),
    )


def _answer(address: str, path: str, headers: Mapping[str, str] = _NO_HEADERS) -> str | None:
    """What a server says; None where it does not, or not with status 200."""
    try:
        status, text = ask(address, path, _SECONDS, headers=headers)
    except OSError:
        return None
    return text if status == 200 else None
