"""Tokens per second of clients that ask for many more tokens than they take.

    python3 -m benchmarks.stop_early --out stop-early.json [--shape 1.3b] [--clients 128 512] \
        [--asked 2048] [--cache-tokens 100000] [--deterministic]

Every client asks the engine, in this process, for as many tokens as there is room for, takes 16 to
256 of them, cancels the request and asks the next one (32 to 512 tokens in, greedy, random bfloat16
weights). --cache-tokens is what the cache holds, as on a smaller GPU; without it the cache takes
what memory there is. rows: how many run at once, on average. --deterministic: rows whose tokens do
not depend on those beside.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread

from benchmarks.generate import engine_over, machine, random_weights, release
from benchmarks.serving import INPUTS, mixed_requests
from benchmarks.shapes import CONFIGS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.row import Snapshot
from launcher_scripts.engine.engine import Engine
from launcher_scripts.models.gpt import GPTConfig

SETTLE_SECONDS, SECONDS = 6.0, 6.0
SAMPLE_SECONDS = 0.02  # between looks at how many rows run
SHAPES = [name for name, config in CONFIGS.items() if isinstance(config, GPTConfig)]


@dataclass
class Counts:
    """What came in the time that counts, from `begin` to `end` of time.perf_counter's clock."""

    begin: float
    end: float
    tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.3b")
    parser.add_argument("--clients", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--asked", type=int, default=2048, help="tokens that a request asks for")
    parser.add_argument("--cache-tokens", type=int, help="what the cache holds; default: the most")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    most = INPUTS[1] + arguments.asked
    weights = random_weights(replace(CONFIGS[arguments.shape], max_positions=most))
    rows = []
    for clients in arguments.clients:
        engine = engine_over(
            weights,
            clients,
            arguments.cache_tokens or clients * most,
            deterministic=arguments.deterministic,
        )
        try:
            rows.append({"clients": clients, "cache_tokens": engine.cache_tokens})
            rows[-1] |= measured(engine, clients, arguments.asked)
        finally:
            engine.close()
            release()
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        facts = {"shape": arguments.shape, "asked": arguments.asked, "machine": machine()}
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=2), encoding="utf-8")
    return 0


def measured(engine: Engine, clients: int, asked: int) -> dict:
    """The figures of SECONDS after SETTLE_SECONDS."""
    now = time.perf_counter()
    counts = Counts(now + SETTLE_SECONDS, now + SETTLE_SECONDS + SECONDS)
    requests = mixed_requests(4 * clients, engine.config.vocab_size)
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for serial in range(clients):
        free.put(serial)
    over = Event()
    asking = Thread(target=ask, args=(engine, requests, asked, free, counts, over), daemon=True)
    asking.start()
    running = []
    while time.perf_counter() < counts.end:
        time.sleep(SAMPLE_SECONDS)
        if time.perf_counter() > counts.begin:
            running.append(engine.rows_running)
    over.set()
    asking.join()
    first = counts.first_token_seconds
    return {
        "tokens_per_s": round(counts.tokens / SECONDS),
        "rows": round(statistics.mean(running), 1),
        "first_token_p50_ms": round(statistics.median(first) * 1e3, 1) if first else None,
    }


def ask(
    engine: Engine,
    requests: list[GenerateRequest],
    asked: int,
    free: queue.SimpleQueue[int],
    counts: Counts,
    over: Event,
) -> None:
    """Ask a request for every client that is free, until it is over; `free` has what is next."""
    while not over.is_set():
        try:
            serial = free.get(timeout=SAMPLE_SECONDS)
        except queue.Empty:
            continue
        taken = requests[serial % len(requests)]
        client = Client(taken.output_len, counts, free, serial + len(requests) // 4)
        client.future = engine.submit(replace(taken, output_len=asked), client.take)


class Client:
    """One request of a client, of which it takes `tokens` tokens."""

    def __init__(
        self, tokens: int, counts: Counts, free: queue.SimpleQueue[int], following: int
    ) -> None:
        self.future = None
        self._tokens, self._counts = tokens, counts
        self._free, self._following = free, following
        self._asked_at = time.perf_counter()

    def take(self, snapshot: Snapshot) -> None:
        now = time.perf_counter()
        if self._counts.begin <= now < self._counts.end:
            self._counts.tokens += 1
            if snapshot.tokens == 1:
                self._counts.first_token_seconds.append(now - self._asked_at)
        if snapshot.tokens >= self._tokens and self.future is not None and self.future.cancel():
            self._free.put(self._following)


if __name__ == "__main__":
    sys.exit(main())
