"""A multiple-choice task of lm-eval's through a gateway, item by item as by lm-eval's `hf` model.

    pip install -r benchmarks/clients/requirements.txt    # in an environment of its own
    python3 -m benchmarks.clients.lm_eval_boolq http://127.0.0.1:8080 smollm2_135m GGUF_FILE

Serve the model of benchmarks/clients/serve.py. Both sides answer the 64 items of
boolq_shortest64.jsonl: lm-eval's `local-completions` asks the gateway, its `hf` has transformers
compute the same weights, dequantised to fp32 from the GGUF file that the model was exported from.
Prints both; exit code 1 when an item is judged otherwise or a log-likelihood of one of its choices
differs by more than 0.01.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.lm_eval_runs import gateway_model, samples_of

TASK = "boolq_local"
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Item:
    """One item: the log-likelihood of each choice, and whether the right one is the largest."""

    likelihoods: tuple[float, ...]
    right: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address", help="the gateway's, as http://host:port")
    parser.add_argument("model")
    parser.add_argument("gguf", type=Path, help="the file that the model was exported from")
    parser.add_argument("--limit", type=int, help="of the items")
    arguments = parser.parse_args(argv)
    served = items_of(
        samples_of(TASK, *gateway_model(arguments.address, arguments.model), arguments.limit)
    )
    gguf: Path = arguments.gguf
    hf = {"pretrained": gguf.parent, "gguf_file": gguf.name, "dtype": "float32"}
    reference = items_of(samples_of(TASK, "hf", hf, arguments.limit))
    differing = compare(served, reference)
    print("\n".join([*differing, *table(served, reference)]))
    return 1 if differing else 0


def items_of(samples: Sequence[dict[str, Any]]) -> list[Item]:
    """What lm-eval noted of each item."""
    return [
        Item(
            tuple(float(answer[0]) for answer in sample["filtered_resps"]),
            bool(sample["acc"]),
        )
        for sample in samples
    ]


def compare(served: Sequence[Item], reference: Sequence[Item]) -> list[str]:
    """A line for every item that differs."""
    if len(served) != len(reference):
        return [f"the gateway answered {len(served)} items, hf {len(reference)}"]
    return [
        f"item {index}: served {ours}, hf {theirs}"
        for index, (ours, theirs) in enumerate(zip(served, reference, strict=True))
        if ours.right != theirs.right or difference(ours, theirs) > TOLERANCE
    ]


def difference(ours: Item, theirs: Item) -> float:
    """The largest one of the log-likelihoods."""
    pairs = zip(ours.likelihoods, theirs.likelihoods, strict=True)
    return max(abs(one - other) for one, other in pairs)


def table(served: Sequence[Item], reference: Sequence[Item]) -> list[str]:
    lines = [
        f"{name:8} {sum(item.right for item in items)} of {len(items)} right"
        for name, items in (("served", served), ("hf", reference))
    ]
    largest = max(map(difference, served, reference), default=0.0)
    return [*lines, f"largest difference of a log-likelihood: {largest:.1e}"]


if __name__ == "__main__":
    sys.exit(main())
