"""Steps with LoRA adapters beside those of the base, on one GPU.

    python3 -m benchmarks.lora --shape 8b-modern --adapters 32 --rank 16 --rows 1 8 32

Every row has an adapter of its own as long as there are enough, on all projections. Weights are
random bfloat16, decoding is greedy.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import torch

from benchmarks.decode import runner_over
from benchmarks.generate import machine, random_weights
from benchmarks.shapes import CONFIGS
from benchmarks.steps import step_ms
from launcher_scripts.models.adapters import LORA_TARGETS, Adapters


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=CONFIGS, default="8b-modern")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=80)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 1
    config = CONFIGS[arguments.shape]
    targets = tuple(stem for stem in LORA_TARGETS if config.gated or not stem.endswith("_2"))
    names = tuple(f"adapter{number}" for number in range(arguments.adapters))
    parts = Adapters(lora_names=names, lora_rank=arguments.rank, lora_targets=targets)
    weights = random_weights(replace(config, parts=parts))
    runner = runner_over(weights, rows=max(arguments.rows), tokens=16384)
    print(json.dumps({"machine": machine()}), flush=True)
    for rows in arguments.rows:
        adapters = [row % arguments.adapters for row in range(rows)]
        base = step_ms(runner, rows, arguments.context)
        lora = step_ms(runner, rows, arguments.context, adapters=adapters)
        print(
            json.dumps(
                {
                    "model": arguments.shape,
                    "rank": arguments.rank,
                    "rows": rows,
                    "adapters": len(set(adapters)),
                    "base_ms": round(base, 4),
                    "lora_ms": round(lora, 4),
                    "speed": round(base / lora, 3),
                }
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
