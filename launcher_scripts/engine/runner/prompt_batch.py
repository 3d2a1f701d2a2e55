"""The new tokens of prompts on the device, and the rows that decode beside them: one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.engine.messages.plan import NO_TASK, Bounds, PrefillPart, RowStart
from launcher_scripts.engine.model.layers import Chunk
from launcher_scripts.engine.model.network import PromptBatch
from launcher_scripts.engine.runner.graphs import bucket_rows
from launcher_scripts.kernels.operands import QUERIES_PER_TILE, VarlenBatch

# Of prompts and rows that decode together. cuBLAS takes longer for 448 than for 512.
TOKEN_BUCKETS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
COPIED_AT_ONCE = 1 << 16  # bytes that the driver takes from any memory without waiting
Integers = NDArray[np.int64]
NO_BOUNDS = Bounds()
EMPTY: Integers = np.empty(0, dtype=np.int64)


class Sizes(NamedTuple):
    """Sizes of a packed batch: tokens of prompts, pieces of queries (see VarlenBatch), rows of
    prompts, and rows that decode.

    lora: whether any row has a LoRA adapter
    """

    tokens: int
    tiles: int
    rows: int
    decoding: int = 0
    lora: bool = False


@dataclass(frozen=True)
class Nowhere:
    """Targets of tokens and rows that only pad a batch: an address and a slot of no row."""

    token: int
    slot: int


def prompt_bucket(tokens: int, rows: int, decoding: int = 0) -> Sizes | None:
    """Return the sizes to which such a pass is padded; None if it is larger than all buckets.

    decoding: rows that decode in the same pass, filled up to already
    """
    filled = next((size for size in TOKEN_BUCKETS if tokens + decoding <= size), None)
    if filled is None:
        return None
    num_rows = max(several_rows(filled), bucket_rows(rows, filled)) if rows > 1 else 1
    return bucket_sizes(filled - decoding, num_rows)._replace(decoding=decoding)


def several_rows(tokens: int) -> int:
    """Return the number to which several rows of prompts in a pass of this many tokens are padded;
    more rows, of a few tokens each, have their own buckets.
    """
    return max(16, tokens // 32)


def recorded_tokens(decoding: int, max_rows: int) -> list[int]:
    """Prompt tokens of the passes that are CUDA graphs and filled by them, in which so many rows
    decode; ascending.

    max_rows: maximum number of rows that decode in any pass
    """
    rows = bucket_rows(decoding, max_rows) if decoding else 0
    sizes = [size - rows for size in TOKEN_BUCKETS if size > rows]
    return sizes or [TOKEN_BUCKETS[0]]


def bucket_sizes(tokens: int, rows: int) -> Sizes:
    """Return the sizes of a padded batch: every row, and the padding, may end in part of a
    piece."""
    return Sizes(tokens, tokens // QUERIES_PER_TILE + rows + 1, rows)


class PackedPrompts:
    """Parts of prompts as one array, exactly as large or filled up to a bucket.

    decoding: rows that run one token in the same pass;  bounds: theirs
    ids:      the tokens where the device knows them alone, [N]; None: those of the rows
    complete: the rows whose prompts end, by the places of their last tokens among the prompts'
    """

    def __init__(
        self,
        rows: Sequence[RowStart],
        parts: Sequence[PrefillPart],
        decoding: Sequence[RowStart] = (),
        bounds: Bounds = NO_BOUNDS,
        ids: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.parts = parts
        self._pairs = list(zip(rows, parts, strict=True))
        self._ids = ids
        self.decoding = decoding
        self.longest = bounds.own if decoding else 0
        self._has_lora = bounds.lora or any(row.lora_adapter != NO_TASK for row in rows)
        self.spans = VarlenBatch(
            tuple((row.start, part.past, part.count) for row, part in self._pairs)
        )
        ends = np.cumsum([part.count for part in parts]) - 1
        self.complete = {
            int(end): row
            for end, (row, part) in zip(ends, self._pairs, strict=True)
            if part.past + part.count == row.past + len(row.ids)
        }

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def sizes(self) -> Sizes:
        """Exactly as large as it is."""
        tiles = len(self.spans.pieces())
        return Sizes(self.tokens, tiles, len(self.parts), len(self.decoding), self._has_lora)

    def bucket(self, max_rows: int) -> Sizes | None:
        """The sizes that it is filled up to; None where it is larger than all.

        max_rows: of those that decode
        """
        decoding = self.padded(max_rows).decoding
        sizes = prompt_bucket(self.tokens, len(self.parts), decoding)
        return sizes and sizes._replace(lora=self._has_lora)

    def padded(self, max_rows: int) -> Sizes:
        """The sizes where rows that decode alone are filled up; max_rows: of those."""
        decoding = bucket_rows(len(self.decoding), max_rows) if self.decoding else 0
        return self.sizes._replace(decoding=decoding)

    def to_device(self, device: torch.device, nowhere: Nowhere, sizes: Sizes | None) -> Tensor:
        """One int64 vector for `unpacked`; sizes: what is filled up to."""
        packed = self.packed(device, nowhere, sizes).to(device, non_blocking=True)
        if self._ids is not None:
            packed[: self.tokens] = self._ids  # which the ids are the first of
        return packed

    def packed(self, device: torch.device, nowhere: Nowhere, sizes: Sizes | None) -> Tensor:
        """The same vector on the host, for that device, without ids that only the device knows."""
        pieces = self.spans.pieces()
        if sizes is None:
            sizes = self.sizes
        else:
            pieces += filling_pieces(self.tokens, sizes.tokens)
        indices = [np.arange(part.past, part.past + part.count) for part in self.parts]
        ids = [
            token
            for row, part in self._pairs
            for token in row.ids[part.past - row.past : part.past - row.past + part.count]
        ]
        positions = [
            range_of_row + row.dropped
            for range_of_row, (row, _) in zip(indices, self._pairs, strict=True)
        ]
        slots = [
            range_of_row + row.start
            for range_of_row, (row, _) in zip(indices, self._pairs, strict=True)
        ]
        ending = sizes.decoding + sizes.rows
        packed = _filled_up(
            (ids, sizes.tokens, 0),
            (np.concatenate([*positions, EMPTY]), sizes.tokens, 0),
            (np.concatenate([*slots, EMPTY]), sizes.tokens, nowhere.token),
            ([number for piece in pieces for number in piece], 4 * sizes.tiles, 0),
            ([part.slot for part in self.parts], sizes.rows, nowhere.slot),
            ([part.past + part.count for part in self.parts], sizes.rows, 0),
            ([row.slot for row in self.decoding], sizes.decoding, nowhere.slot),
            (self.places(sizes.decoding), ending, 0),
            ([row.slot for row in self.going_on], ending, nowhere.slot),
            (self._lora_adapters(), sizes.tokens, NO_TASK) if sizes.lora else (EMPTY, 0, 0),
        )
        large = device.type == "cuda" and packed.nbytes > COPIED_AT_ONCE
        return packed.pin_memory() if large else packed

    @property
    def going_on(self) -> list[RowStart]:
        """The rows that get a token: those that decode, and those whose prompts end."""
        return [*self.decoding, *self.complete.values()]

    def places(self, first: int) -> list[int]:
        """Return the indices of the last tokens of these rows in a pass whose prompts begin at
        `first`."""
        return [*range(len(self.decoding)), *(first + index for index in self.complete)]

    def _lora_adapters(self) -> list[int]:
        """Return the adapter of each token of the prompts."""
        return [row.lora_adapter for row, part in self._pairs for _ in range(part.count)]


def filling_pieces(first: int, end: int) -> list[tuple[int, int, int, int]]:
    """Pieces of the tokens from `first` on, which only fill a step up."""
    return [
        (start, -min(QUERIES_PER_TILE, end - start), 0, 0)
        for start in range(first, end, QUERIES_PER_TILE)
    ]


def unpacked(
    packed: Tensor, sizes: Sizes, spans: VarlenBatch, chunks: tuple[Chunk, ...] = ()
) -> PromptBatch:
    """The parts of `to_device`'s vector, as views."""
    tokens, tiles, rows, decoding, lora = sizes
    ending = decoding + rows
    ids, positions, slots, pieces, row_slots, lengths, siblings, last, finished, adapters = (
        packed.split(
            [tokens, tokens, tokens, 4 * tiles, rows, rows, decoding, ending, ending, lora * tokens]
        )
    )
    spans = VarlenBatch(spans.spans, pieces.view(-1, 4))
    return PromptBatch(
        ids,
        positions,
        slots,
        spans,
        row_slots,
        lengths,
        siblings,
        last,
        finished,
        chunks,
        adapters if lora else None,
    )


def _filled_up(*columns: tuple[Sequence[int] | Integers, int, int]) -> Tensor:
    """Values one after the other, each of the columns as long as its size and filled up by what
    stands behind that."""
    buffer = np.empty(sum(size for _, size, _ in columns), dtype=np.int64)
    offset = 0
    for values, size, padding in columns:
        end = offset + len(values)
        buffer[offset:end] = values
        offset += size
        buffer[end:offset] = padding
    return torch.from_numpy(buffer)
