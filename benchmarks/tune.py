"""Find the tiles of a decode step's products on this device; see kernels/cuda/compiling.py.

    python3 -m benchmarks.tune --out tiles.json [--sizes 768:3072:64:12 ...] [--gated] [--ranks 2]
    python3 -m benchmarks.tune --out tiles.json --sizes nemotron-h-8b nano-2-9b

Sizes are hidden:ffn:head:kv_heads, or the name of a shape. Of each a few layers are built, and one
product after the other takes the tile that makes the whole step shortest: a kernel overlaps with
its neighbours, so that its own time says little. With --ranks the layers are one tensor-parallel
rank's, without the sums.
With --t5 they are T5's, whose heads ask the encoder's input, too.
With --processes that many compile the candidates beforehand, into the cache of the Triton language.
The table that is there stays for what is not measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.generate import DEVICE, engine_settings, random_weights, release
from benchmarks.shapes import CONFIGS, HYBRIDS, MODERN, VOCABULARY, t5
from benchmarks.steps import step_ms
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import QUANTIZATIONS, Quantization
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.runner.loading import assemble_runner, prepare_process
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels.cuda import compiling
from launcher_scripts.kernels.cuda.compiling import PAIRED, TABLE, DotTile, RowTile
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config

SIZES = ("768:3072:64:12", "2048:8192:128:16", "4096:16384:128:32", "6144:24576:128:48")
STEP_BYTES = 1 << 30  # of layers: many times the second cache, so that weights come from memory
# Rows and context of the steps whose times together decide.
CASES = {"row_products": ((1, 80), (1, 1024)), "dot_products": ((8, 80), (32, 80))}
T5_CASES = {"row_products": ((1, 40, 200),), "dot_products": ((32, 64, 128),)}  # and source
SHAPES = CONFIGS | HYBRIDS
PARTS = {"row": "row_products", "dot": "dot_products"}
SUMMED_LATER = ("add", "heads", "query")  # products whose parts another kernel sums
GAIN = 0.998  # what counts as faster: times of one tile differ by so much


class Product(NamedTuple):
    """Rows and columns of a weight, and how it is quantized, as compiling.dot_tile gets them."""

    kind: str
    out_size: int
    in_size: int
    quantization: Quantization | None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--gated", action="store_true", help="an MLP with a gate, and RMS norms")
    parser.add_argument("--t5", action="store_true")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the layers' weights")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--skip", choices=PARTS, help="products to leave as they are")
    parser.add_argument("--only", nargs="+", help="kinds of products, instead of all")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 1
    try:
        compile_candidates(arguments)
        for size in arguments.sizes:
            tune(size, arguments)
            release()
    finally:
        arguments.out.write_text(
            as_text(compiling.table() | {"measured_on": measured_on()}), encoding="utf-8"
        )
    return 0


def tune(size: str, arguments: argparse.Namespace) -> None:
    """The tiles of one shape's products, into the table."""
    runner = few_layers(configuration(size, arguments), arguments)
    for part, product in measured(runner, arguments):
        choose(part, product, runner)


def measured(runner: Runner, arguments: argparse.Namespace) -> Iterator[tuple[str, Product]]:
    """Parts of the table and the products in them that are requested."""
    for name, part in PARTS.items():
        for product in products(part, runner) if name != arguments.skip else ():
            if product.kind in (arguments.only or product.kind):
                yield part, product


def products(part: str, runner: Runner) -> list[Product]:
    """Products of the part's steps, those of most bytes first."""
    seen: dict[Product, None] = {}
    look_up = compiling.known_tile

    def observe(section: str, *product: Any) -> list[Any] | None:
        if section == part:
            seen[Product(*product)] = None
        return look_up(section, *product)

    compiling.forget()
    compiling.known_tile = observe
    try:
        for case in cases(part, runner):
            step_ms(runner, *case, repeat=1)
    finally:
        compiling.known_tile = look_up
    return sorted(seen, key=lambda product: -product.out_size * product.in_size)


def key_of(product: Product) -> str:
    return f"{product.kind} {product.out_size}x{product.in_size}"


def tile_of(part: str, product: Product) -> RowTile | DotTile:
    return (compiling.row_tile if part == "row_products" else compiling.dot_tile)(*product)


def candidates(part: str, product: Product) -> list[tuple]:
    if part == "row_products":
        found = row_candidates(product)
    else:
        found = dot_candidates(product, tile_of(part, product))
    return [tuple(tile) for tile in found]


def choose(part: str, product: Product, runner: Runner) -> None:
    """Give the product the tile with which the step is shortest."""
    now = tile_of(part, product)
    found = candidates(part, product)
    times = {tuple(tile): with_tile(part, product, tile, runner) for tile in (now, *found)}
    if part == "dot_products":
        both = combined(now, times)
        times[both] = with_tile(part, product, both, runner)
    best = min(times, key=times.__getitem__)
    if times[best] >= times[tuple(now)] * GAIN:
        best = tuple(now)
    set_tile(part, product, best)
    change = f"step {times[tuple(now)]:.4f} -> {times[best]:.4f} ms"
    print(f"{part} {key_of(product)}: {best}, {change}", flush=True)


def combined(now: DotTile, times: dict[tuple, float]) -> tuple:
    """The changes of single values that helped most, at once."""
    tile = list(now)
    for place, old in enumerate(now):
        changed = [other for other in times if other[place] != old]
        best = min(changed, key=times.__getitem__, default=tuple(now))
        if times[best] < times[tuple(now)] * GAIN:
            tile[place] = best[place]
    return tuple(tile)


def set_tile(part: str, product: Product, tile: tuple) -> None:
    known = compiling.table().setdefault(compiling.part(part, product.quantization), {})
    known[key_of(product)] = list(tile)
    compiling.forget()


def with_tile(part: str, product: Product, tile: tuple, runner: Runner, repeat: int = 8) -> float:
    """Milliseconds of the part's steps; infinite where the tile cannot run."""
    set_tile(part, product, tile)
    try:
        return sum(step_ms(runner, *case, repeat=repeat) for case in cases(part, runner))
    except Exception as error:
        print(f"{key_of(product)} {tile}: {type(error).__name__}", flush=True)
        return float("inf")


def cases(part: str, runner: Runner) -> tuple[tuple[int, ...], ...]:
    """Of the part's steps."""
    has_sources = isinstance(runner.decoder.config, T5Config)
    return (T5_CASES if has_sources else CASES)[part]


def compile_candidates(arguments: argparse.Namespace) -> None:
    """Run every candidate once, in as many processes as asked for."""
    context = multiprocessing.get_context("spawn")
    shares = range(arguments.processes)
    processes = [context.Process(target=compile_share, args=(arguments, share)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def compile_share(arguments: argparse.Namespace, share: int) -> None:
    for size in arguments.sizes:
        config = configuration(size, arguments)
        one = {name: 1 for name in ("num_layers", "num_decoder_layers") if hasattr(config, name)}
        runner = few_layers(config if size in SHAPES else replace(config, **one), arguments)
        for part, product in measured(runner, arguments):
            for tile in candidates(part, product)[share :: arguments.processes]:
                with_tile(part, product, tile, runner, repeat=1)
        del runner
        release()


def row_candidates(product: Product) -> Iterator[RowTile]:
    """Tiles that fit the threads: 8 or twice 8 columns for each, read at a time."""
    most = 32768 if product.quantization else 16384
    sizes = itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (256, 512), (False, True))
    for rows, warps, columns, rolled in sizes:
        block = columns * warps
        elements = rows * block * (2 if product.kind in PAIRED else 1)
        pieces = -(-product.in_size // block)
        fits = most // 8 <= elements <= most and block < 2 * product.in_size
        if fits and (rolled or pieces <= 8) and not (rolled and pieces == 1):
            yield RowTile(rows, block, warps, rolled)


def dot_candidates(product: Product, now: DotTile) -> Iterator[DotTile]:
    """Tiles that differ from the one of now in one respect, and fit shared memory."""
    changes = {
        "rows": (32, 64, 128),
        "block": (128, 256, 512) if product.quantization else (64, 128, 256),
        "warps": (4, 8),
        "stages": (3, 4, 5, 6),
        "splits": (1, 2, 4, 8) if product.kind in SUMMED_LATER else (1,),
        "prefetch": (0, 1, 2, 4),
    }
    held = 1 if product.quantization else 2
    for name, values in changes.items():
        for value in values:
            tile = now._replace(**{name: value})
            in_flight = tile.stages * tile.block * (tile.rows * held + 32 * 2)
            share = product.in_size // tile.splits
            if tile != now and in_flight <= 220 << 10 and share >= 2 * tile.block:
                yield tile


def configuration(size: str, arguments: argparse.Namespace) -> GPTConfig | T5Config:
    """A model with as many layers as STEP_BYTES hold, or the first ones of a shape with all kinds
    of layers."""
    if size in SHAPES:
        return first_layers(SHAPES[size])
    hidden, ffn, head_size, kv_heads = map(int, size.split(":"))
    gated = arguments.gated or arguments.t5
    ffn_bytes = hidden * ffn * 2 * (3 if gated else 2)
    if arguments.t5:
        attention_bytes = hidden * kv_heads * head_size * 2 * 6
        layers = max(2, STEP_BYTES // (attention_bytes + ffn_bytes))
        return replace(t5(hidden, layers, kv_heads, ffn), num_layers=1, head_size=head_size)
    return GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=max(2, STEP_BYTES // (hidden * hidden * 8 + ffn_bytes)),
        hidden_size=hidden,
        num_heads=hidden // head_size,
        num_kv_heads=kv_heads,
        head_size=head_size,
        ffn_size=ffn,
        max_positions=2048,
        end_id=VOCABULARY,
        start_id=0,
        **(MODERN if gated else {}),
    )


def first_layers(config: GPTConfig | T5Config) -> GPTConfig | T5Config:
    """The shape with its first layers, as many as it takes to have one of every kind."""
    branches = (getattr(config, "layer_branches", None) or "").split(",")
    if branches == [""]:
        raise ValueError("hybrids alone are tuned by name: give the sizes of other shapes")
    count = max(branches.index(kind) for kind in set(branches)) + 1
    return replace(config, num_layers=count, layer_branches=",".join(branches[:count]))


def few_layers(config: GPTConfig | T5Config, arguments: argparse.Namespace) -> Runner:
    """One rank's layers; its sums over the ranks are its own parts."""
    parallelism = Parallelism(arguments.ranks)
    most = max(rows for cases in CASES.values() for rows, _ in cases)
    settings = engine_settings(parallelism=parallelism, max_batch_size=most, max_tokens=8192)
    prepare_process(settings, DEVICE)
    weights = random_weights(config, parallelism, quantization=arguments.quantization)
    with torch.inference_mode():
        return assemble_runner(weights, settings, Communicator(parallelism), DEVICE)


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
    for part in (name for name in table if name != "measured_on"):
        lines = [f"    {json.dumps(key)}: {json.dumps(tile)}" for key, tile in table[part].items()]
        parts.append(f'  "{part}": {{' + ",".join(f"\n{line}" for line in lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
