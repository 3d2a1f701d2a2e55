"""lm-eval's LAMBADA through a gateway before a served SmolLM2, item by item as transformers.

    pip install -r benchmarks/clients/requirements.txt    # in an environment of its own
    python3 -m benchmarks.clients.lm_eval_lambada http://127.0.0.1:8080 smollm2_135m

Serve the model that the quickstart writes (docs/quickstart.md), in fp32, and start a gateway
without API keys before it. lm-eval's `local-completions` asks for the log-probabilities of the 200
items that come with the project and has them tokenized by the gateway, so that it needs neither the
tokenizer nor torch. The reference is what transformers gives: 68 of 200 right, perplexity 44.14.
Prints both; exit code 1 when an item is judged otherwise or its log-likelihood differs by more than
0.01.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.clients.lm_eval_runs import CHECKOUT, gateway_model, samples_of

REFERENCE = CHECKOUT / "launcher_scripts/evaluation/data/smollm2_lambada_first200_reference.json"
TASK = "lambada_local"
TOLERANCE = 1e-2
Item = tuple[bool, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address", help="the gateway's, as http://host:port")
    parser.add_argument("model")
    parser.add_argument("--concurrent", type=int, default=4, help="requests at a time")
    parser.add_argument("--limit", type=int, default=200, help="of the items")
    arguments = parser.parse_args(argv)
    model = gateway_model(arguments.address, arguments.model, arguments.concurrent)
    served = items_of(samples_of(TASK, *model, arguments.limit))
    reference = read_reference()[: arguments.limit]
    differing = compare(served, reference)
    print("\n".join([*differing, *table(served, reference)]))
    return 1 if differing else 0


def items_of(samples: Sequence[dict[str, Any]]) -> list[Item]:
    """lm-eval's judgement of every item."""
    return [(bool(sample["acc"]), float(sample["perplexity"])) for sample in samples]


def read_reference() -> list[Item]:
    content: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return [
        (item["correct"], item["log_likelihood"]) for item in content["tasks"]["lambada"]["items"]
    ]


def compare(served: Sequence[Item], reference: Sequence[Item]) -> list[str]:
    """A line for every item that is not judged as the reference judges it."""
    if len(served) != len(reference):
        return [f"lm-eval judged {len(served)} items; the reference has {len(reference)}"]
    return [
        f"item {index}: served {ours}, transformers {theirs}"
        for index, (ours, theirs) in enumerate(zip(served, reference, strict=True))
        if ours[0] != theirs[0] or abs(ours[1] - theirs[1]) > TOLERANCE
    ]


def table(served: Sequence[Item], reference: Sequence[Item]) -> list[str]:
    lines = []
    for name, items in (("served", served), ("transformers", reference)):
        right = sum(correct for correct, _ in items)
        perplexity = math.exp(-sum(likelihood for _, likelihood in items) / len(items))
        lines.append(f"{name:13} {right} of {len(items)}  perplexity {perplexity:.4f}")
    pairs = zip(served, reference, strict=False)
    largest = max(abs(ours[1] - theirs[1]) for ours, theirs in pairs)
    return [*lines, f"largest difference of a log-likelihood: {largest:.1e}"]


if __name__ == "__main__":
    sys.exit(main())
