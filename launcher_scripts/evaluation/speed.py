"""Speed of a served model: a sweep over batch sizes and input and output lengths.

An encoder alone generates nothing: it is asked for its states, of every input length once.

Every measurement sends one request of `batch_size` rows after the other and waits for each, so a
latency is what a lone client sees. Token ids are random but the same in every run, and min_length
makes every row generate all its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from launcher_scripts.common.errors import ConfigError, ServerError, problem
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters

Generate = Callable[[Sequence[GenerateRequest]], list[GenerateOutput]]


@dataclass(frozen=True)
class SpeedRow:
    """One measurement; latencies in milliseconds per request, lengths in tokens per row.

    output_len: 0 for an encoder
    tokens_per_second: generated tokens of all requests, an encoder's input tokens, over the time
                       that they took together
    """

    batch_size: int
    input_len: int
    output_len: int
    requests: int
    latency_mean_ms: float
    latency_p50_ms: float
    latency_p90_ms: float
    latency_p99_ms: float
    tokens_per_second: float


def sweep(
    settings: BenchmarkSettings,
    vocab_size: int,
    generate: Generate,
    clock: Callable[[], float] = time.perf_counter,
    first: int = 0,
    *,
    encodes: bool = False,
) -> Iterator[SpeedRow]:
    """A row for every batch size with every pair of lengths, in the settings' order.

    first:   the number of rows that are there already
    encodes: the model is an encoder alone
    Raises ServerError when a row comes back shorter than asked for.
    """
    lengths = settings.lengths
    if encodes:
        lengths = tuple(dict.fromkeys((input_len, 0) for input_len, _ in lengths))
    points = list(product(lengths, settings.batch_sizes))
    for (input_len, output_len), batch_size in points[first:]:
        random = np.random.default_rng([batch_size, input_len, output_len])
        latencies = []
        for index in range(settings.warmup + settings.requests):
            rows = random_rows(random, batch_size, input_len, output_len, vocab_size)
            start = clock()
            outputs = generate(rows)
            elapsed = clock() - start
            if encodes:
                result = {len(output.hidden_state) for output in outputs}
                _check_lengths(result, input_len, f"give states of {input_len} tokens")
            else:
                result = {len(output.output_ids) for output in outputs}
                _check_lengths(result, output_len, f"generate {output_len} tokens")
            if index >= settings.warmup:
                latencies.append(elapsed)
        yield _row(batch_size, input_len, output_len, latencies)


def random_rows(
    random: np.random.Generator, batch_size: int, input_len: int, output_len: int, vocab_size: int
) -> list[GenerateRequest]:
    """`batch_size` greedy rows of random ids that cannot end before `output_len` tokens.

    With an output_len of 0 they ask an encoder for its states.
    """
    ids = random.integers(0, vocab_size, size=(batch_size, input_len))  # [B, S]
    sampling = SamplingParameters(min_length=output_len)
    return [
        GenerateRequest(
            tuple(int(token) for token in row),
            output_len,
            sampling,
            return_hidden_state=output_len == 0,
        )
        for row in ids
    ]


def check_batch_sizes(settings: BenchmarkSettings, max_batch_size: int) -> None:
    """Raises ConfigError when the model does not take that many rows in one request."""
    too_large = [size for size in settings.batch_sizes if size > max_batch_size]
    if too_large:
        raise ConfigError(
            problem(
                f"the served model takes at most {max_batch_size} rows in one request",
                got=too_large,
                change="evaluate.benchmark.batch_sizes, or export with a larger "
                "export.triton_deployment.max_batch_size",
            )
        )


def _check_lengths(lengths: set[int], expected: int, task: str) -> None:
    if lengths != {expected}:
        raise ServerError(problem(f"the server did not {task} per row", got=sorted(lengths)))


def _row(batch_size: int, input_len: int, output_len: int, latencies: Sequence[float]) -> SpeedRow:
    milliseconds = np.array(latencies) * 1000
    p50, p90, p99 = (float(value) for value in np.percentile(milliseconds, [50, 90, 99]))
    return SpeedRow(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        requests=len(latencies),
        latency_mean_ms=float(milliseconds.mean()),
        latency_p50_ms=p50,
        latency_p90_ms=p90,
        latency_p99_ms=p99,
        tokens_per_second=batch_size
        * (output_len or input_len)
        * len(latencies)
        / float(sum(latencies)),
    )
