"""Metrics that a model adds to the server's; `metric_names` describes them.

The values are counted by the engine. A thread hands what has changed to the server every second:
each change of a value is a message to the server's process, too many for each token. No other
thread may: two that change a value at once send a message with memory that is freed already, and
the server dies of it.
Triton's own histograms take one value in a message, so ours are values with the names that
Prometheus gives the parts of a histogram. Triton calls them gauges: some readers put `_total` after
the names of counters (prometheus_client, OpenTelemetry), and would find no `_bucket`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from launcher_scripts.contract import metric_names as names
from launcher_scripts.engine.core.statistics import Sample
from launcher_scripts.engine.engine import Engine

_SECONDS = 1.0


class ModelMetrics:
    """One model's metrics, brought up to date every second."""

    def __init__(
        self, model: str, engine: Engine, weights: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Start from the engine's counters, so that its warm-up is left out.

        weights: gives the version and the digests of those that are served
        """
        self._model, self._engine, self._weights = model, engine, weights
        self._fingerprints: dict[str, Any] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._gauges = {metric.name: self._add(metric, metric.name) for metric in names.GAUGES}
        self._reported: dict[str, float] = {}
        self._failures = {
            reason: self._add(names.FAILURE, names.FAILURE.name, (("reason", reason),))
            for reason in (names.REJECTED, names.CANCELLED, names.FAILED)
        }
        self._failures[names.PREEMPTED.name] = self._add(names.PREEMPTED, names.PREEMPTED.name)
        metrics = {name: metric for metric in names.MODEL_METRICS for name in metric.samples}
        self._recorded: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in engine.statistics.samples():
            key = (sample.name, sample.labels)
            self._metrics[key] = self._add(metrics[sample.name], *key)
            self._recorded[key] = sample.value
        self._steps = engine.statistics.steps, engine.statistics.step_rows
        self._unsent: Counter[str] = Counter()  # failures by reason, and names.GIVEN_UP
        self._lock = threading.Lock()  # of these
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def count_failure(self, reason: str, rows: int) -> None:
        """So many rows of a request will not be answered; any thread may say so at any time.

        reason: one of metric_names' values of `reason`
        """
        with self._lock:
            self._unsent[reason] += rows
            if reason == names.CANCELLED:
                self._unsent[names.PREEMPTED.name] += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _add(
        self, metric: names.Metric, name: str, labels: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        """The server's value of that name and labels, the model's label included."""
        kind = pb_utils.MetricFamily
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(
                name=name,
                description=metric.meaning,
                kind=kind.COUNTER if metric.kind == names.COUNTER else kind.GAUGE,
            )
        return self._families[name].Metric(labels={metric.labels[0]: self._model, **dict(labels)})

    def _run(self) -> None:
        while True:
            for sample in self._engine.statistics.samples():
                self._count(sample)
            with self._lock:
                failures, self._unsent = self._unsent, Counter()
            for reason, count in failures.items():
                self._failures[reason].increment(count)
            self._show_weights()
            for name, value in self._levels().items():
                if self._reported.get(name) != value:
                    self._reported[name] = value
                    self._gauges[name].set(value)
            if self._closing.wait(_SECONDS):
                return

    def _count(self, sample: Sample) -> None:
        key = (sample.name, sample.labels)
        more = sample.value - self._recorded[key]
        if more:
            self._recorded[key] = sample.value
            self._metrics[key].increment(more)

    def _show_weights(self) -> None:
        """Let the fingerprint of the weights that are served have the value 1, others 0."""
        digests = self._weights()["digests"]
        current = digests["system_fingerprint"] if digests else "unknown"
        if self._reported.get(current):
            return
        for fingerprint, metric in self._fingerprints.items():
            self._reported[fingerprint] = 0
            metric.set(0)
        if current not in self._fingerprints:
            labels = (("system_fingerprint", current),)
            name = names.WEIGHTS_INFO.name
            self._fingerprints[current] = self._add(names.WEIGHTS_INFO, name, labels)
        self._reported[current] = 1
        self._fingerprints[current].set(1)

    def _levels(self) -> dict[str, float]:
        """The gauges' values now."""
        engine = self._engine
        used, capacity = engine.cache_tokens_used, engine.cache_tokens
        before, self._steps = self._steps, (engine.statistics.steps, engine.statistics.step_rows)
        steps, rows = (now - then for now, then in zip(self._steps, before, strict=True))
        return {
            names.RUNNING.name: engine.rows_running,
            names.WAITING.name: engine.rows_queued,
            names.CACHE_USE.name: used / capacity if capacity else 0.0,
            names.BATCH.name: rows / steps if steps else 0.0,
            names.CACHE_TOKENS.name: capacity,
            names.CACHE_USED.name: used,
            names.WEIGHTS_VERSION.name: self._weights()["version"],
        }
