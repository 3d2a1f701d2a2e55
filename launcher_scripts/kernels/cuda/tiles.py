"""Which tile a kernel uses for which shape: found once on a device, kept in tiles.json.

The table says what it was measured on; `python3 -m benchmarks.tune` measures it again. A key is a
product's kind and its weight's shape, "up 16384x4096", or its inputs alone, "up 4096", which holds
for other shapes. Weights in bytes have parts of their own; what fp8's lack, int8's have. What the
table does not name gets a tile by rule.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from launcher_scripts.common.quantization import Quantization

TABLE = Path(__file__).with_name("tiles.json")
SPLITS = {"add": 4, "router": 8}  # programs that share a product's columns; of other kinds 1
PAIRED = ("heads", "gated")  # two rows of the weight for every row of the tile


class RowTile(NamedTuple):
    """rows of the weight per program, columns per piece, warps; whether pieces come in a loop."""

    rows: int
    block: int
    warps: int
    rolled: bool


class DotTile(NamedTuple):
    """rows of the weight per program (of weight and gate together), columns per piece, warps,
    pieces on their way, how many programs share the columns (where the parts are summed
    afterwards), and how many pieces of the weight are prefetched before gdc_wait."""

    rows: int
    block: int
    warps: int
    stages: int
    splits: int
    prefetch: int = 0

    def fitting(self, batch: int, weight_bytes: int, shared_bytes: int) -> DotTile:
        """With no more pieces on their way than a program's shared memory holds.

        A piece has `rows` of the weight, of weight_bytes each, and `batch` of the inputs: two bytes
        each, which for int8 are a high and a low one. Tiles are measured with fewer rows of inputs
        than there may be.
        """
        piece = self.block * (self.rows * weight_bytes + 2 * batch)
        return self._replace(stages=max(1, min(self.stages, shared_bytes // piece)))


@cache
def dot_tile(
    kind: str, out_size: int, in_size: int, quantization: Quantization | None = None
) -> DotTile:
    """The tile of a product with a few rows: kind is plain, heads, query, add, up, gated, router
    or largest; quantization: the weight's."""
    found = _known("dot_products", kind, out_size, in_size, quantization)
    if found:
        return DotTile(*found)
    return DotTile(64, 256 if quantization else 128, 4, 4, SPLITS.get(kind, 1))


@cache
def row_tile(
    kind: str, out_size: int, in_size: int, quantization: Quantization | None = None
) -> RowTile:
    """The tile of a product with one row: kind is plain, add, up, gated, heads or largest;
    quantization: the weight's."""
    found = _known("row_products", kind, out_size, in_size, quantization)
    return RowTile(*found) if found else _row_rule(kind, in_size, quantization)


def _known(
    products: str, kind: str, out_size: int, in_size: int, quantization: Quantization | None
) -> list[Any] | None:
    parts = [part(products, quantization)]
    if quantization == "fp8":
        parts.append(part(products, "int8"))
    keys = (f"{kind} {out_size}x{in_size}", f"{kind} {in_size}")
    known = (table().get(name, {}).get(key) for name in parts for key in keys)
    return next(filter(None, known), None)


def part(products: str, quantization: Quantization | None) -> str:
    """Where the table has tiles of row_products or dot_products."""
    return f"{quantization}_{products}" if quantization else products


@cache
def table() -> dict[str, dict[str, list[Any]]]:
    """What tiles.json says. Who changes it calls `forget`."""
    found: dict[str, dict[str, list[Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def forget() -> None:
    """Look tiles up again in the table, which has changed."""
    for function in (row_tile, dot_tile):
        function.cache_clear()


def _row_rule(kind: str, in_size: int, quantization: Quantization | None) -> RowTile:
    rows = (8 if quantization else 4) // (2 if kind in PAIRED else 1)
    if in_size >= 4096:
        return RowTile(rows, 2048, 8, in_size > 12288)
    block = 1024
    while block > 8 and block // 2 >= in_size:
        block //= 2
    return RowTile(rows, block, 4, False)
