"""Output tokens per second beside TensorRT-LLM's published figures, the engine in this process.

    python3 -m benchmarks.published_rates --out published-rates.json [--lengths 128x128 1000x1000]

An 8B in fp8 with random weights, greedy, keys and values in fp8, as published, or in bf16
(--kv-cache-dtype auto). As many clients as the cache has room for, at most --clients, each have one
request at a time. They begin at different points of their outputs, as if they had been at it for
long: the first request of a client has part of the output in its prompt, so the time that counts
begins when all of them decode.
The published figures are of TensorRT-LLM's own batches without a server, on one H100 SXM
(https://nvidia.github.io/TensorRT-LLM/developer-guide/perf-overview.html); share is ours over them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import torch

from benchmarks.generate import bandwidths, engine_over, machine, random_weights, release
from benchmarks.peers import config_of
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.common.quantization import KV_CACHE_DTYPES
from launcher_scripts.contract.metric_names import GENERATION_TOKENS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.row import Snapshot
from launcher_scripts.engine.engine import Engine

PUBLISHED = {  # output tokens per second by tokens in and out
    (128, 128): 28_312,
    (500, 2000): 17_660,
    (1000, 1000): 15_220,
    (2048, 128): 3_450,
    (2048, 2048): 9_305,
    (20_000, 2000): 1_351,
}
MAX_ROWS, POSITIONS, POOL_TOKENS = 1024, 32_768, 100_000
ROOM = 0.92  # of the cache that the average rows take
START_SECONDS, SETTLE_SECONDS, SECONDS = 90.0, 2.0, 8.0


class Clients:
    """So many clients of an engine, each with one request at a time of `lengths` tokens.

    decoding: set when the first request of each client has had its first token
    """

    def __init__(self, engine: Engine, count: int, lengths: tuple[int, int]) -> None:
        self._engine, self._lengths = engine, lengths
        ids = np.random.default_rng(1).integers(2, engine.config.vocab_size - 2, POOL_TOKENS)
        self._pool = ids.tolist()
        self._draw = random.Random(2)
        self._missing = count
        self._futures: set[Future] = set()
        self._stops = False
        self.decoding = Event()
        for done in np.linspace(0, lengths[1] - 2, count).astype(int).tolist():
            self._submit(done, self._count)

    def _submit(self, done: int = 0, on_token: Callable[[Snapshot], None] | None = None) -> None:
        length, output_len = self._lengths[0] + done, self._lengths[1] - done
        first = self._draw.randrange(len(self._pool) - length)
        request = GenerateRequest(tuple(self._pool[first : first + length]), output_len)
        future = self._engine.submit(request, on_token)
        self._futures.add(future)
        future.add_done_callback(self._go_on)

    def _count(self, snapshot: Snapshot) -> None:
        if snapshot.tokens == 1:
            self._missing -= 1
            if not self._missing:
                self.decoding.set()

    def _go_on(self, future: Future) -> None:
        self._futures.discard(future)
        if not self._stops:
            future.result()
            self._submit()

    def stop(self) -> None:
        self._stops = True
        for future in list(self._futures):
            future.cancel()


def generated(engine: Engine) -> float:
    samples = engine.statistics.samples()
    return next(sample.value for sample in samples if sample.name == GENERATION_TOKENS.name)


def measured(engine: Engine, lengths: tuple[int, int], most: int) -> dict:
    """The figures of SECONDS. Raises RuntimeError if the clients do not all get to decode."""
    average = lengths[0] + lengths[1] / 2
    count = min(most, int(ROOM * engine.cache_tokens / average))
    begun = time.perf_counter()
    clients = Clients(engine, count, lengths)
    if not clients.decoding.wait(START_SECONDS):
        clients.stop()
        raise RuntimeError(f"{count} clients did not get their first tokens in {START_SECONDS} s")
    time.sleep(SETTLE_SECONDS)
    begin, before = time.perf_counter(), generated(engine)
    time.sleep(SECONDS)
    tokens_per_s = (generated(engine) - before) / (time.perf_counter() - begin)
    clients.stop()
    published = PUBLISHED[lengths]
    return {
        "input": lengths[0],
        "output": lengths[1],
        "clients": count,
        "tokens_per_s": round(tokens_per_s),
        "published_tokens_per_s": published,
        "share": round(tokens_per_s / published, 3),
        "begun_after_s": round(begin - begun, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = {f"{length}x{output_len}": (length, output_len) for length, output_len in PUBLISHED}
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), default="8b-modern")
    parser.add_argument("--lengths", nargs="+", choices=names, default=list(names))
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="fp8")
    parser.add_argument("--clients", type=int, default=MAX_ROWS, help="most of them")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device; the shapes are far beyond a CPU", file=sys.stderr)
        return 1
    facts: dict = {"machine": machine(), "rates": bandwidths(), "rows": []}
    release()
    config = replace(config_of(arguments.shape), max_positions=POSITIONS)
    weights = random_weights(config, quantization="fp8")
    options = {"kv_cache_dtype": arguments.kv_cache_dtype, "inter_token_target": 0.0}
    engine = engine_over(weights, arguments.clients, None, **options)
    facts |= {"shape": arguments.shape, "kv_cache_dtype": arguments.kv_cache_dtype}
    facts |= {"cache_tokens": engine.cache_tokens}
    print(json.dumps(facts), flush=True)
    for name in arguments.lengths:
        facts["rows"].append(measured(engine, names[name], arguments.clients))
        print(json.dumps(facts["rows"][-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
