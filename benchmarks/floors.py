"""The least time that a request can take: bytes to read, operations to do, sums to exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.recorded import result
from benchmarks.shapes import Case
from launcher_scripts.checkpoint.fastertransformer.folder import shard_files
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

BYTES = 2  # of a bfloat16
GPUS_OF_NODE = 8
BETWEEN_NODES = (30e-6, 50e9)  # seconds of a small sum, bytes per second: assumed


@dataclass(frozen=True)
class Rates:
    """What the GPU was measured to do: bytes and operations per second."""

    read_bytes: float
    operations: float

    def seconds(self, weights: float, read: float, tokens: int) -> float:
        """For `weights` numbers applied to `tokens` tokens, and `read` more numbers."""
        return max(
            (weights + read) * BYTES / self.read_bytes, 2 * weights * tokens / self.operations
        )


def floor_ms(config: GPTConfig | T5Config, case: Case, rates: Rates) -> float:
    """Weights are read once for all rows of a step, keys and values once per row and step."""
    parts = _t5(config, case, rates) if isinstance(config, T5Config) else _gpt(config, case, rates)
    return sum(parts) * 1e3


def planned_ms(
    config: GPTConfig, case: Case, rates: Rates, tp_size: int, exchange: Callable[[int], float]
) -> float:
    """The floor divided over `tp_size` GPUs, and what their sums take.

    exchange: bytes of a sum over all GPUs -> seconds. A layer has two, and the head's choice is one
    """
    alone = floor_ms(config, case, rates)
    if tp_size == 1:
        return alone
    row = case.rows * config.hidden_size * BYTES
    prompt = 2 * config.num_layers * exchange(case.input * row)
    steps = (case.output - 1) * 2 * config.num_layers * exchange(row)
    return alone / tp_size + (prompt + steps + case.output * exchange(0)) * 1e3


def within_node(microseconds_by_bytes: Mapping[str, float]) -> Callable[[int], float]:
    """Seconds of a sum by its bytes, between the sizes that were measured."""
    sizes = sorted(map(int, microseconds_by_bytes))
    times = [microseconds_by_bytes[str(size)] * 1e-6 for size in sizes]
    return lambda size: float(np.interp(size, sizes, times))


def between_nodes(latency: float, bytes_per_second: float) -> Callable[[int], float]:
    """Seconds of a sum whose bytes go out and come back over each GPU's network adapter."""
    return lambda size: latency + 2 * size / bytes_per_second


def exchange_of(tp_size: int) -> Callable[[int], float]:
    """Seconds of a sum over so many GPUs: as measured within a node, else as assumed."""
    if tp_size > GPUS_OF_NODE:
        return between_nodes(*BETWEEN_NODES)
    rows = result("tensor-parallel")["sums"]
    sums = {row["tp_size"]: row["microseconds_by_bytes"] for row in rows}
    return within_node(sums[min(max(sums), max(2, tp_size))]["shared memory"])


def _gpt(config: GPTConfig, case: Case, rates: Rates) -> tuple[float, float]:
    """Seconds of the prompt, which gives the first token, and of the other steps."""
    layers = numbers(config, lambda name: name.startswith("layers."))
    head = config.vocab_size * config.hidden_size
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_size
    prompt = rates.seconds(layers, 0, case.rows * case.input) + rates.seconds(head, 0, case.rows)
    context = case.input + case.output / 2
    step = rates.seconds(layers + head, case.rows * context * cached, case.rows)
    return prompt, (case.output - 1) * step


def _t5(config: T5Config, case: Case, rates: Rates) -> tuple[float, float]:
    """Seconds of the encoder with the source's keys and values, and of the decoder's steps."""
    source = numbers(config, _reads_source)
    decoder = numbers(config, lambda name: name.startswith("decoder.") and not _reads_source(name))
    head = config.vocab_size * config.hidden_size
    cached = 2 * config.num_decoder_layers * config.inner_size
    context = case.input + case.output / 2
    step = rates.seconds(decoder + head, case.rows * context * cached, case.rows)
    return rates.seconds(source, 0, case.rows * case.input), case.output * step


def _reads_source(name: str) -> bool:
    return name.startswith("encoder.") or name.endswith(
        ("EncDecAttention.k.weight", "EncDecAttention.v.weight")
    )


def numbers(config: GPTConfig | T5Config, chosen: Callable[[str], bool]) -> int:
    """How many numbers the required tensors of chosen names have."""
    return sum(
        math.prod(file.spec.shape_on(config, 1))
        for file in shard_files(config, 1)
        if file.spec.required and chosen(file.spec.name)
    )
