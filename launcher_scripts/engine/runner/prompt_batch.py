"""The new tokens of a prefill step on the device, brought there by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.engine.core.plan import PrefillPart, RowStart
from launcher_scripts.engine.model.layers import Chunk
from launcher_scripts.kernels.operands import QUERIES_PER_TILE, VarlenBatch

TOKEN_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
ROW_BUCKETS = (1, 16)
Integers = NDArray[np.int64]
NOTHING: Integers = np.empty(0, dtype=np.int64)


class Sizes(NamedTuple):
    """How many of each a packed batch has: tokens, pieces of queries (see VarlenBatch), rows."""

    tokens: int
    tiles: int
    rows: int


@dataclass(frozen=True)
class PromptBatch:
    """New tokens of several rows, one row after the other.

    ids, positions, slots: [N], the slots are cache tokens
    row_slots, lengths:    [R], the rows, and how many tokens of each are then in the cache
    last, ended:           [R], places of the last tokens of prompts that end, and their rows
    chunks:              of every row; none where the batch only fills a recorded one
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: VarlenBatch
    row_slots: Tensor
    lengths: Tensor
    last: Tensor
    ended: Tensor
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Nowhere:
    """Where tokens and rows that only fill a batch up go: a cache token and a slot of no row."""

    token: int
    slot: int


def prompt_bucket(tokens: int, rows: int) -> Sizes | None:
    """What a pass over so many is filled up to; None where it is larger than all buckets."""
    filled = next((size for size in TOKEN_BUCKETS if tokens <= size), None)
    places = next((size for size in ROW_BUCKETS if rows <= size), None)
    return None if filled is None or places is None else bucket_sizes(filled, places)


def bucket_sizes(tokens: int, rows: int) -> Sizes:
    """Of a batch that is filled up: every row, and what fills up, may end in part of a piece."""
    return Sizes(tokens, tokens // QUERIES_PER_TILE + rows + 1, rows)


class PackedPrompts:
    """A prefill step's parts as one array, exactly as large or filled up to a bucket."""

    def __init__(self, rows: Sequence[RowStart], parts: Sequence[PrefillPart]) -> None:
        self.rows = rows
        self.parts = parts
        self.spans = VarlenBatch(
            tuple((row.start, part.past, part.count) for row, part in self._pairs())
        )
        ends = np.cumsum([part.count for part in parts]) - 1
        self.complete = {
            int(end): row
            for end, (row, part) in zip(ends, self._pairs(), strict=True)
            if part.past + part.count == row.past + len(row.ids)
        }

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def sizes(self) -> Sizes:
        """Exactly as large as it is."""
        return Sizes(self.tokens, len(self.spans.pieces()), len(self.parts))

    def bucket(self) -> Sizes | None:
        """The sizes that it is filled up to; None where it is larger than all."""
        return prompt_bucket(self.tokens, len(self.parts))

    def to_device(self, device: torch.device, nowhere: Nowhere, sizes: Sizes | None) -> Tensor:
        """One int64 vector for `unpacked`; sizes: what is filled up to."""
        pieces = self.spans.pieces()
        if sizes is None:
            sizes = self.sizes
        else:
            pieces += filling_pieces(self.tokens, sizes.tokens)
        places = [np.arange(part.past, part.past + part.count) for part in self.parts]
        ids = [
            token
            for row, part in self._pairs()
            for token in row.ids[part.past - row.past : part.past - row.past + part.count]
        ]
        positions = [
            place + row.dropped for place, (row, _) in zip(places, self._pairs(), strict=True)
        ]
        slots = [place + row.start for place, (row, _) in zip(places, self._pairs(), strict=True)]
        columns = (
            _filled(ids, sizes.tokens, 0),
            _filled(np.concatenate([*positions, NOTHING]), sizes.tokens, 0),
            _filled(np.concatenate([*slots, NOTHING]), sizes.tokens, nowhere.token),
            _filled(np.array(pieces).ravel(), 4 * sizes.tiles, 0),
            _filled([part.slot for part in self.parts], sizes.rows, nowhere.slot),
            _filled([part.past + part.count for part in self.parts], sizes.rows, 0),
            _filled(list(self.complete), sizes.rows, 0),
            _filled([row.slot for row in self.complete.values()], sizes.rows, nowhere.slot),
        )
        packed = torch.from_numpy(np.concatenate(columns))
        if device.type == "cuda":
            packed = packed.pin_memory()
        return packed.to(device, non_blocking=True)

    def _pairs(self) -> list[tuple[RowStart, PrefillPart]]:
        return list(zip(self.rows, self.parts, strict=True))


def filling_pieces(first: int, end: int) -> list[tuple[int, int, int, int]]:
    """Pieces of the tokens from `first` on, which only fill a step up."""
    return [
        (place, -min(QUERIES_PER_TILE, end - place), 0, 0)
        for place in range(first, end, QUERIES_PER_TILE)
    ]


def unpacked(
    packed: Tensor, sizes: Sizes, spans: VarlenBatch, chunks: tuple[Chunk, ...] = ()
) -> PromptBatch:
    """The parts of `to_device`'s vector, as views."""
    tokens, tiles, rows = sizes
    ids, positions, slots, pieces, row_slots, lengths, last, ended = packed.split(
        [tokens, tokens, tokens, 4 * tiles, rows, rows, rows, rows]
    )
    spans = VarlenBatch(spans.spans, pieces.view(-1, 4))
    return PromptBatch(ids, positions, slots, spans, row_slots, lengths, last, ended, chunks)


def _filled(values: Sequence[int] | Integers, size: int, rest: int) -> Integers:
    filled = np.full(size, rest, dtype=np.int64)
    filled[: len(values)] = values
    return filled
