"""Find the tiles of products with one row on this device; see launcher_scripts/kernels/tiles.py.

    python3 -m benchmarks.tune --out tiles.json [--sizes 768:3072 4096:16384]

Every candidate multiplies different weights one after the other, as a decode step does, in a CUDA
graph. Sizes are hidden:ffn; the table that is there is kept for sizes that are not measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from launcher_scripts.kernels.fused import prepare
from launcher_scripts.kernels.operands import (
    FoldedNorm,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    StepRows,
)
from launcher_scripts.kernels.row_products import early, row_heads, row_largest, row_product
from launcher_scripts.kernels.tiles import PAIRED, TABLE, RowTile

SIZES = ("768:3072", "2048:8192", "4096:16384", "6144:24576")
VOCABULARY = 51200
HEAD_SIZE = 64
BYTES_IN_TURN = 400 << 20  # several times the second cache, so that weights come from memory
WARPS = (1, 2, 4, 8)
ROWS = (1, 2, 4, 8, 16)
DEVICE = torch.device("cuda", 0)

Launch = Callable[[Linear, RowTile], object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 1
    report = json.loads(TABLE.read_text(encoding="utf-8"))
    report["measured_on"] = measured_on()
    found = report["row_products"]
    with torch.inference_mode():
        for hidden, ffn in (map(int, size.split(":")) for size in arguments.sizes):
            for kind, out_size, in_size in products(hidden, ffn):
                times = measure(kind, out_size, in_size)
                best = min(times, key=times.get)
                found[f"{kind} {in_size}"] = list(best)
                rate = out_size * in_size * 2 * (2 if kind == "gated" else 1) / times[best] / 1e6
                print(f"{kind} {in_size} -> {out_size}: {tuple(best)} {times[best]:.2f} us")
                print(f"    {rate:.2f} TB/s; runners-up {runners_up(times)}", flush=True)
    arguments.out.write_text(as_text(report), encoding="utf-8")
    return 0


def measured_on() -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
    }


def products(hidden: int, ffn: int) -> list[tuple[str, int, int]]:
    """(kind, out, in) of a GPT's products; those with a gate have an MLP two thirds as wide."""
    gated = ffn * 2 // 3 // 256 * 256
    return [
        ("heads", 3 * hidden, hidden),
        ("add", hidden, hidden),
        ("plain", hidden, hidden),
        ("up", ffn, hidden),
        ("gated", gated, hidden),
        ("add", hidden, ffn),
        ("add", hidden, gated),
        ("largest", VOCABULARY, hidden),
    ]


def measure(kind: str, out_size: int, in_size: int) -> dict[RowTile, float]:
    """Microseconds of a launch by tile, for those that run."""
    weight_bytes = out_size * in_size * 2 * (2 if kind == "gated" else 1)
    count = max(3, BYTES_IN_TURN // weight_bytes)
    height = out_size * 2 if kind == "gated" else out_size
    linears = [random_linear(kind, height, in_size) for _ in range(count)]
    launch = LAUNCHES[kind](out_size, in_size)
    times = {}
    for tile in candidates(kind, out_size, in_size):
        times[tile] = graph_microseconds(
            lambda tile=tile: [launch(linear, tile) for linear in linears]
        ) / len(linears)
    return times


def candidates(kind: str, out_size: int, in_size: int) -> Iterator[RowTile]:
    """Tiles that fit the threads: 8 columns for each, read 16 bytes at a time."""
    for rows, warps, rolled in itertools.product(ROWS, WARPS, (False, True)):
        block = 256 * warps
        elements = rows * block * (2 if kind in PAIRED else 1)
        pieces = -(-in_size // block)
        if elements > 16384 or elements < 1024 or block >= 2 * in_size:
            continue
        if (pieces > 12 and not rolled) or (pieces == 1 and rolled):
            continue
        if out_size // rows >= 132:
            yield RowTile(rows, block, warps, rolled)


def random_linear(kind: str, out_size: int, in_size: int) -> Linear:
    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, 0.02)

    norm = None
    if kind not in ("add",):
        vectors = (random(in_size, dtype=torch.float32) for _ in range(2))
        norm = Norm("layernorm", *vectors, 1e-5)
    bias = None if kind == "largest" else random(out_size)
    return prepare(Linear(random(out_size, in_size), bias, norm))


def halves(linear: Linear) -> tuple[Linear, Linear]:
    """The upper and the lower rows of a prepared linear with a layer norm and a bias."""
    weights = linear.weight.chunk(2)
    sums, offsets = linear.folded.sums.chunk(2), linear.folded.offsets.chunk(2)
    return tuple(
        Linear(
            weights[i],
            None,
            linear.norm,
            folded=FoldedNorm(linear.folded.gain, sums[i], offsets[i]),
        )
        for i in range(2)
    )


def _product(kind: str, out_size: int, in_size: int) -> Launch:
    x = torch.randn(1, in_size, device=DEVICE).bfloat16()
    residual = torch.randn(1, out_size, device=DEVICE) if kind == "add" else None
    out = torch.empty(1, out_size, device=DEVICE, dtype=torch.float32 if kind == "add" else x.dtype)
    rounded = torch.empty(1, out_size, device=DEVICE, dtype=x.dtype) if kind == "add" else None
    activation = {"up": "gelu", "gated": "silu"}.get(kind)

    def launch(linear: Linear, tile: RowTile) -> None:
        gate = None
        if kind == "gated":
            linear, gate = halves(linear)
        row_product(
            x,
            linear,
            out,
            kind,
            gate=gate,
            activation=activation,
            residual=residual,
            rounded=rounded,
            launch=early(x),
            tile=tile,
        )

    return launch


def _heads(out_size: int, in_size: int) -> Launch:
    heads = Heads(out_size // 3 // HEAD_SIZE, out_size // 3 // HEAD_SIZE, HEAD_SIZE)
    x = torch.randn(1, in_size, device=DEVICE)
    hidden = Hidden(x, x.bfloat16())
    rows = StepRows(*torch.tensor([[0], [80], [81]], device=DEVICE))
    parts = torch.zeros(2, heads.num_heads, 256, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16)
    return lambda linear, tile: row_heads(
        hidden, linear, heads, None, rows, LayerCache(*parts), tile
    )


def _largest(out_size: int, in_size: int) -> Launch:
    x = torch.randn(1, in_size, device=DEVICE)
    hidden = Hidden(x, x.bfloat16())
    return lambda linear, tile: row_largest(hidden, linear, out_size, tile)


LAUNCHES: dict[str, Callable[[int, int], Launch]] = {
    "heads": _heads,
    "largest": _largest,
    **{
        kind: lambda out_size, in_size, kind=kind: _product(kind, out_size, in_size)
        for kind in ("add", "plain", "up", "gated")
    },
}


def graph_microseconds(function: Callable[[], object]) -> float:
    """Median of a graph's replays."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    graph.reset()
    return statistics.median(times[2:])


def runners_up(times: dict[RowTile, float]) -> str:
    ordered = sorted(times, key=times.get)[1:4]
    return ", ".join(f"{tuple(tile)} {times[tile]:.2f}" for tile in ordered)


def as_text(report: dict) -> str:
    """JSON with a line per tile."""
    lines = [
        f"    {json.dumps(key)}: {json.dumps(tile)}" for key, tile in report["row_products"].items()
    ]
    return (
        f'{{\n  "measured_on": {json.dumps(report["measured_on"])},\n'
        f'  "row_products": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
