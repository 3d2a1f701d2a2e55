"""The fast way through a decode step: every row's last token in, hidden states or tokens out.

A decoder is a list of sublayers with a norm before each, and each hands the next its hidden states
in the form that one's first projection reads. The operations are fusions of those the layers use;
what they cannot express goes through `Network.decode` (see `obstacles`). The prompts of a GPT take
the same sublayers, all new tokens at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from launcher_scripts.engine.core.plan import Bounds
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.weights import MLPWeights
from launcher_scripts.kernels.operands import (
    EmbeddingTables,
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    RelativeBias,
    RowColumns,
    StepRows,
    VarlenBatch,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference import EXACT_IDS
from launcher_scripts.models.gpt import GPTConfig

# Cosines and sines, float32 [positions, rotary_size / 2] each, or None: of the layers that turn as
# the model does, and of those that turn locally.
Turns = tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class StepContext:
    """What the sublayers of one step share; turns as in kernels.project_heads.

    rows: by the window of the layer, 0 where it attends to all tokens
    """

    rows: Mapping[int, StepRows]
    bounds: Bounds
    turns: Turns

    def attend(self, x: Hidden, layer: SelfAttention) -> Tensor:
        """Attention of every row's new token: [B, heads * head_size]."""
        return layer.kernels.attend_own(
            x,
            layer.first,
            layer.heads,
            self.turns[layer.local],
            self.rows[layer.window],
            layer.cache,
            min(self.bounds.own, layer.window or self.bounds.own),
            layer.slopes,
            scale=layer.scale,
            relative=layer.bias,
            softcap=layer.softcap,
            norms=layer.norms,
        )


@dataclass(frozen=True)
class PromptContext:
    """What the sublayers of one pass over prompts share.

    slots: [N], the cache tokens of the new tokens
    turns: cosines and sines of their positions
    """

    slots: Tensor
    spans: VarlenBatch
    turns: Turns

    def attend(self, x: Hidden, layer: SelfAttention) -> Tensor:
        """Attention of all new tokens: [N, heads * head_size]."""
        kernels = layer.kernels
        qkv = kernels.project_hidden(x, layer.first)
        qkv = kernels.norm_heads(qkv, layer.heads, layer.norms, kernels.norm)
        turns = self.turns[layer.local]
        query = kernels.store_kv(qkv, layer.heads, turns, self.slots, layer.cache)
        return kernels.prompt_attention(
            query,
            layer.cache,
            self.spans,
            layer.slopes,
            scale=layer.scale,
            relative=layer.bias,
            window=layer.window,
            softcap=layer.softcap,
        )


Context = StepContext | PromptContext


# What a sublayer asks of the pass.
Asked = TypeVar("Asked", contravariant=True)


class Block(Protocol[Asked]):
    """One or two residual branches; `first` is the projection that reads the hidden states."""

    first: Linear
    window: int

    def forward(self, x: Hidden, context: Asked, norm_of_next: Norm | None) -> Hidden:
        """Hidden states x plus what the branches add, in the form that norm_of_next asks for."""
        ...


class Sublayer(ABC, Generic[Asked]):
    """One residual branch.

    output_norm: of what the branch adds, where there is one
    window: how many tokens attention covers, the token's own included; 0: all
    """

    window = 0

    def __init__(
        self,
        first: Linear,
        last: Linear,
        kernels: Ops,
        communicator: Communicator,
        output_norm: Norm | None = None,
    ) -> None:
        self.output_norm = output_norm
        self.first = kernels.prepare(first)
        self.last = last
        self.kernels = kernels
        self.communicator = communicator

    def forward(self, x: Hidden, context: Asked, norm_of_next: Norm | None) -> Hidden:
        return self.add(self.branch(x, context), x, norm_of_next)

    def add(self, inner: Tensor, x: Hidden, norm_of_next: Norm | None) -> Hidden:
        """Hidden states x plus last(inner)."""
        kernels = self.kernels
        if self.output_norm is not None:
            out = self.communicator.tp_sum(kernels.partial_product(inner, self.last))
            out = out if self.last.bias is None else out + self.last.bias
            exact = x.exact + kernels.norm(out, self.output_norm, torch.float32)
            return kernels.hidden(exact, norm_of_next, x.operand.dtype)
        if self.communicator.tp_size == 1:
            return kernels.accumulate(inner, self.last, x, norm_of_next)
        return kernels.accumulate_over_ranks(inner, self.last, x, norm_of_next, self.communicator)

    @abstractmethod
    def branch(self, x: Hidden, context: Asked) -> Tensor:
        """[B, inputs of `last`]"""


class SelfAttention(Sublayer[Context]):
    """Attention of a row's new tokens to its own, the new ones included.

    norms:  of every head's queries and keys, before they turn
    local:  whether they turn locally, see Turns
    """

    def __init__(
        self,
        first: Linear,
        last: Linear,
        kernels: Ops,
        communicator: Communicator,
        *,
        cache: LayerCache,
        heads: Heads,
        slopes: Tensor | None = None,
        bias: RelativeBias | None = None,
        scale: float | None = None,
        window: int = 0,
        softcap: float | None = None,
        norms: HeadNorms | None = None,
        local: bool = False,
        output_norm: Norm | None = None,
    ) -> None:
        super().__init__(first, last, kernels, communicator, output_norm)
        self.window = window
        self.softcap = softcap
        self.norms = norms
        self.local = local
        self.cache = cache
        self.heads = heads
        self.slopes = slopes
        self.bias = bias
        self.scale = scale

    def branch(self, x: Hidden, context: Context) -> Tensor:
        return context.attend(x, self)


class SourceAttention(Sublayer[StepContext]):
    """Attention of a row's new token to the encoder's input."""

    def __init__(
        self,
        first: Linear,
        last: Linear,
        kernels: Ops,
        communicator: Communicator,
        *,
        cache: LayerCache,
        heads: Heads,
        bias: RelativeBias | None,
        scale: float,
    ) -> None:
        super().__init__(first, last, kernels, communicator)
        self.cache = cache
        self.heads = heads
        self.bias = bias
        self.scale = scale

    def branch(self, x: Hidden, context: StepContext) -> Tensor:
        return self.kernels.attend_source(
            x,
            self.first,
            self.heads,
            context.rows[0],
            self.cache,
            context.bounds.source,
            scale=self.scale,
            relative=self.bias,
        )


class MLP(Sublayer[object]):
    """Up and down, perhaps gated."""

    def __init__(
        self, weights: MLPWeights, kernels: Ops, communicator: Communicator, *, activation: str
    ) -> None:
        super().__init__(weights.up, weights.down, kernels, communicator, weights.output_norm)
        self.gate = None if weights.gate is None else kernels.prepare(weights.gate)
        self.activation = activation

    def branch(self, x: Hidden, _: object) -> Tensor:
        return self.kernels.expand(x, self.first, self.gate, self.activation)


class ParallelSublayers:
    """Attention and MLP that read the same hidden states, each behind its norm."""

    def __init__(self, attention: SelfAttention, mlp: MLP) -> None:
        self.first = attention.first
        self.window = attention.window
        self.attention = attention
        self.mlp = mlp

    def forward(self, x: Hidden, context: Context, norm_of_next: Norm | None) -> Hidden:
        mlp = self.mlp
        own = mlp.kernels.hidden(x.exact, mlp.first.norm, x.operand.dtype)
        inner = mlp.branch(own, context)
        return mlp.add(inner, self.attention.forward(x, context, None), norm_of_next)


class DecodeStep:
    """The decoder of a rank that has all layers, one token of every row at a time.

    turns: cosines and sines of all positions
    """

    def __init__(
        self,
        sublayers: Sequence[Block[StepContext]],
        head: Linear,
        tables: EmbeddingTables,
        embedding_norm: Norm | None,
        turns: Turns,
        vocab_size: int,
        history: Tensor,
        kernels: Ops,
        communicator: Communicator,
        *,
        embedding_scale: float | None = None,
        logits_softcap: float | None = None,
    ) -> None:
        self.sublayers = sublayers
        self.head = kernels.prepare(head)
        self.tables = tables
        self.embedding_norm = embedding_norm
        self.turns = turns
        self.vocab_size = vocab_size
        self.history = history
        self.kernels = kernels
        self.communicator = communicator
        self.embedding_scale = embedding_scale
        self.logits_softcap = logits_softcap
        self._norms = [*(each.first.norm for each in sublayers), self.head.norm]
        self._windows = {each.window for each in sublayers} - {0}

    def forward(self, columns: RowColumns, slots: Tensor, bounds: Bounds) -> Hidden:
        """Hidden states [B, hidden] after the last layer; the rows in slots [B] grow by a token."""
        x, rows = self.kernels.begin_step(
            slots,
            columns,
            self.history,
            self._own_tables(),
            self._norms[0],
            sources=bounds.source > 0,
        )
        adjusted = self.embedding_norm is not None or self.embedding_scale is not None
        if self.communicator.tp_size > 1 or adjusted:
            exact = self.communicator.tp_sum(x.exact)
            if self.embedding_scale is not None:
                exact = exact * self.embedding_scale
            if self.embedding_norm is not None:
                exact = self.kernels.norm(exact, self.embedding_norm, torch.float32)
            x = self.kernels.hidden(exact, self._norms[0], x.operand.dtype)
        of_windows = {window: rows.within(window) for window in self._windows}
        context = StepContext({0: rows, **of_windows}, bounds, self.turns)
        return through(self.sublayers, x, context, self._norms)

    def logits(self, x: Hidden) -> Tensor:
        """Float32 [B, vocab] on every rank."""
        local = self.kernels.logits(x.exact, self.head)
        logits = self.communicator.tp_concat(local)[:, : self.vocab_size]
        return capped(logits, self.logits_softcap)

    def greedy(self, x: Hidden, columns: RowColumns, slots: Tensor) -> Tensor:
        """The ids that argmax would find in `logits`, int64 [B]; now the rows' last tokens."""
        if self.communicator.tp_size == 1:
            return self.kernels.choose(x, self.head, self.vocab_size, columns, slots)
        tokens = self._largest_of_ranks(x)
        columns.token.index_copy_(0, slots, tokens)
        return tokens

    def _largest_of_ranks(self, x: Hidden) -> Tensor:
        rows, part = x.exact.shape[0], self.head.weight.shape[0]
        if part * self.communicator.tp_size >= EXACT_IDS:
            return self.kernels.argmax(self.logits(x))
        first = self.communicator.tp_rank * part
        held = min(part, self.vocab_size - first)
        if held > 0:
            values, places = self.kernels.largest(x, self.head, held)
        else:
            values = x.exact.new_full((rows,), -torch.inf)
            places = torch.zeros(rows, dtype=torch.int64, device=values.device)
        return self.kernels.largest_of_ranks(values, places + first, self.communicator)

    def _own_tables(self) -> EmbeddingTables:
        """One rank adds the positions: the embeddings are summed over the ranks."""
        if self.communicator.tp_rank == 0:
            return self.tables
        return replace(self.tables, positions=None)


class PromptStep(DecodeStep):
    """A DecodeStep whose sublayers take prompts, too."""

    sublayers: Sequence[Block[Context]]

    def prompts(self, exact: Tensor, context: PromptContext) -> Tensor:
        """Hidden states float32 [N, hidden] after the last layer, of the new tokens' embeddings."""
        x = self.kernels.hidden(exact, self._norms[0], self.tables.tokens.dtype)
        return through(self.sublayers, x, context, self._norms).exact


def through(
    sublayers: Sequence[Block[Asked]], x: Hidden, context: Asked, norms: Sequence[Norm | None]
) -> Hidden:
    """Hidden states after the sublayers.  norms: before each of them, and after the last"""
    for sublayer, norm_of_next in zip(sublayers, norms[1:], strict=True):
        x = sublayer.forward(x, context, norm_of_next)
    return x


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), which keeps their order."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def obstacles(
    config: object,
    communicator: Communicator,
    adapters: Sequence[object],
) -> list[str]:
    """Why the model's decode steps cannot go through a DecodeStep; empty where they can.

    adapters: what works inside of the layers, None where there is nothing
    """
    found = []
    if communicator.parallelism.pp_size > 1:
        found.append("the layers are split into pipeline stages")
    placement = getattr(config, "norm_placement", "pre")
    if placement == "post" or (placement != "pre" and not isinstance(config, GPTConfig)):
        found.append("norms follow the branches or the sums")
    if isinstance(config, GPTConfig):
        if config.num_experts:
            found.append("layers choose among experts")
        if config.rotary_scaling in ("longrope", "dynamic"):
            found.append("rotary positions depend on a row's length")
    if any(part is not None for part in adapters):
        found.append("IA3 or adapters work inside the layers")
    if getattr(config, "head_size", 2) % 2:
        found.append("heads have an odd number of features")
    return found
