"""Operands of the operations: a layer's tensors, grouped as they are used together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from launcher_scripts.common.quantization import Quantization

# Cosines and sines, float32 [positions, rotary_size / 2] each.
RotaryTable: TypeAlias = tuple[Tensor, Tensor]

QUERIES_PER_TILE = 128
MAX_LISTED = 512  # biases of a row, and tokens of its bad words
WIDEST_PROMPT_HEAD = 256  # that attention to prompts of several rows can take in one launch


@dataclass(frozen=True)
class Norm:
    """A layer norm (`bias` given) or an RMS norm.

    weight, bias: float32 [hidden]
    kind:         "layernorm" or "rmsnorm"
    """

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class HeadNorms:
    """Norms of every head's queries and keys, float32 [head_size].

    joint:  of all heads of a token together, [heads * head_size]; over all ranks' heads
    scales: float32 [q + k + v], what the normalized heads are multiplied by, each by its own
    """

    query: Norm
    key: Norm
    joint: bool = False
    scales: Tensor | None = None

    def before_rope(self) -> tuple[HeadNorms, Tensor]:
        """Norms without weights before the rotary embedding, and a factor of the queries after it
        [head_size], which give the scores of these norms after it: turning keeps the mean square.
        """
        query, key = (
            replace(norm, weight=torch.ones_like(norm.weight)) for norm in (self.query, self.key)
        )
        return replace(self, query=query, key=key), self.query.weight * self.key.weight


@dataclass(frozen=True)
class XIELUCurve:
    """Parameters of the activation xIELU (arXiv:2411.13010), float32 scalars.

    positive, negative: the logarithms of exp - 1 of the curves' strengths, the negative one's
                        beyond beta
    """

    positive: Tensor
    negative: Tensor
    beta: Tensor
    eps: Tensor


@dataclass(frozen=True)
class FoldedNorm:
    """A norm before a projection W x + c as cuda/gemv.py wants it, known beforehand.

    sums:    float32 [out], W g; None for an RMS norm
    offsets: float32 [out], W b + c; None where there is neither
    """

    sums: Tensor | None
    offsets: Tensor | None


@dataclass(frozen=True)
class LoRA:
    """LoRA (arXiv:2106.09685) of a projection: what several adapters add, of which a row has one.

    down:   [adapters, blocks * rank, in], A;  up: [adapters, rank, out], B times its scale; both in
            the compute type
    widths: outputs of each block, which has rows of A of its own
    """

    down: Tensor
    up: Tensor
    widths: tuple[int, ...]


@dataclass(frozen=True)
class RowLoRA:
    """LoRA as the rows of x chose it.  adapters: int64 [N], each row's adapter; -1: none"""

    lora: LoRA
    adapters: Tensor


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, of a normalized x where there is a norm.

    weight:  [out, in] in the compute type, or in bytes: int8 or e4m3 (see quantization.py);
             uint8 [out, in / 2] of four bits (see four_bits.py)
    bias:    [out] in the compute type
    norm:    applied to x first
    scale:   float32 [out]: what each row of a weight in bytes is multiplied by; see four_bits.py
    compute: the compute type of a weight in bytes or of four bits
    folded:  the norm as a product with one row wants it; made by kernels.prepare
    lora:    what the rows' adapters add, none of it multiplied by scale. That of a gated MLP's up
             has another block behind its own: what they add to the gate
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    scale: Tensor | None = None
    compute: torch.dtype | None = None
    folded: FoldedNorm | None = None
    lora: RowLoRA | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute type."""
        return self.compute or self.weight.dtype

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the weight, if any."""
        if self.scale is None:
            return None
        if self.weight.dtype != torch.uint8:
            return "int8" if self.weight.dtype == torch.int8 else "fp8"
        kinds: dict[torch.dtype, Quantization] = {torch.int16: "mxfp4", torch.int64: "nvfp4"}
        return kinds.get(self.scale.dtype, "int4")

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return self.weight.shape[-1] * (2 if self.weight.dtype == torch.uint8 else 1)

    def without_norm(self) -> Linear:
        """The projection of an x that is normalized already."""
        return replace(self, norm=None, folded=None)

    def with_lora(self, lora: LoRA | None, adapters: Tensor | None) -> Linear:
        """The projection with what the rows' adapters [N] add to it, where there is such."""
        if lora is None or adapters is None:
            return self
        return replace(self, lora=RowLoRA(lora, adapters))


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of neighbouring experts, of which a token chooses some before it chooses experts.

    per_token:  how many groups
    num_scores: the best experts of a group whose scores, with the router's bias, sum to its own
    """

    count: int
    per_token: int
    num_scores: int

    def inside(self, scores: Tensor) -> Tensor:
        """The scores [N, experts] of the best groups' experts; -inf of the others."""
        grouped = scores.unflatten(-1, (self.count, -1))
        best = grouped.topk(self.num_scores, -1).values.sum(-1).topk(self.per_token, -1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
        result: Tensor = grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)
        return result


@dataclass(frozen=True)
class Router:
    """The choice among the experts of a layer by tokens.

    linear:         [experts, hidden]; what it makes of a token are its logits
    per_token:      how many experts a token goes through
    score_function: "softmax" of a token's logits, "sigmoid" of each, or "sparsemixer"
                    (arXiv:2409.12136): one expert after the other, by a softmax of the logits that
                    are nearer than 2 * jitter to the largest one of those that are left
    normalized:     whether the scores of those chosen are divided by their sum
    scaling_factor: what they are multiplied by then, to be the weights of what the experts add
    bias:           float32 [experts], added to the scores to choose, but not to the weights
    groups:         where only the experts of some groups can be chosen
    """

    linear: Linear
    per_token: int
    score_function: str = "softmax"
    normalized: bool = True
    scaling_factor: float = 1.0
    bias: Tensor | None = None
    jitter: float = 0.0
    groups: ExpertGroups | None = None


@dataclass(frozen=True)
class ExpertMLPs:
    """One rank's parts of a layer's experts: weights [experts, out, in], biases [experts, out], and
    scales [experts, out] of weights in bytes. Norms are not looked at.
    """

    up: Linear
    gate: Linear | None
    down: Linear
    activation: str

    @property
    def count(self) -> int:
        return self.up.weight.shape[0]


@dataclass(frozen=True)
class Hidden:
    """Hidden states between the layers of a decode step.

    exact:   float32 [N, hidden], the residual stream
    operand: [N, hidden] in the compute type, what the next projection reads: `exact` normalized
             for it, or prescaled where the projection has its norm folded in
    row_stats: float32 [4 + 2 * parts], what one row's operand is prescaled by and what its norm
             needs of its parts; see norm.py
    """

    exact: Tensor
    operand: Tensor
    row_stats: Tensor | None = None


@dataclass(frozen=True)
class BlockTable:
    """Locations of the rows' tokens in the cache, block by block.

    The tokens of a row have consecutive addresses, which columns, chunks and spans count by; block
    b of the addresses is block entries[b] of the cache.

    entries: int32 [blocks of all addresses, and TABLE_PADDING more], valid blocks everywhere;
    tokens:  of a block, a power of two
    """

    entries: Tensor
    tokens: int

    def locate(self, addresses: Tensor) -> Tensor:
        """Return the cache tokens at addresses of any shape, int64."""
        blocks = self.entries[addresses // self.tokens]
        return blocks.long() * self.tokens + addresses % self.tokens


TABLE_PADDING = 1024  # kernels look up whole tiles, also behind the last row's last token


def locate(table: BlockTable | None, addresses: Tensor) -> Tensor:
    """Return the cache tokens at addresses; the same without a table."""
    return addresses if table is None else table.locate(addresses)


@dataclass(frozen=True)
class RowColumns:
    """The state of the rows in flight, int64 [slots + 1], the last slot one for padding.

    token: the last id chosen;  start: first address;  length: tokens in the cache;
    source_start, source_length: the same of the encoder's input
    """

    token: Tensor
    start: Tensor
    length: Tensor
    source_start: Tensor
    source_length: Tensor
    table: BlockTable | None = None

    @property
    def padding(self) -> int:
        return self.token.shape[0] - 1


@dataclass(frozen=True)
class EmbeddingTables:
    """tokens: [held, hidden], ids from first_id on; positions: [max_positions, hidden] or None."""

    tokens: Tensor
    first_id: int
    positions: Tensor | None


@dataclass(frozen=True)
class StepRows:
    """The rows of a decode step, int64 [B].

    starts:    first addresses
    positions: of the new token; lengths: with it
    source_starts, source_lengths: of the encoder's inputs; None without an encoder
    seen: first addresses and lengths of what attention covers; None: of all tokens
    in_sequence: some may be tokens of one sequence, and attend to one another
    located: cache tokens of the new ones; None: these are their addresses
    """

    starts: Tensor
    positions: Tensor
    lengths: Tensor
    source_starts: Tensor | None = None
    source_lengths: Tensor | None = None
    seen: tuple[Tensor, Tensor] | None = None
    in_sequence: bool = False
    located: Tensor | None = None

    @property
    def cache_tokens(self) -> Tensor:
        """Of the new tokens."""
        return self.starts + self.positions if self.located is None else self.located

    def within(self, window: int) -> StepRows:
        """The rows where attention covers the last `window` tokens, the new one included."""
        outside = (self.lengths - window).clamp(min=0)
        return replace(self, seen=(self.starts + outside, self.lengths - outside))

    @property
    def attended(self) -> tuple[Tensor, Tensor]:
        """First addresses and lengths of what attention covers."""
        return self.seen or (self.starts, self.lengths)

    @property
    def source(self) -> tuple[Tensor, Tensor]:
        """First addresses and lengths of the encoder's inputs."""
        if self.source_starts is None or self.source_lengths is None:
            raise ValueError("the step is of a model without an encoder")
        return self.source_starts, self.source_lengths

    def rotary(self, rotary: RotaryTable | None) -> RotaryTable | None:
        """The table of the new tokens, [B, rotary_size / 2], of that of all positions."""
        if rotary is None:
            return None
        cosines, sines = rotary
        return cosines[self.positions], sines[self.positions]


@dataclass(frozen=True)
class Heads:
    """One rank's attention heads: `num_heads` queries share `num_kv_heads` keys and values."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: [kv_heads, tokens, head_size], in the compute type or in e4m3.

    arrivals: int32, zeros, at least one per row and query head of a step, where kernels count who
    has ended; all layers may share them.  aligned: rows begin with a block
    table: None where addresses are cache tokens
    """

    keys: Tensor
    values: Tensor
    arrivals: Tensor | None = None
    table: BlockTable | None = None
    aligned: bool = True

    def of_row(self, first: int, end: int) -> Tensor | slice:
        """Return an index of the cache tokens at the addresses from first to end."""
        if self.table is None:
            return slice(first, end)
        return self.table.locate(torch.arange(first, end, device=self.keys.device))

    @property
    def entries(self) -> Tensor:
        """Return the table's entries for kernels, which read none where block_tokens is 0."""
        return self.keys if self.table is None else self.table.entries

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens of a block; 0 without a table."""
        return 0 if self.table is None else self.table.tokens


@dataclass(frozen=True)
class RelativeBias:
    """Bias of a score by the distance of its key from its query (Raffel et al. 2020).

    table: float32 [heads, 2 * reach + 1], for key - query from -reach to reach; keys farther away
           gain what those at the ends do
    """

    table: Tensor

    @property
    def reach(self) -> int:
        return self.table.shape[1] // 2


@dataclass(frozen=True)
class AttentionScores:
    """Operations on q.k before the softmax, in this order.

    scale:    what it is multiplied by
    softcap:  c makes c * tanh(s / c) of a score s
    slopes:   float32 [heads], ALiBi (Press et al. 2022): slope * (k - q) is added
    relative: what is added by distance
    sinks:    float32 [heads], a score of each head's softmax that belongs to no token (Xiao et al.
              2024; OpenAI's gpt-oss)
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    relative: RelativeBias | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class VarlenBatch:
    """Assignment of a prefill step's tokens to rows: the rows one after the other.

    spans: first address, tokens there before, and new tokens of every row
    tiles: `pieces` for kernels, int64 [tiles, 4] on the device. A negative number of tokens is of
           those that only fill the step up; empty pieces do nothing. None where no kernel asks.
    """

    spans: tuple[tuple[int, int, int], ...]
    tiles: Tensor | None = None

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Runs of at most QUERIES_PER_TILE new tokens of one row: the first one's place in the
        step, how many, the row's first address, the first one's position in the row.
        """
        tiles = []
        position = 0
        for start, past, count in self.spans:
            for first in range(0, count, QUERIES_PER_TILE):
                size = min(QUERIES_PER_TILE, count - first)
                tiles.append((position + first, size, start, past + first))
            position += count
        return tiles


@dataclass(frozen=True)
class Spans:
    """Rows of several tokens that lie one after the other, as attention of each to itself goes
    through them.

    blocks: int64 [blocks, 3]; each is up to SPAN_QUERIES queries of one row: the row's first token,
            its tokens, and how many of them are before the block. Those without tokens fill up.
    """

    blocks: Tensor


SPAN_QUERIES = 64


@dataclass(frozen=True)
class PeerBuffers:
    """Where tensor-parallel ranks write their parts of a sum; see cuda/peer_buffers.py.

    own:       int64 [2, ranks, lane_words], this rank's, zeros at first
    addresses: int64 [ranks], where every rank's buffer is
    exchanges: int32 [parts of a row], zeros at first: how often each part was exchanged
    """

    local: Tensor
    addresses: Tensor
    exchanges: Tensor
    rank: int

    @property
    def ranks(self) -> int:
        return self.local.shape[1]

    @property
    def lane_words(self) -> int:
        return self.local.shape[2]


class Ranks(Protocol):
    """The tensor-parallel ranks as an operation sees them; peer_buffers: where they have them."""

    @property
    def tp_size(self) -> int: ...

    @property
    def peer_buffers(self) -> PeerBuffers | None: ...

    def tp_sum(self, tensor: Tensor) -> Tensor: ...

    def tp_stack(self, tensor: Tensor) -> Tensor: ...
