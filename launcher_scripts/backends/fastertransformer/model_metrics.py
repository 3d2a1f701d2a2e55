"""What a model adds to the server's metrics: its cache of keys and values, and who left."""

from __future__ import annotations

import threading

import triton_python_backend_utils as pb_utils

from launcher_scripts.engine.engine import Engine

_SECONDS = 1.0
_TOKENS = "launcher_kv_cache_tokens"
_USED = "launcher_kv_cache_tokens_used"
_GIVEN_UP = "launcher_requests_given_up"


class ModelMetrics:
    """Two gauges of one model, brought up to date every second, and a counter."""

    def __init__(self, model: str, engine: Engine) -> None:
        gauge = pb_utils.MetricFamily.GAUGE
        self._families = [
            pb_utils.MetricFamily(name=_TOKENS, description="Tokens of the cache", kind=gauge),
            pb_utils.MetricFamily(name=_USED, description="Tokens of it in use", kind=gauge),
        ]
        self._tokens, self._used = (f.Metric(labels={"model": model}) for f in self._families)
        self._tokens.set(engine.cache_tokens)
        family = pb_utils.MetricFamily(
            name=_GIVEN_UP,
            description="Requests that were cancelled, or took longer than their timeout",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._families.append(family)
        self._given_up = family.Metric(labels={"model": model})
        self._engine = engine
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache metrics", daemon=True)
        self._thread.start()

    def count_given_up(self) -> None:
        """A request was given up, and its rows are free."""
        self._given_up.increment(1)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._used.set(self._engine.cache_tokens_used)
            if self._closing.wait(_SECONDS):
                return
