"""Our load generator beside guidellm, on a server whose every token takes a known time.

    PATH=VENV/bin:$PATH python3 -m benchmarks.load_agreement [--clients 4] [--rate 20] \\
        [--requests 60]

VENV has requirements/load.txt. Prints, for a closed and an open loop, tokens per second and the
median of the first token, between tokens and the whole answer, by both and as it must be. Exit
code 1 when two numbers of a row differ by more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.exact_server import MODEL
from launcher_scripts.config.evaluation import GoodputBounds, LoadPrompts, LoadSettings
from launcher_scripts.evaluation.load.driver import DriverResult, Prompts, RunLoad, plan_clients
from launcher_scripts.evaluation.load.figures import LoadRun, run_figures
from launcher_scripts.evaluation.load.load_test import run_guidellm, run_plan
from launcher_scripts.evaluation.load.paths import LoadTarget, TokenRequest

FIRST_MS, NEXT_MS, INPUT, OUTPUT = 500.0, 50.0, 16, 32
MOST_APART = 0.03
GUIDELLM_SECONDS = 300.0
WORDS = ("the", "people", "world", "hello")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=60)
    arguments = parser.parse_args(argv)
    apart = 0.0
    with exact_server() as address:
        target = LoadTarget("gateway", (address,), TokenRequest(MODEL, "GPT"), stream=True)
        for load in (RunLoad(clients=arguments.clients), RunLoad(rate=arguments.rate)):
            runs = measured(target, load, arguments.requests)
            table = rows(runs, expected(load))
            print(f"\n{load.text}\n" + json.dumps(table, indent=1), flush=True)
            apart = max(apart, *(row["apart"] for row in table.values()))
    print(f"largest difference: {apart:.2%}")
    return 0 if apart <= MOST_APART else 1


@contextmanager
def exact_server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.exact_server"]
    command += ["--first-ms", str(FIRST_MS), "--next-ms", str(NEXT_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            yield line.removeprefix("ready: ").strip()
        finally:
            process.terminate()


def measured(target: LoadTarget, load: RunLoad, requests: int) -> dict[str, LoadRun]:
    """The same plan by both."""
    settings = LoadSettings(requests=requests, seconds=None, warmup=0.0)
    prompts = Prompts(LoadPrompts(input=INPUT, output=OUTPUT), settings.seed, 100)
    plan = plan_clients(settings, load, prompts, 60.0)
    texts = [
        " ".join(WORDS[token % len(WORDS)] for token in each.prompt_ids) for each in plan.requests
    ]
    return {
        "ours": figures(load, run_plan(target, plan, 1)),
        "guidellm": figures(
            load, run_guidellm(target, load, plan, texts, settings.seed, GUIDELLM_SECONDS)
        ),
    }


def figures(load: RunLoad, driven: Sequence[DriverResult]) -> LoadRun:
    run = run_figures("gateway", load, driven, None, GoodputBounds())
    if run.failed or run.generated_tokens != OUTPUT * run.requests:
        raise RuntimeError(f"a run is not whole: {replace(run, timeline=())}")
    return run


def expected(load: RunLoad) -> dict[str, float | None]:
    """What the server's times make; the open loop's own arrivals say its tokens per second."""
    latency = FIRST_MS + (OUTPUT - 1) * NEXT_MS
    rate = None if load.clients is None else load.clients * OUTPUT * 1e3 / latency
    return {
        "tokens_per_second": rate,
        "first_token_ms": FIRST_MS,
        "between_tokens_ms": NEXT_MS,
        "latency_ms": latency,
    }


def rows(runs: dict[str, LoadRun], truth: dict[str, float | None]) -> dict[str, dict[str, float]]:
    """By figure: both, the truth, and how far two of them are apart."""
    table = {}
    for name, exact in truth.items():
        row: dict[str, float] = {} if exact is None else {"exact": round(exact, 2)}
        for who, run in runs.items():
            value = getattr(run, name)
            row[who] = round(value if isinstance(value, float) else value["p50"], 2)
        # Arrivals of an open loop are random, and of another seed.
        comparable = exact is not None
        row["apart"] = max(row.values()) / min(row.values()) - 1 if comparable else 0.0
        table[name] = row
    return table


if __name__ == "__main__":
    sys.exit(main())
