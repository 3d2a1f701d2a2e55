"""The words in which ranks send each other values, in the Triton language; see peer_buffers.py.

A word of 8 bytes holds a float32 value and the number of the exchange. SHARE words of a lane have
one count of exchanges between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

SHARE = 64


@triton.jit
def send_to(value, number, inside, places, address, rank, lane_words, RANKS: tl.constexpr):
    """Write values to these places of this rank's lane, in the buffer whose address this is."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (number.to(tl.int64) << 32) | bits
    buffer = tl.load(address).to(tl.pointer_type(tl.int64))
    lane = ((number & 1) * RANKS + rank) * lane_words
    tl.store(buffer + lane + places, word, mask=inside)


@triton.jit
def send(value, number, inside, places, addresses, rank, lane_words, RANKS: tl.constexpr):
    """Write values to these places of this rank's lane, in every rank's buffer."""
    for receiver in tl.static_range(RANKS):
        send_to(value, number, inside, places, addresses + receiver, rank, lane_words, RANKS)


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
def add_lanes(buffer, number, places, inside, lane_words, RANKS: tl.constexpr, LANES: tl.constexpr):
    """The sum of what all ranks sent for these places; LANES is RANKS as a power of two."""
    lanes = tl.arange(0, LANES)[:, None]
    awaited = (lanes < RANKS) & inside[None, :]
    words = buffer + ((number & 1) * RANKS + lanes) * lane_words + places[None, :]
    value = receive(words, number, awaited)
    return tl.sum(tl.where(awaited, value, 0.0), 0)
