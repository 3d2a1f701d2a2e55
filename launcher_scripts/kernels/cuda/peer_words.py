"""The words in which ranks send each other values, in the Triton language; see peer_buffers.py.

A word of 8 bytes holds a float32 value and the number of the exchange. SHARE words of a lane have
one count of exchanges between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

SHARE = 64


@triton.jit
def send(value, number, inside, places, addresses, rank, lane_words, RANKS: tl.constexpr):
    """Write values to these places of this rank's lane, in every rank's buffer."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (number.to(tl.int64) << 32) | bits
    lane = ((number & 1) * RANKS + rank) * lane_words
    for receiver in tl.static_range(RANKS):
        buffer = tl.load(addresses + receiver).to(tl.pointer_type(tl.int64))
        tl.store(buffer + lane + places, word, mask=inside)


@triton.jit
def missing(old, awaited):
    """Whether words that are awaited are still of an old exchange."""
    return tl.max(tl.where(awaited & old, 1, 0), None) > 0


@triton.jit
def receive(words, number, awaited):
    """The values of the exchange with this number, once all have come; others are undefined."""
    word = tl.load(words, mask=awaited, other=0, volatile=True)
    while missing((word >> 32) != number, awaited):
        word = tl.load(words, mask=awaited, other=0, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_rank_sums(
    values,
    part,
    row,
    columns,
    inside,
    size,
    buffer,
    addresses,
    exchanges,
    rank,
    lane_words,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """values of a row, plus this rank's part of it and then, in the ranks' order, the others'.

    The program has the whole row [size]. Rows lie in whole shares of a lane.
    """
    places = row * ((size + SHARE - 1) // SHARE * SHARE) + columns
    number = tl.load(exchanges + places // SHARE, mask=inside, other=0, cache_modifier=".cg") + 1
    send(part, number, inside, places, addresses, rank, lane_words, RANKS)
    for sender in tl.static_range(RANKS):
        lane = ((number & 1) * RANKS + sender) * lane_words
        values += receive(buffer + lane + places, number, inside)
    tl.store(exchanges + places // SHARE, number, mask=inside & (columns % SHARE == 0))
    return values
