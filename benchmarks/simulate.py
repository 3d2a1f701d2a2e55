"""The engine's scheduler on a model of step times: tokens per second and first tokens by clients.

    python3 -m benchmarks.simulate [--shapes 1.3b 8b-modern] [--clients 1 32 128 512] [--out FILE]
    python3 -m benchmarks.simulate --shapes 43b 175b --tp 8 16 32
    python3 -m benchmarks.simulate --clients 512 --asked 2048 --cache-tokens 100000

The scheduler is the engine's own; only the device is a model, and the host that launches its steps.
A decode step takes what results/decode-h200.json measured at that number of rows, or its operations
where these take longer, and the keys and values that it reads. A pass over prompts, and over the
rows that decode beside them, takes its operations at the measured share of the matrix rate, filled
up to the tokens of its graph, or the time to read the weights, and reads those keys and values.
Over several GPUs both are divided, and two sums a layer are added.
Clients ask the mixed requests of benchmarks.in_flight, each its next one when the last is answered.
With --asked they ask for so many tokens, and cancel when they have those of the mixed request.
Beside the figures are those that were measured (results/gateway-h200.json) and their ratio.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.floors import BYTES, exchange_of, numbers
from benchmarks.load_clients import SECONDS, settle_seconds
from benchmarks.recorded import result
from benchmarks.serving import INPUTS, OUTPUTS
from benchmarks.shapes import CONFIGS, GPT_43B, GPT_175B, LLAMA_70B
from launcher_scripts.common.quantization import KV_CACHE_DTYPES
from launcher_scripts.contract.metric_names import PREEMPTIONS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.core.statistics import Statistics
from launcher_scripts.engine.engine import STEPS_AHEAD
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.model.kv_cache import BLOCK_TOKENS
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from launcher_scripts.engine.runner.prompt_batch import prompt_bucket, recorded_tokens
from launcher_scripts.models.gpt import GPTConfig

# Models, and the measured one whose decode steps come as near to their floors.
MODELS = {
    **{name: (each, name) for name, each in CONFIGS.items() if isinstance(each, GPTConfig)},
    "70b": (LLAMA_70B, "8b-modern"),
    "43b": (GPT_43B, "20b"),
    "175b": (GPT_175B, "20b"),
}
CONTEXT = 80  # tokens, of the steps in decode-h200.json
# Of the host and the server around the engine, by measurement of 1.3B with one client.
ASK_SECONDS = 2.5e-3  # from an answer to the next request at the engine; and on the way back
LAUNCH_SECONDS = 0.3e-3  # of a step that is a graph
EAGER_SECONDS = 6e-3  # of a pass over prompts that is none
ROW_SECONDS = 6e-6  # of every row in a step
CACHE_SHARE = 0.8  # of the read rate, for keys and values; of 1.3B with 128 rows
PASS_SECONDS = 25e-6  # of a layer in a pass over prompts, beside its operations


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the devices' work for one model.

    layers, head: numbers of the weights on a GPU;  cached: bytes of a token's keys and values there
    rows, seconds: of decode steps of short contexts
    exchange: bytes of a sum over all GPUs -> seconds
    """

    config: GPTConfig
    layers: float
    head: float
    cached: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    read_bytes: float
    operations: float
    exchange: Callable[[int], float] = lambda _: 0.0

    @classmethod
    def of(
        cls, config: GPTConfig, shape: str, tp_size: int = 1, kv_cache_dtype: str = "auto"
    ) -> StepTimes:
        """At the rates of results/decode-h200.json, a decode step at the share of its floor that
        was measured for `shape`, with keys and values in bfloat16."""
        report = result("decode")
        read_bytes = report["bandwidth"]["read_tb_per_s"] * 1e12
        (prefill,) = (
            row
            for row in report["rows"]
            if "prefill_tokens" in row and CONFIGS[row["model"]].num_experts is None
        )
        layers = numbers(config, lambda name: name.startswith("layers.")) / tp_size
        head = config.vocab_size * config.hidden_size / tp_size
        shares = {
            row["rows"]: row["share_of_floor"]
            for row in report["rows"]
            if row["model"] == shape and row.get("context") == CONTEXT and "floor_ms" in row
        }
        cached = 2 * config.num_layers * config.num_kv_heads * config.head_size * BYTES / tp_size
        read = {rows: (layers + head) * BYTES + rows * CONTEXT * cached for rows in shares}
        return cls(
            config,
            layers,
            head,
            cached / BYTES if kv_cache_dtype == "fp8" else cached,
            tuple(shares),
            tuple(read[rows] / read_bytes / share for rows, share in shares.items()),
            read_bytes,
            report["matrix_tflops"] * 1e12 * prefill["share_of_matrix_rate"],
            *([] if tp_size == 1 else [exchange_of(tp_size)]),
        )

    def decode(self, rows: int, context: int) -> float:
        """A step of so many rows that have `context` tokens together."""
        if not rows:
            return 0.0
        known = float(np.interp(rows, self.rows, self.seconds))
        work = 2 * (self.layers + self.head) * rows / self.operations
        return max(known, work) + self._cache(context) + self._sums(rows)

    def mixed(self, tokens: int, prompts: int, rows: int, context: int) -> float:
        """A pass over so many tokens of so many prompts, and a step of rows as in `decode`."""
        graph = prompt_bucket(tokens, prompts, rows)
        filled = rows + (tokens if graph is None else graph.tokens)
        read = self.layers * BYTES / self.read_bytes
        work = max(read, 2 * self.layers * filled / self.operations)
        head = 2 * self.head * (prompts + rows) / self.operations
        head += self.head * BYTES / self.read_bytes
        passing = PASS_SECONDS * self.config.num_layers
        return work + head + passing + self._cache(context) + self._sums(filled)

    def _cache(self, context: int) -> float:
        """Reading the keys and values of so many tokens."""
        return context * self.cached / (self.read_bytes * CACHE_SHARE)

    def _sums(self, tokens: int) -> float:
        """Two sums over the GPUs in a layer."""
        size = tokens * self.config.hidden_size * BYTES
        return 2 * self.config.num_layers * self.exchange(size)

    def launch(self, plan: Plan) -> float:
        """The host's part before the device begins."""
        tokens = sum(part.count for part in plan.prefill)
        eager = tokens and prompt_bucket(tokens, len(plan.prefill), len(plan.decode)) is None
        return (EAGER_SECONDS if eager else LAUNCH_SECONDS) + ROW_SECONDS * len(plan.decode)


class Simulation:
    """Clients before one engine; `run` gives what benchmarks.gateway measures of whole answers."""

    def __init__(
        self,
        times: StepTimes,
        clients: int,
        seed: int = 0,
        asked: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """asked: tokens that every request asks for, however many its client takes"""
        self._statistics = Statistics()
        self._scheduler = Scheduler(
            clients,
            cache_tokens or 2 * clients * (INPUTS[1] + (asked or OUTPUTS[1])),
            PREFILL_TOKENS["cuda"],
            self._statistics,
            recorded_tokens=partial(recorded_tokens, max_rows=clients),
            block_tokens=BLOCK_TOKENS["cuda"],
        )
        self._times = times
        self._asked_tokens = asked
        self._random = random.Random(seed)
        self._taken: dict[Row, int] = {}  # tokens, of rows that are not over
        self._running: list[int] = []  # rows, in each step of the time that counts
        self._now = 0.0  # the host's time
        self._free = 0.0  # when the device has done what was launched
        self._launched: deque[StepResult] = deque()
        self._asked = [0.0] * clients  # when requests arrive, a heap
        self._waits: list[float] = []  # of requests asked in the time that counts
        self._tokens = 0  # that came in it
        self._begin = settle_seconds(clients)  # of the time that counts
        self._end = self._begin + SECONDS

    def run(self) -> dict[str, float]:
        """The figures of SECONDS, once the clients have settled."""
        scheduler, ahead = self._scheduler, STEPS_AHEAD["cuda"]
        while self._now < self._end:
            self._arrive()
            plan = scheduler.plan()
            if plan is not None:
                self._launched.append(self._launch(plan))
            if self._launched and (plan is None or len(self._launched) > ahead):
                scheduler.apply(self._launched.popleft())
            elif plan is None:
                self._now = max(self._now, self._asked[0])
        waits = self._waits or [self._end]
        return {
            "tokens_per_s": round(self._tokens / SECONDS),
            "first_token_p50_ms": round(statistics.median(waits) * 1e3, 1),
            "rows": round(statistics.mean(self._running)),
            "preempted_per_s": round(self._preempted(), 2),
        }

    def _preempted(self) -> float:
        """Rows a second that are computed again."""
        samples = self._statistics.samples()
        return sum(each.value for each in samples if each.name == PREEMPTIONS.name) / self._end

    def _arrive(self) -> None:
        while self._asked and self._asked[0] <= self._now:
            at = heapq.heappop(self._asked)
            prompt = (1,) * self._random.randint(*INPUTS)
            taken = self._random.randint(*OUTPUTS)
            request = GenerateRequest(prompt, self._asked_tokens or taken)
            row = Row(request, Future(), prompt, end_id=-1, grows=True, came_at=at)
            self._taken[row] = taken
            row.future.add_done_callback(partial(self._answered, row))
            self._scheduler.add(row)

    def _answered(self, row: Row, _: Future) -> None:
        del self._taken[row]
        heapq.heappush(self._asked, self._now + ASK_SECONDS)

    def _launch(self, plan: Plan) -> StepResult:
        rows = {row.slot: row for row in self._scheduler.rows if row.slots}
        ended = {
            part.slot: rows[part.slot]
            for part in plan.prefill
            if part.past + part.count == rows[part.slot].prefill_length
        }
        decoding = {slot: rows[slot] for slot in plan.decode}
        self._now += self._times.launch(plan)
        prompt_tokens = sum(part.count for part in plan.prefill)
        context = sum(row.cached for row in decoding.values())
        if prompt_tokens:
            took = self._times.mixed(prompt_tokens, len(plan.prefill), len(decoding), context)
        else:
            took = self._times.decode(len(decoding), context)
        self._free = max(self._free, self._now) + took
        return _Step(self, self._free, decoding | ended)

    def take(self, at: float, rows: dict[int, Row]) -> list[TokenResult]:
        """The rows' tokens, which the device has at that time; keys: their slots then."""
        self._now = max(self._now, at) + ROW_SECONDS * len(rows)
        if self._begin <= self._now < self._end:
            self._tokens += len(rows)
            self._running.append(self._scheduler.rows_running)
        self._waits += [
            self._now - row.came_at + ASK_SECONDS
            for row in rows.values()
            if not row.tokens and row.came_at >= self._begin
        ]
        for row in rows.values():
            if self._asked_tokens and len(row.tokens) + 1 >= self._taken.get(
                row, self._asked_tokens
            ):
                row.future.cancel()
        return [TokenResult(slot, 1, None) for slot in rows]


class _Step(StepResult):
    """A step whose rows' tokens are there at a time that is known."""

    def __init__(self, simulation: Simulation, at: float, rows: dict[int, Row]) -> None:
        super().__init__()
        self._simulation, self._at, self._rows = simulation, at, rows

    def read(self) -> Iterator[list[TokenResult]]:
        return iter([self._simulation.take(self._at, self._rows)] if self._rows else [])


def beside_measured(row: dict) -> dict:
    """What was measured of a row's model and clients, and its ratio; nothing where it was not."""
    for each in result("gateway")["rows"]:
        same = (each["model"], each["clients"]) == (row["model"], row["clients"])
        if same and row["tp_size"] == 1:
            measured = each["whole_answers_tokens_per_s"]
            ratio = round(row["tokens_per_s"] / measured, 3)
            return {"measured_tokens_per_s": measured, "ratio": ratio}
    return {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["1.3b", "8b-modern"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="GPUs")
    parser.add_argument("--asked", type=int, help="tokens that requests ask for")
    parser.add_argument("--cache-tokens", type=int, help="default: as many as all requests need")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    rows = []
    for shape, tp_size in itertools.product(arguments.shapes, arguments.tp):
        times = StepTimes.of(*MODELS[shape], tp_size, arguments.kv_cache_dtype)
        for clients in arguments.clients:
            asked, cache = arguments.asked, arguments.cache_tokens
            found = Simulation(times, clients, asked=asked, cache_tokens=cache).run()
            rows.append({"model": shape, "tp_size": tp_size, "clients": clients, **found})
            if not (asked or cache) and arguments.kv_cache_dtype == "auto":
                rows[-1] |= beside_measured(rows[-1])
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
