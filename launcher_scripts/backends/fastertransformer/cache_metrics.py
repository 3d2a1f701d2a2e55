"""How full a model's cache of keys and values is, among the server's metrics."""

from __future__ import annotations

import threading

import triton_python_backend_utils as pb_utils

from launcher_scripts.engine.engine import Engine

_SECONDS = 1.0
_TOKENS = "launcher_kv_cache_tokens"
_USED = "launcher_kv_cache_tokens_used"


class CacheMetrics:
    """Two gauges of one model, brought up to date every second."""

    def __init__(self, model: str, engine: Engine) -> None:
        gauge = pb_utils.MetricFamily.GAUGE
        self._families = [
            pb_utils.MetricFamily(name=_TOKENS, description="Tokens of the cache", kind=gauge),
            pb_utils.MetricFamily(name=_USED, description="Tokens of it in use", kind=gauge),
        ]
        self._tokens, self._used = (f.Metric(labels={"model": model}) for f in self._families)
        self._tokens.set(engine.cache_tokens)
        self._engine = engine
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._used.set(self._engine.cache_tokens_used)
            if self._closing.wait(_SECONDS):
                return
