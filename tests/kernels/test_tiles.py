"""Tiles fit the shared memory that a program has."""

from __future__ import annotations

import pytest

from launcher_scripts.common.quantization import Quantization
from launcher_scripts.kernels.cuda import compiling
from launcher_scripts.kernels.cuda.compiling import DotTile, dot_tile, forget, part, row_tile, table

HOPPER = 227 * 1024
AMPERE_CARD = 99 * 1024


def bytes_on_their_way(tile: DotTile, batch: int, weight_bytes: int) -> int:
    weights = tile.rows * tile.block * weight_bytes
    inputs = batch * tile.block * 2  # a high and a low int8, or a number of two bytes
    return tile.stages * (weights + inputs)


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE_CARD])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_every_known_tile_fits_any_number_of_rows(
    quantization: Quantization | None, shared_bytes: int
) -> None:
    weight_bytes = 1 if quantization else 2
    for known in table().get(part("dot_products", quantization), {}).values():
        for batch in (16, 32, 64):
            tile = DotTile(*known).fitting(batch, weight_bytes, shared_bytes)
            assert bytes_on_their_way(tile, batch, weight_bytes) <= shared_bytes
            assert 1 <= tile.stages <= known[3]


def test_a_tile_that_fits_stays_what_it_is() -> None:
    tile = DotTile(64, 256, 4, 4, 1)
    assert tile.fitting(32, 2, HOPPER) == tile
    assert tile.fitting(64, 2, HOPPER).stages == 3


def test_fp8_has_the_tiles_of_int8_but_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"int8_row_products": {"add 8": [1, 8, 2, False]}}
    known |= {"int8_dot_products": {"add 8": [32, 8, 2, 3, 4]}}
    known |= {"fp8_dot_products": {"add 8": [64, 8, 2, 3, 4]}}
    monkeypatch.setattr(compiling, "table", lambda: known)
    forget()
    try:
        assert row_tile("add", 16, 8, "fp8") == row_tile("add", 16, 8, "int8") == (1, 8, 2, False)
        assert [dot_tile("add", 16, 8, kind).rows for kind in ("int8", "fp8")] == [32, 64]
    finally:
        forget()
