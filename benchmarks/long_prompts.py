"""First tokens and times between tokens under long prompts, the engine in this process.

    python3 -m benchmarks.long_prompts --out long-prompts.json [--shape 8b-modern] \
        [--loads chats-32 long-8 short] [--targets 0.05 0.1 0]

Clients in this process each have one request at a time (greedy, random bfloat16 weights). Each
value of `inter_token_target` gets an engine of its own; the first load warms it up. The last row
sends requests of 100 tokens while eight prompts of 20,000 run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.generate import engine_over, machine, random_weights
from benchmarks.peers import config_of
from benchmarks.shapes import CONFIGS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine

POSITIONS, CACHE_TOKENS, MAX_ROWS = 32768, 300_000, 128
SETTLE_SECONDS, SECONDS = 12.0, 25.0
LONG_PROMPTS, LONG_TOKENS, SHORT_TOKENS = 8, 20_000, 100


@dataclass(frozen=True)
class Load:
    """So many clients; prompts and outputs have uniform lengths between two bounds."""

    clients: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]


CHATS, LONG, OUTPUTS = (1024, 6144), (19_000, 21_000), (16, 256)
LOADS = {
    "short": Load(128, (32, 512), OUTPUTS),
    "chats-8": Load(8, CHATS, OUTPUTS),
    "chats-32": Load(32, CHATS, OUTPUTS),
    "long-1": Load(1, LONG, OUTPUTS),
    "long-8": Load(8, LONG, OUTPUTS),
    "long-8-64": Load(8, LONG, (64, 64)),
}


@dataclass
class Client:
    """Sends its next request when the last one has ended.

    times: of each request, when it was sent, its prompt's tokens, and when its tokens came
    """

    engine: Engine
    load: Load
    pool: list[int]
    draw: random.Random
    times: list[tuple[float, int, list[float]]] = field(default_factory=list)
    stops: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)

    def send(self) -> None:
        length = self.draw.randint(*self.load.inputs)
        first = self.draw.randrange(len(self.pool) - length)
        request = GenerateRequest(
            tuple(self.pool[first : first + length]), self.draw.randint(*self.load.outputs)
        )
        arrivals: list[float] = []
        self.times.append((time.perf_counter(), length, arrivals))
        future = self.engine.submit(request, lambda _: arrivals.append(time.perf_counter()))
        future.add_done_callback(self._go_on)

    def _go_on(self, future: Future) -> None:
        self.times[-1][2].append(time.perf_counter())
        if self.stops or future.exception() is not None:
            self.stopped.set()
        else:
            threading.Thread(target=self.send, daemon=True).start()


def measured(engine: Engine, load: Load) -> dict:
    """The figures of SECONDS. Raises RuntimeError where no first token came in them."""
    pool = np.random.default_rng(1).integers(2, 50_000, 150_000).tolist()
    clients = [Client(engine, load, pool, random.Random(n)) for n in range(load.clients)]
    for client in clients:
        client.send()
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    time.sleep(SECONDS)
    end = time.perf_counter()
    for client in clients:
        client.stops = True
    for client in clients:
        client.stopped.wait()
    requests = [each for client in clients for each in client.times if each[2]]
    counted = [each for each in requests if begin <= each[2][0] < end]
    if not counted:
        raise RuntimeError("no first token came in the time that counts")
    gaps = [
        after - before
        for _, _, arrivals in requests
        for before, after in itertools.pairwise(arrivals)
        if begin <= after < end
    ]
    tokens = sum(begin <= at < end for _, _, arrivals in requests for at in arrivals)
    return {
        "requests": len(counted),
        "first_token_ms": percentiles([arrivals[0] - sent for sent, _, arrivals in counted]),
        "between_tokens_ms": percentiles(gaps),
        "tokens_per_s": round(tokens / SECONDS),
        "prompt_tokens_per_s": round(sum(length for _, length, _ in counted) / SECONDS),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(seconds, share)) * 1e3, 1) for share in (50, 99)}


def behind_long_prompts(engine: Engine) -> dict:
    """The first tokens of short prompts that come while long ones run."""
    draw, seconds = np.random.default_rng(0), []

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(draw.integers(2, 50_000, length).tolist())

    for _ in range(6):
        long = [
            engine.submit(GenerateRequest(prompt(LONG_TOKENS), 64)) for _ in range(LONG_PROMPTS)
        ]
        for _ in range(5):
            time.sleep(0.3)
            arrivals: list[float] = []
            sent = time.perf_counter()
            request = GenerateRequest(prompt(SHORT_TOKENS), 8)
            engine.submit(request, lambda _, a=arrivals: a.append(time.perf_counter())).result()
            seconds.append(arrivals[0] - sent)
        for future in long:
            future.result()
    return {"requests": len(seconds), "first_token_ms": percentiles(seconds)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=CONFIGS, default="8b-modern")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=["chats-32", "long-8", "short"]
    )
    parser.add_argument("--targets", type=float, nargs="+", default=[0.05], help="seconds")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device; the shapes are far beyond a CPU", file=sys.stderr)
        return 1
    facts: dict = {"machine": machine(), "shape": arguments.shape, "rows": []}
    weights = random_weights(replace(config_of(arguments.shape), max_positions=POSITIONS))
    for target in arguments.targets:
        engine = engine_over(weights, MAX_ROWS, CACHE_TOKENS, inter_token_target=target)
        measured(engine, LOADS[arguments.loads[0]])
        rows = {name: measured(engine, LOADS[name]) for name in arguments.loads}
        rows["100 tokens behind eight of 20,000"] = behind_long_prompts(engine)
        engine.close()
        for name, row in rows.items():
            facts["rows"].append({"load": name, "inter_token_target": target, **row})
            print(json.dumps(facts["rows"][-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
