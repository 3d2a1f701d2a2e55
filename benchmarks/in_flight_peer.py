"""CTranslate2's tokens per second for the mixed requests, by requests at once.

    python3 -m benchmarks.in_flight_peer --folder FOLDER --shape 1.3b --clients 1 8 32 128 [--write]

Prints a JSON line per number of requests and strategy. `--write` makes the model's files, which
must be there otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ctranslate2_models
from benchmarks.peers import config_of, say
from benchmarks.serving import mixed_requests
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.protocol import GenerateRequest

# One batch until its longest row ends, one that rows leave, and several at the same time.
STRATEGIES = {
    "one batch": {"leave_early": False, "parts": 1},
    "rows leave": {"leave_early": True, "parts": 1},
    "several batches, rows leave": {
        "leave_early": True,
        "parts": ctranslate2_models.PARALLEL,
    },
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=(*CONFIGS, *TINY), required=True)
    parser.add_argument("--clients", type=int, nargs="+", required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(argv)
    folder, config = arguments.folder / "ctranslate2", config_of(arguments.shape)
    if arguments.write:
        ctranslate2_models.write(folder, config)
        return 0
    say(version=ctranslate2_models.VERSION)
    model = ctranslate2_models.Model(
        folder, config, arguments.device, parallel=ctranslate2_models.PARALLEL
    )
    requests = mixed_requests(arguments.requests, config.vocab_size)
    model.generate([requests[0].input_ids], 8)
    for clients in arguments.clients:
        for name, strategy in STRATEGIES.items():
            if strategy["parts"] <= clients:
                speed = tokens_per_s(model, requests, clients, arguments.seconds, **strategy)
                say(clients=clients, strategy=name, tokens_per_s=round(speed, 1))
    return 0


def tokens_per_s(
    model: ctranslate2_models.Model,
    requests: Sequence[GenerateRequest],
    clients: int,
    seconds: float,
    *,
    leave_early: bool,
    parts: int,
) -> float:
    """Of `clients` requests at once, and the next ones after all of them; none after `seconds`."""
    rows = -(-clients // parts) if parts > 1 else 0
    tokens, start = 0, time.perf_counter()
    for first in range(0, len(requests), clients):
        if time.perf_counter() - start > seconds:
            break
        batch = requests[first : first + clients]
        tokens += model.serve(batch, leave_early=leave_early, rows=rows)
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
