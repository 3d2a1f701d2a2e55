"""The peers, each measured in a process of its own on random weights of the same shapes.

    python3 -m benchmarks.peers ctranslate2 --folder FOLDER --shapes 126m t5-base [--device cuda]
        [--in-flight 1.3b --clients 1 8 32 128]

Prints one JSON line per figure, and one per model that failed, with its reason. `--write` makes the
files that the peer reads and measures nothing. --in-flight: how many tokens per second requests of
different lengths get from this model, by how many are asked at once (CTranslate2 alone).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import median_ms, mixed_requests
from benchmarks.shapes import BATCHES, CONFIGS, TINY, USE_CASES, Case
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

PEERS = {
    "ctranslate2": "benchmarks.ctranslate2_models",
    "transformers": "benchmarks.transformers_models",
}
# CTranslate2 would need more memory for writing this model than for any other.
LEFT_OUT = {"ctranslate2": ("20b",), "transformers": ()}
CASES = (*USE_CASES.values(), *BATCHES)
SECONDS = 0.25  # for a figure, at least
SECONDS_IN_FLIGHT = 1.0
LEAST = {"ctranslate2": 2, "transformers": 1}  # repetitions of one


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", choices=(*CONFIGS, *TINY), default=[])
    parser.add_argument("--in-flight", choices=(*CONFIGS, *TINY))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(argv)
    module = importlib.import_module(PEERS[arguments.peer])
    if not arguments.write:
        say(peer=arguments.peer, version=module.VERSION)
    for name in dict.fromkeys((*arguments.shapes, *filter(None, [arguments.in_flight]))):
        try:
            folder = arguments.folder / arguments.peer / name
            if arguments.write:
                module.write(folder, config_of(name))
                continue
            model = module.Model(folder, config_of(name), arguments.device)
            if name in arguments.shapes:
                measure(model, name, arguments.peer)
            if name == arguments.in_flight:
                measure_in_flight(model, config_of(name).vocab_size, arguments.clients)
        except Exception as error:  # the other models go on
            say(model=name, error=reason(error))
        model = None
        gc.collect()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    return 0


def measure(model: Any, name: str, peer: str) -> None:
    """Say the milliseconds of every request that this model is asked."""
    for case in cases_of(name):
        prompts = case.prompts(config_of(name).vocab_size)

        def ask(prompts=prompts, requested=case.output) -> None:
            lengths = model.generate(prompts, requested)
            if set(lengths) != {requested}:
                raise RuntimeError(f"{lengths} tokens came, {requested} were asked for")

        ask(requested=4)
        say(model=name, **vars(case), ms=round(median_ms(ask, SECONDS, LEAST[peer]), 2))


def measure_in_flight(model: Any, vocab_size: int, clients: Sequence[int]) -> None:
    """Say the tokens per second by the requests asked at once, in every way that there is."""
    from benchmarks.ctranslate2_models import STRATEGIES

    requests = mixed_requests(4 * max(clients), vocab_size)
    for count in clients:
        for name, strategy in STRATEGIES.items():
            if strategy["parts"] <= count:
                tokens, start = 0, time.perf_counter()
                for first in range(0, len(requests), count):
                    tokens += model.serve(requests[first : first + count], name)
                    if time.perf_counter() > start + SECONDS_IN_FLIGHT:
                        break
                speed = tokens / (time.perf_counter() - start)
                say(clients=count, strategy=name, tokens_per_s=round(speed, 1))


def config_of(name: str) -> GPTConfig | T5Config:
    return {**CONFIGS, **TINY}[name]


def cases_of(name: str) -> tuple[Case, ...]:
    """What a model is asked: the largest in batches of no more than 8 rows."""
    return CASES[:-1] if name == "20b" else CASES


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def peer_lines(
    module: str, arguments: Sequence[str], folder: Path, seconds: float
) -> Iterator[dict]:
    """What a module prints as JSON lines in a process of its own, within `seconds`.

    The last one is {"error": reason} when the process failed or took too long.
    """
    log = folder / f"{module.rpartition('.')[2]}.log"
    command = [sys.executable, "-m", module, *arguments]
    environment = with_cublas(folder)
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
        code = process.wait()
        timed_out = not timer.is_alive()
        timer.cancel()
    if timed_out:
        yield {"error": f"took longer than {seconds:g} s"}
    elif code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        yield {"error": said[-1] if said else f"exit code {code}"}


def with_cublas(folder: Path) -> dict[str, str]:
    """The environment in which CTranslate2, built for CUDA 12, finds CUDA 13's cuBLAS."""
    environment = dict(os.environ)
    libraries = sorted(
        path
        for place in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", ())
        for path in Path(place).glob("**/libcublas.so.1*")
    )
    if not libraries:
        return environment
    links = folder / "cublas"
    links.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (links / "libcublas.so.12").symlink_to(libraries[-1])
    places = [str(links), str(libraries[-1].parent)]
    if "LD_LIBRARY_PATH" in environment:
        places.append(environment["LD_LIBRARY_PATH"])
    return {**environment, "LD_LIBRARY_PATH": os.pathsep.join(places)}


if __name__ == "__main__":
    sys.exit(main())
