"""Find the tiles of a decode step's products on this device; see launcher_scripts/kernels/tiles.py.

    python3 -m benchmarks.tune --out tiles.json [--sizes 768:3072:64 4096:16384:128] [--gated]

Sizes are hidden:ffn:head. Of each a few layers are built, and one product after the other takes
the tile that makes the whole step shortest: a kernel overlaps with its neighbours, so that its own
time says little. The table that is there stays for what is not measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.decode import MODERN
from benchmarks.generate import DEVICE, VOCABULARY, engine_settings, random_weights, release
from benchmarks.steps import step_ms
from launcher_scripts.engine.communicator import Communicator
from launcher_scripts.engine.loading import assemble_runner, prepare_process
from launcher_scripts.engine.runner import Runner
from launcher_scripts.kernels import tiles
from launcher_scripts.kernels.tiles import PAIRED, TABLE, DotTile, RowTile
from launcher_scripts.models.gpt import GPTConfig

SIZES = ("768:3072:64", "2048:8192:128", "4096:16384:128", "6144:24576:128")
STEP_BYTES = 1 << 30  # of layers: many times the second cache, so that weights come from memory
CONTEXT = 80
BATCHES = (8, 32)
GAIN = 0.998  # what counts as faster: times of one tile differ by so much


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--gated", action="store_true", help="an MLP with a gate, and RMS norms")
    parser.add_argument("--skip", choices=("row", "dot"), help="products to leave as they are")
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 1
    before = TABLE.read_text(encoding="utf-8")
    table = json.loads(before)
    table["measured_on"] = measured_on()
    try:
        for size in arguments.sizes:
            tune(size, arguments, table)
            release()
    finally:
        TABLE.write_text(before, encoding="utf-8")
        arguments.out.write_text(as_text(table), encoding="utf-8")
    return 0


def tune(size: str, arguments: argparse.Namespace, table: dict) -> None:
    """The tiles of one shape's products, into the table."""
    hidden, ffn, head_size = map(int, size.split(":"))
    runner = few_layers(hidden, ffn, head_size, gated=arguments.gated)
    up = "gated" if arguments.gated else "up"
    products = [("add", ffn), (up, hidden), ("heads", hidden), ("add", hidden), ("largest", hidden)]
    if arguments.skip != "row":
        choose(table, "row_products", products, row_candidates, lambda: step_ms(runner, 1, CONTEXT))
    if arguments.skip != "dot":
        choose(
            table,
            "dot_products",
            products,
            dot_candidates,
            lambda: sum(step_ms(runner, rows, CONTEXT, repeat=8) for rows in BATCHES),
        )


def choose(
    table: dict,
    part: str,
    products: list[tuple[str, int]],
    candidates: Callable[[str, int], Iterator[tuple]],
    measure: Callable[[], float],
) -> None:
    """Give one product after the other the tile with which the step is shortest."""

    def with_tile(key: str, tile: tuple) -> float:
        table[part][key] = list(tile)
        TABLE.write_text(as_text(table), encoding="utf-8")
        tiles.forget()
        try:
            return measure()
        except Exception as error:
            print(f"{key} {tile}: {type(error).__name__}", flush=True)
            return float("inf")

    for kind, in_size in products:
        key = f"{kind} {in_size}"
        now = tiles.row_tile if part == "row_products" else tiles.dot_tile
        best = tuple(now(kind, in_size))
        shortest = first = with_tile(key, best)
        for tile in candidates(kind, in_size):
            time = with_tile(key, tile)
            if time < shortest * GAIN:
                best, shortest = tuple(tile), time
        with_tile(key, best)
        print(f"{part} {key}: {best}, step {first:.4f} -> {shortest:.4f} ms", flush=True)


def row_candidates(kind: str, in_size: int) -> Iterator[RowTile]:
    """Tiles that fit the threads: 8 columns for each, read 16 bytes at a time."""
    for rows, warps, rolled in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (False, True)):
        block = 256 * warps
        elements = rows * block * (2 if kind in PAIRED else 1)
        pieces = -(-in_size // block)
        fits = 2048 <= elements <= 16384 and block < 2 * in_size
        if fits and (rolled or pieces <= 8) and not (rolled and pieces == 1):
            yield RowTile(rows, block, warps, rolled)


def dot_candidates(kind: str, in_size: int) -> Iterator[DotTile]:
    shapes = ((64, 128, 4), (64, 256, 4), (32, 128, 4), (128, 128, 4), (128, 64, 4), (128, 128, 8))
    for (rows, block, warps), stages, splits in itertools.product(
        shapes, (3, 4, 5), (1, 2, 4, 8) if kind == "add" else (1,)
    ):
        in_flight = stages * block * (rows * (2 if kind == "gated" else 1) + 32) * 2
        if in_flight <= 220 << 10 and in_size // splits >= 2 * block:
            yield DotTile(rows, block, warps, stages, splits)


def few_layers(hidden: int, ffn: int, head_size: int, *, gated: bool) -> Runner:
    ffn_bytes = hidden * ffn * 2 * (3 if gated else 2)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=max(2, STEP_BYTES // (hidden * hidden * 8 + ffn_bytes)),
        hidden_size=hidden,
        num_heads=hidden // head_size,
        num_kv_heads=hidden // head_size,
        head_size=head_size,
        ffn_size=ffn,
        max_positions=2048,
        end_id=VOCABULARY,
        start_id=0,
        **(MODERN if gated else {}),
    )
    settings = engine_settings(max_batch_size=max(BATCHES), max_tokens=8192)
    prepare_process(settings, DEVICE)
    with torch.inference_mode():
        return assemble_runner(random_weights(config), settings, Communicator(), DEVICE)


def measured_on() -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
    }


def as_text(table: dict) -> str:
    """JSON with a line per tile."""
    parts = [f'  "measured_on": {json.dumps(table["measured_on"])}']
    for part in ("row_products", "dot_products"):
        lines = (f"    {json.dumps(key)}: {json.dumps(tile)}" for key, tile in table[part].items())
        parts.append(f'  "{part}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
