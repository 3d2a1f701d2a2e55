"""Which tile a kernel uses for which shape: found once on a device, kept in tiles.json.

The table says what it was measured on; `python3 -m benchmarks.tune` measures it again. A key is a
product's kind and its weight's shape, "up 16384x4096", or its inputs alone, "up 4096", which holds
for other shapes. What it does not name gets a tile by rule.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("tiles.json")
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

    def fitting(self, batch: int, in_bytes: bool, shared_bytes: int) -> DotTile:
        """With no more pieces on their way than a program's shared memory holds.

        A piece has `rows` of the weight and `batch` of the inputs, which an int8 weight meets as
        a high and a low int8; tiles are measured with fewer rows of inputs than there may be.
        """
        piece = self.block * (self.rows + 2 * batch if in_bytes else 2 * (self.rows + batch))
        return self._replace(stages=max(1, min(self.stages, shared_bytes // piece)))


@cache
def dot_tile(kind: str, out_size: int, in_size: int, in_bytes: bool = False) -> DotTile:
    """The tile of a product with a few rows: kind is plain, heads, query, add, up, gated
    or largest; in_bytes: the weight is."""
    found = _known("dot_products", kind, out_size, in_size, in_bytes)
    if found:
        return DotTile(*found)
    return DotTile(64, 256 if in_bytes else 128, 4, 4, 4 if kind == "add" else 1)


@cache
def row_tile(kind: str, out_size: int, in_size: int, in_bytes: bool = False) -> RowTile:
    """The tile of a product with one row: kind is plain, add, up, gated, heads or largest;
    in_bytes: the weight is."""
    found = _known("row_products", kind, out_size, in_size, in_bytes)
    return RowTile(*found) if found else _row_rule(kind, in_size, in_bytes)


def _known(
    products: str, kind: str, out_size: int, in_size: int, in_bytes: bool
) -> list[Any] | None:
    known = table()[part(products, in_bytes)]
    return known.get(f"{kind} {out_size}x{in_size}") or known.get(f"{kind} {in_size}")


def part(products: str, in_bytes: bool) -> str:
    """Where the table has tiles of row_products or dot_products."""
    return f"byte_{products}" if in_bytes else products


@cache
def table() -> dict[str, dict[str, list[Any]]]:
    """What tiles.json says. Who changes it calls `forget`."""
    found: dict[str, dict[str, list[Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def forget() -> None:
    """Look tiles up again in the table, which has changed."""
    for function in (row_tile, dot_tile):
        function.cache_clear()


def _row_rule(kind: str, in_size: int, in_bytes: bool) -> RowTile:
    rows = (8 if in_bytes else 4) // (2 if kind in PAIRED else 1)
    if in_size >= 4096:
        return RowTile(rows, 2048, 8, in_size > 12288)
    block = 1024
    while block > 8 and block // 2 >= in_size:
        block //= 2
    return RowTile(rows, block, 4, False)
