"""Tiles fit the shared memory that a program has."""

from __future__ import annotations

import pytest

from launcher_scripts.kernels.cuda.tiles import DotTile, part, table

HOPPER = 227 * 1024
AMPERE_CARD = 99 * 1024


def bytes_on_their_way(tile: DotTile, batch: int, in_bytes: bool) -> int:
    weights = tile.rows * tile.block * (1 if in_bytes else 2)
    inputs = batch * tile.block * 2  # a high and a low int8, or a number of two bytes
    return tile.stages * (weights + inputs)


@pytest.mark.parametrize("shared_bytes", [HOPPER, AMPERE_CARD])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_every_known_tile_fits_any_number_of_rows(in_bytes: bool, shared_bytes: int) -> None:
    for known in table()[part("dot_products", in_bytes)].values():
        for batch in (16, 32, 64):
            tile = DotTile(*known).fitting(batch, in_bytes, shared_bytes)
            assert bytes_on_their_way(tile, batch, in_bytes) <= shared_bytes
            assert 1 <= tile.stages <= known[3]


def test_a_tile_that_fits_stays_what_it_is() -> None:
    tile = DotTile(64, 256, 4, 4, 1)
    assert tile.fitting(32, False, HOPPER) == tile
    assert tile.fitting(64, False, HOPPER).stages == 3
