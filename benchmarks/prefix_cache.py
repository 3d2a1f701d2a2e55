"""Time to the first token of prompts that begin alike, without and with enable_prefix_caching.

    python3 -m benchmarks.prefix_cache --folder EMPTY_FOLDER --out prefix-cache.json \
        [--shape 1.3b] [--clients 1 8 64] [--prefix 1000] [--own 50] [--output 32]

Every prompt is a prefix that all have in common and tokens of its own (greedy, random bfloat16
weights), asked over gRPC of a decoupled model by clients in processes of their own. "together": all
clients ask once, at the same time, with a prefix that nobody has asked before. "steady": each asks
one request after the other with the same prefix, which somebody has asked before.
copied: the share of prompt tokens that were not computed, of all requests of that server so far.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.generate import machine
from benchmarks.load_clients import PROCESSES, TIMEOUT_SECONDS, all_answered, load_target
from benchmarks.peers import config_of
from benchmarks.repositories import RandomModel
from benchmarks.serving import Server, counted
from benchmarks.shapes import CONFIGS, TINY
from launcher_scripts.contract.metric_names import PREFIX_HITS, PREFIX_QUERIES
from launcher_scripts.evaluation.load.driver import ClientPlan, DriverResult, LoadRequest
from launcher_scripts.evaluation.load.figures import first_token, percentiles
from launcher_scripts.evaluation.load.load_test import run_plan
from launcher_scripts.evaluation.load.paths import LoadTarget
from launcher_scripts.models.gpt import GPTConfig

MODEL = "prefix-cache"
ROUNDS = 3  # of clients who come together
TURNS = 8  # requests of each client, one after the other
POSITIONS = 2048  # of the model; its cache has room for as many tokens of each row
METRICS_SECONDS = 1.5  # until the server shows what it has counted
SHAPES = [name for name, each in {**CONFIGS, **TINY}.items() if isinstance(each, GPTConfig)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the models; made if absent")
    parser.add_argument("--shape", choices=SHAPES, default="1.3b")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that prompts share")
    parser.add_argument("--own", type=int, default=50, help="tokens of each prompt behind them")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args(argv)
    facts = {name: getattr(arguments, name) for name in ("shape", "prefix", "own", "output")}
    if torch.cuda.is_available():
        facts["machine"] = machine()
    without, with_cache = (
        list(served_rows(arguments, prefix_caching=caching)) for caching in (False, True)
    )
    facts["rows"] = [
        {
            **new,
            "first_token_ms_without": old["first_token_ms"],
            "ratio": round(new["first_token_ms"]["p50"] / old["first_token_ms"]["p50"], 3),
        }
        for old, new in zip(without, with_cache, strict=True)
    ]
    for row in facts["rows"]:
        print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return 0


def served_rows(arguments: argparse.Namespace, *, prefix_caching: bool) -> Iterator[dict]:
    """The figures of one server, by clients and how they come."""
    most = max(POSITIONS, arguments.prefix + arguments.own + arguments.output)
    model = RandomModel(
        MODEL,
        replace(config_of(arguments.shape), max_positions=most),
        max(arguments.clients),
        decoupled=True,
        prefix_caching=prefix_caching,
    )
    folder = arguments.folder / ("with" if prefix_caching else "without")
    model.write(folder / "repository")
    lengths = (arguments.prefix, arguments.own, arguments.output)
    random = np.random.default_rng(0)
    with Server(folder) as ready:
        target = load_target("grpc", ready["grpc"], model, stream=True)
        run_plan(target, asked_by(1, requests(random, lengths, TURNS, model)), 1)  # warm up
        for clients in arguments.clients:
            plans = [
                asked_by(clients, requests(random, lengths, clients, model)) for _ in range(ROUNDS)
            ]
            yield row("together", clients, target, plans, ready)
            asked = requests(random, lengths, 1 + TURNS * clients, model)
            run_plan(target, asked_by(1, asked[:1]), 1)
            yield row("steady", clients, target, [asked_by(clients, asked[1:])], ready)


def requests(
    random: np.random.Generator, lengths: tuple[int, int, int], count: int, model: RandomModel
) -> tuple[LoadRequest, ...]:
    """Prompts with a prefix that no others have. lengths: of prefix, own tokens and answer"""
    prefix, own, output = lengths
    ids = random.integers(2, model.config.vocab_size, prefix + count * own).tolist()
    return tuple(
        LoadRequest((*ids[:prefix], *ids[first : first + own]), output)
        for first in range(prefix, len(ids), own)
    )


def asked_by(clients: int, asked: tuple[LoadRequest, ...]) -> ClientPlan:
    """All of them, by so many clients of which each has one request at a time."""
    return ClientPlan(asked, clients, len(asked), None, 0.0, TIMEOUT_SECONDS)


def row(
    how: str, clients: int, target: LoadTarget, plans: Sequence[ClientPlan], ready: dict
) -> dict:
    """Raises RuntimeError when a request failed."""
    driven: list[DriverResult] = []
    for plan in plans:
        driven += run_plan(target, plan, PROCESSES)
    times = percentiles([first_token(answer) for answer in all_answered(driven)])
    time.sleep(METRICS_SECONDS)
    made = {"how": how, "clients": clients, "first_token_ms": times, "copied": copied(ready)}
    print(json.dumps(made), flush=True)
    return made


def copied(ready: dict) -> float:
    """The share of prompt tokens that the server has found in its cache."""
    queries = counted(ready, PREFIX_QUERIES)
    return round(counted(ready, PREFIX_HITS) / queries, 3) if queries else 0.0


if __name__ == "__main__":
    sys.exit(main())
