"""Clients of OpenAI's interface against a gateway: what each was asked, and what came of it.

    pip install -r benchmarks/clients/requirements.txt    # in an environment of its own
    python3 -m benchmarks.clients.run http://127.0.0.1:8080 smollm2_135m \\
        --tokenizer FOLDER/repository/smollm2_135m/1/1-gpu [--t5 translator] [--only openai ...]

Serve the models of benchmarks/clients/serve.py, in the project's environment. Answers are greedy
and compared with those of plain HTTP. Prints a table; exit code 1 when a trial fails. lm_eval has
a program of its own: lm_eval_agreement.py.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.clients.target import Target

CLIENTS = ("openai", "langchain", "llama_index", "litellm", "guidellm", "aiperf", "lm_eval")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address", help="the gateway's, as http://host:port")
    parser.add_argument("model", help="a model that chats")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the folder of the model's")
    parser.add_argument("--t5", help="an encoder-decoder")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS)
    arguments = parser.parse_args(argv)
    address: str = arguments.address.rstrip("/")
    target = Target(address, arguments.model, arguments.t5, arguments.tokenizer)
    failed = 0
    print("| client | version | what was asked | result |\n|---|---|---|---|")
    for client in arguments.only:
        for line, fine in tried(client, target):
            failed += not fine
            print(line, flush=True)
    return 1 if failed else 0


def tried(client: str, target: Target) -> Iterator[tuple[str, bool]]:
    """A line of the table for each trial of a client, and whether it went well."""
    module = importlib.import_module(f"benchmarks.clients.with_{client}")
    name = module.PACKAGES[0]
    for asked, trial in module.trials(target):
        fine = True
        try:
            result = trial()
        except Exception as error:  # the other trials go on
            fine, result = False, f"FAILED: {type(error).__name__}: {error}"
        shown = " ".join(result.split()).replace("|", "\\|")[:300]
        yield f"| {name} | {version(name)} | {asked} | {shown} |", fine


if __name__ == "__main__":
    sys.exit(main())
