"""The metrics of a served model, which Triton shows to Prometheus at /metrics, and the gateway's.

Names, labels and the bounds of buckets are vLLM's (V1, vllm/v1/metrics/loggers.py) wherever the
meaning is: `vllm:` has become `launcher_`. Histograms have some more, lower bounds.
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
STOP, LENGTH = "stop", "length"  # values of finished_reason
REJECTED, CANCELLED, FAILED = "refused", "cancelled", "failed"  # values of reason

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(map(float, (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)))


class MetricSpec(NamedTuple):
    """One metric; a histogram is shown as the values `_bucket`, `_sum` and `_count`.

    buckets: the upper bounds of a histogram's, but for the last, which has none
    """

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """The names under which Prometheus has its values."""
        if self.kind != HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


_LABEL = r'[A-Za-z_]\w*="(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"([A-Za-z_:][\w:]*)(?:\{{((?:{_LABEL},? ?)*)\}})? (\S+)((?: \d+)?)", re.ASCII
)


class MetricSample(NamedTuple):
    """One line of Prometheus' text format, of which `labels` and `value` are as written.

    time: a space and the milliseconds, or empty
    """

    name: str
    labels: str
    value: str
    time: str = ""


def parse_sample(line: str) -> MetricSample | None:
    """Return the sample of a line of Prometheus' text format; None for any other line."""
    match = _SAMPLE.fullmatch(line.strip())
    return None if match is None else MetricSample(*match.groups(""))


def parse_values(text: str) -> dict[str, list[float]]:
    """Return the values of all samples in Prometheus' text format, by the names of their metrics.

    Other lines are skipped: at the address of a server that ended there may be any other one.
    """
    values: dict[str, list[float]] = {}
    for sample in filter(None, map(parse_sample, text.splitlines())):
        with contextlib.suppress(ValueError):
            values.setdefault(sample.name, []).append(float(sample.value))
    return values


FIRST_TOKEN = MetricSpec(
    "launcher_time_to_first_token_seconds",
    HISTOGRAM,
    "Seconds from a row's arrival to its first token",
    buckets=_FIRST_TOKEN_SECONDS,
)
INTER_TOKEN = MetricSpec(
    "launcher_inter_token_latency_seconds",
    HISTOGRAM,
    "Seconds between two tokens of a row",
    buckets=_TOKEN_SECONDS,
)
REQUEST = MetricSpec(
    "launcher_e2e_request_latency_seconds",
    HISTOGRAM,
    "Seconds from a row's arrival to its end",
    buckets=_REQUEST_SECONDS,
)
QUEUE = MetricSpec(
    "launcher_request_queue_time_seconds",
    HISTOGRAM,
    "Seconds that a row waited for its place",
    buckets=_REQUEST_SECONDS,
)
PREFILL = MetricSpec(
    "launcher_request_prefill_time_seconds",
    HISTOGRAM,
    "Seconds from when a row got its place to its first token",
    buckets=_REQUEST_SECONDS,
)
STEP_TOKENS = MetricSpec(
    "launcher_iteration_tokens_total",
    HISTOGRAM,
    "Tokens that a step computed, those of prompts included",
    buckets=_STEP_TOKENS,
)
PROMPT_TOKENS = MetricSpec(
    "launcher_prompt_tokens_total", COUNTER, "Prompt tokens of the rows that got a place"
)
GENERATION_TOKENS = MetricSpec("launcher_generation_tokens_total", COUNTER, "Tokens generated")
PREFIX_QUERIES = MetricSpec(
    "launcher_prefix_cache_queries_total", COUNTER, "Prompt tokens of rows that may share them"
)
PREFIX_HITS = MetricSpec(
    "launcher_prefix_cache_hits_total",
    COUNTER,
    "Those of them that were not computed",
)
PREEMPTIONS = MetricSpec(
    "launcher_num_preemptions_total",
    COUNTER,
    "Rows that gave their cache tokens up for others and were computed again later",
)
DRAFT_TOKENS = MetricSpec(
    "launcher_spec_decode_num_draft_tokens_total", COUNTER, "Tokens of drafts that were tried"
)
ACCEPTED_TOKENS = MetricSpec(
    "launcher_spec_decode_num_accepted_tokens_total",
    COUNTER,
    "Those of them that came",
)
SUCCESS = MetricSpec(
    "launcher_request_success_total",
    COUNTER,
    "Rows that were answered, by what ended them",
    ("model_name", "finished_reason"),
)
FAILURE = MetricSpec(
    "launcher_request_failure_total",
    COUNTER,
    "Rows that were not answered, by why",
    ("model_name", "reason"),
)
RUNNING = MetricSpec("launcher_num_requests_running", GAUGE, "Rows that run")
WAITING = MetricSpec("launcher_num_requests_waiting", GAUGE, "Rows that wait for a place")
CACHE_USE = MetricSpec(
    "launcher_kv_cache_usage_perc", GAUGE, "Share of the cache in use; 1: all of it"
)
BATCH = MetricSpec("launcher_batch_size", GAUGE, "Rows per step, on average over the last second")
CACHE_TOKENS = MetricSpec("launcher_kv_cache_tokens", GAUGE, "Tokens of the cache", ("model",))
CACHE_USED = MetricSpec("launcher_kv_cache_tokens_used", GAUGE, "Tokens of it in use", ("model",))
PREEMPTED = MetricSpec(
    "launcher_requests_given_up",
    COUNTER,
    "Requests that were cancelled, or took longer than their timeout",
    ("model",),
)

WEIGHTS_VERSION = MetricSpec(
    "launcher_weights_version", GAUGE, "How often the weights were exchanged since the start"
)
WEIGHTS_INFO = MetricSpec(
    "launcher_weights_info",
    GAUGE,
    "1 for the fingerprint of the weights that are served, 0 for those before",
    ("model_name", "system_fingerprint"),
)

HISTOGRAMS = (FIRST_TOKEN, INTER_TOKEN, REQUEST, QUEUE, PREFILL, STEP_TOKENS)
COUNTERS = (
    *(PROMPT_TOKENS, GENERATION_TOKENS, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS),
    *(DRAFT_TOKENS, ACCEPTED_TOKENS, SUCCESS, FAILURE, PREEMPTED),
)
GAUGES = (RUNNING, WAITING, CACHE_USE, BATCH, CACHE_TOKENS, CACHE_USED, WEIGHTS_VERSION)
MODEL_METRICS = (*HISTOGRAMS, *COUNTERS, *GAUGES, WEIGHTS_INFO)

GATEWAY_REQUESTS = MetricSpec(
    "launcher_gateway_requests_total",
    COUNTER,
    "Requests by route and status; 499: the client left",
    ("route", "status"),
)
GATEWAY_FIRST_TOKEN = MetricSpec(
    "launcher_gateway_time_to_first_token_seconds",
    HISTOGRAM,
    "Seconds from a request's arrival to its first token",
    buckets=_FIRST_TOKEN_SECONDS,
)
GATEWAY_REQUEST = MetricSpec(
    "launcher_gateway_e2e_request_latency_seconds",
    HISTOGRAM,
    "Seconds from a request's arrival to the end of its answer",
    buckets=_REQUEST_SECONDS,
)
GATEWAY_PROMPT_TOKENS = MetricSpec(
    "launcher_gateway_prompt_tokens_total", COUNTER, "Prompt tokens of answered requests"
)
GATEWAY_GENERATION_TOKENS = MetricSpec(
    "launcher_gateway_generation_tokens_total", COUNTER, "Tokens generated for clients"
)
GATEWAY_WORKING = MetricSpec(
    "launcher_gateway_requests_running", GAUGE, "Requests that are being answered", ()
)
GATEWAY_RUNNING = MetricSpec(
    "launcher_gateway_rows_running", GAUGE, "Rows that the servers were given", ()
)
GATEWAY_WAITING = MetricSpec("launcher_gateway_rows_waiting", GAUGE, "Rows that wait for that", ())
GATEWAY_METRICS = (
    GATEWAY_REQUESTS,
    GATEWAY_FIRST_TOKEN,
    GATEWAY_REQUEST,
    GATEWAY_PROMPT_TOKENS,
    GATEWAY_GENERATION_TOKENS,
    GATEWAY_WORKING,
    GATEWAY_RUNNING,
    GATEWAY_WAITING,
)
