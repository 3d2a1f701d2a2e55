"""Sums of several rows over GPUs that write into each other's memory, in the Triton language.

Every block of columns has an owner among the ranks. All ranks send it their parts of the block; it
adds them up and sends every rank the sum: two exchanges (see peer_buffers.py), in which a rank
sends 2 * (ranks - 1) / ranks words for each number. The kernel behind them receives the sums.

The kernels that receive are launched when all that came before the first one is complete, and wait
for words alone; only then for the end of the kernel before them.

The words in which ranks send each other values, in the Triton language; see peer_buffers.py.

A word of 8 bytes holds a float32 value and the number of the exchange. SHARE words of a lane have
one count of exchanges between them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from launcher_scripts.kernels.cuda.compiling import launcher, pdl_options
from launcher_scripts.kernels.operands import PeerBuffers

SHARE = 64


@triton.jit
def send_to(value, number, mask, places, address, rank, lane_words, RANKS: tl.constexpr):
    """Write values to these places of this rank's lane, in the buffer whose address this is."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (number.to(tl.int64) << 32) | bits
    buffer = tl.load(address).to(tl.pointer_type(tl.int64))
    lane = ((number & 1) * RANKS + rank) * lane_words
    tl.store(buffer + lane + places, word, mask=mask)


@triton.jit
def send(value, number, mask, places, addresses, rank, lane_words, RANKS: tl.constexpr):
    """Write values to these places of this rank's lane, in every rank's buffer."""
    for receiver in tl.static_range(RANKS):
        send_to(value, number, mask, places, addresses + receiver, rank, lane_words, RANKS)


@triton.jit
def missing(old, awaited):
    """Return whether words that are awaited are still of an old exchange."""
    return tl.max(tl.where(awaited & old, 1, 0), None) > 0


@triton.jit
def receive(words, number, awaited):
    """The values of the exchange with this number, once all have come; others are undefined."""
    word = tl.load(words, mask=awaited, other=0, volatile=True)
    while missing((word >> 32) != number, awaited):
        word = tl.load(words, mask=awaited, other=0, volatile=True)
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_lanes(buffer, number, places, mask, lane_words, RANKS: tl.constexpr, LANES: tl.constexpr):
    """The sum of what all ranks sent for these places; LANES is RANKS as a power of two."""
    lanes = tl.arange(0, LANES)[:, None]
    awaited = (lanes < RANKS) & mask[None, :]
    words = buffer + ((number & 1) * RANKS + lanes) * lane_words + places[None, :]
    value = receive(words, number, awaited)
    return tl.sum(tl.where(awaited, value, 0.0), 0)


OWNED = 256  # columns of a block; whole shares


@triton.jit
def _offsets(row, columns, size, SHARE: tl.constexpr):
    """Return the offsets of the columns of a row [size] in a lane: rows begin with whole shares."""
    return row * ((size + SHARE - 1) // SHARE * SHARE) + columns


@triton.jit
def _exchanged(exchanges, places, mask, SHARE: tl.constexpr):
    """Return the number of exchanges at these offsets so far."""
    return tl.load(exchanges + places // SHARE, mask=mask, other=0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["rank"])
def parts_to_owner(
    parts,
    addresses,
    exchanges,
    rank,
    lane_words,
    count,
    size,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row's block of the sum of parts, to its owner."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        offset = parts + (part * count + row) * size + columns
        total += tl.load(offset, mask=mask, other=0.0).to(tl.float32)
    offsets = _offsets(row, columns, size, SHARE)
    number = _exchanged(exchanges, offsets, mask, SHARE) + 1
    address = addresses + block % RANKS
    send_to(total, number, mask, offsets, address, rank, lane_words, RANKS)


@triton.jit(do_not_specialize=["rank"])
def sums_to_peers(
    buffer,
    addresses,
    exchanges,
    rank,
    lane_words,
    size,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the sum of a row's block that this rank owns, to every rank."""
    if USE_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * RANKS + rank) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    offsets = _offsets(row, columns, size, SHARE)
    number = _exchanged(exchanges, offsets, mask, SHARE) + 1
    total = add_lanes(buffer, number, offsets, mask, lane_words, RANKS, LANES)
    send(total, number + 1, mask, offsets, addresses, rank, lane_words, RANKS)
    if USE_PDL:
        gdc_wait()


@triton.jit
def receive_row(
    row,
    columns,
    mask,
    size,
    buffer,
    exchanges,
    lane_words,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    OWNED: tl.constexpr,
):
    """The sum over the ranks of a whole row [size], and its exchanges counted."""
    offsets = _offsets(row, columns, size, SHARE)
    number = _exchanged(exchanges, offsets, mask, SHARE) + 2
    lanes = (number & 1) * RANKS + columns // OWNED % RANKS
    # Of two dimensions: how they are loaded is not tied to the row's other values.
    words = buffer + (lanes * lane_words + offsets)[None, :]
    value = receive(words, number[None, :], mask[None, :])
    tl.store(exchanges + offsets // SHARE, number, mask=mask & (columns % SHARE == 0))
    return tl.sum(value, 0)


def fits_buffers(rows: int, size: int, buffers: PeerBuffers) -> bool:
    """Return whether the buffers hold sums [rows, size]: rows begin with whole shares."""
    shares = triton.cdiv(size, SHARE) * (rows - 1)
    return bool(shares * SHARE + size <= buffers.lane_words)


def send_parts(parts: Tensor, buffers: PeerBuffers) -> None:
    """The sum of this rank's parts [P, N, hidden], to the owners of its blocks."""
    _, count, size = parts.shape
    launcher(parts_to_owner, (count, triton.cdiv(size, OWNED)))(
        parts,
        buffers.addresses,
        buffers.exchanges,
        buffers.rank,
        buffers.lane_words,
        count,
        size,
        PARTS=parts.shape[0],
        RANKS=buffers.ranks,
        SHARE=SHARE,
        BLOCK=OWNED,
        num_warps=2,
        **pdl_options(parts),
    )


def send_sums(rows: int, size: int, buffers: PeerBuffers) -> None:
    """Send the blocks of a sum [rows, size] that this rank owns to every rank."""
    blocks = triton.cdiv(size, OWNED)
    launcher(sums_to_peers, (rows, triton.cdiv(blocks, buffers.ranks)))(
        buffers.local,
        buffers.addresses,
        buffers.exchanges,
        buffers.rank,
        buffers.lane_words,
        size,
        RANKS=buffers.ranks,
        LANES=triton.next_power_of_2(buffers.ranks),
        SHARE=SHARE,
        BLOCK=OWNED,
        num_warps=2,
        **pdl_options(buffers.local),
    )
