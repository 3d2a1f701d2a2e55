"""Attention context of a pass, by kind of pass; the sublayers of layers.py use it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Bounds, Prompt
from launcher_scripts.engine.model.latent_attention import LatentAttention
from launcher_scripts.engine.model.layers import (
    Chunk,
    CrossAttention,
    ForwardContext,
    Layer,
    MergedAttention,
    Recurrent,
    SelfAttention,
)
from launcher_scripts.engine.model.side_streams import SideStreams
from launcher_scripts.engine.model.weights import Embedding, StackWeights, scaled
from launcher_scripts.kernels.operands import Hidden, Spans, StepRows, VarlenBatch
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference_attention import attend_joined_spans, norm_heads


@dataclass(frozen=True)
class SourceRows:
    """The encoder's inputs of a decode step's rows: first addresses and lengths, both [B], and
    what bounds the lengths. Hypotheses of one beam search share theirs.
    """

    starts: Tensor
    lengths: Tensor
    longest: int


@dataclass(frozen=True)
class Rows:
    """The rows of a decode step: first addresses, and tokens in the cache so far, both [B].

    longest bounds the lengths, the new tokens included. ia3_tasks [B] are the rows of the IA3
    factors, lora_adapters [B] the LoRA adapters or NO_TASK. positions [B] are those of the new
    tokens where they are not the lengths; most [B] how many positions a row may come to have.
    slots [B] are the rows'. source: where there is an encoder
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    source: SourceRows | None = None
    ia3_tasks: Tensor | None = None
    positions: Tensor | None = None
    lora_adapters: Tensor | None = None
    maximum: Tensor | None = None
    slots: Tensor | None = None


def with_virtual_tokens(
    x: Tensor,
    ids: Tensor,
    rows: Sequence[tuple[Prompt | None, int]],
    tables: Sequence[Tensor],
) -> Tensor:
    """Token embeddings x float32 [N, hidden] with the virtual tokens of rows that have a prompt.

    rows: prompt and tokens of every row in ids [N];  tables: the loaded ones, [virtual tokens,
          hidden]
    """
    start = 0
    for prompt, count in rows:
        part = slice(start, start + count)
        start += count
        if prompt is None:
            continue
        table = tables[prompt] if isinstance(prompt, int) else prompt
        indices = (-1 - ids[part]).clamp(min=0)
        x[part] = torch.where(ids[part, None] < 0, table[indices].float(), x[part])
    return x


class HiddenStates(Protocol):
    """Receiver of the hidden states of a pass, for a draft head."""

    def collect(self, index: int, x: Tensor, /) -> None:
        """Note the input x float32 [N, hidden] of the sublayer of this index."""
        ...

    def store(self, slots: Tensor, x: Tensor, /) -> None:
        """Keep what is needed of the cache tokens slots [N]; x [N, hidden]: the last output."""
        ...


class Stack:
    """A stage of a decoder or an encoder, with the embedding on the first.

    Hidden states between stages are float32 [N, hidden].

    features: gets the hidden states of every pass; None: not needed
    """

    def __init__(
        self,
        weights: StackWeights,
        layers: Sequence[Layer],
        hidden_size: int,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
        side: SideStreams | None = None,
    ) -> None:
        self.embedding = weights.embedding
        self._side = side
        self.features: HiddenStates | None = None
        self.layers = layers
        self.sublayers = [sublayer for layer in layers for sublayer in layer.sublayers]
        self._prompt_tables = weights.prompt_tables
        self._hidden_size = hidden_size
        self._kernels = kernels
        self._communicator = communicator
        self._device = device

    def embed(
        self, ids: Tensor, positions: Tensor, rows: Sequence[tuple[Prompt | None, int]] = ()
    ) -> Tensor:
        """Return the input of the first layer for token ids [N] at positions [N]: float32 [N,
        hidden].

        rows: prompt and tokens of every row, where one may have virtual tokens
        """
        if self.embedding is not None:
            return self._embedded(self.embedding, ids, positions, rows)
        width = self._hidden_size if self._side is None else self._side.received_size
        received = torch.empty(ids.shape[0], width, dtype=torch.float32, device=self._device)
        return self._communicator.from_previous_stage(received)

    def _embedded(
        self,
        embedding: Embedding,
        ids: Tensor,
        positions: Tensor,
        rows: Sequence[tuple[Prompt | None, int]] = (),
    ) -> Tensor:
        kernels = self._kernels
        embedded = kernels.embed(ids, embedding.tokens, embedding.first_id)
        x = kernels.sum_over_ranks(embedded, self._communicator)
        x = x if embedding.scale is None else x * embedding.scale
        x = with_virtual_tokens(x, ids, rows, self._prompt_tables)
        if embedding.positions is not None:
            x = x + kernels.embed(positions, embedding.positions, 0)
        return x if embedding.norm is None else kernels.norm(x, embedding.norm, torch.float32)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: ForwardContext[Tensor],
        rows: Sequence[tuple[Prompt | None, int]] = (),
    ) -> Tensor:
        """Float32 [N, hidden] after the stage's last layer, also sent on; as in `embed`."""
        x, side = self.embed(ids, positions, rows), self._side
        if side is not None:
            if not isinstance(context, CacheContext):
                raise TypeError("side streams are of layers with a cache")
            own = x if side.embedding is None else self._embedded(side.embedding, ids, positions)
            x = side.enter(x, context.slots, embedded=self.embedding is not None)
            context = replace(context, tokens=(ids, own))
        features = self.features
        for index, sublayer in enumerate(self.sublayers):
            if features is not None:
                features.collect(index, x)
            x = sublayer.forward(x, context)
        if features is not None and isinstance(context, CacheContext):
            features.store(context.slots, x)
        if side is not None and isinstance(context, CacheContext):
            x = side.leave(x, context.slots, is_last=self._communicator.is_last_stage)
        if not self._communicator.is_last_stage:
            self._communicator.to_next_stage(x)
        return x


Recorded = TypeVar("Recorded")


class StepGraphs(Protocol):
    """A runner's requirements of its recorded steps."""

    def run(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], Recorded]) -> Recorded:
        """function(slots); `key` names everything else its kernels depend on.

        slots: on the device, or on the host if they change with every run
        """
        ...

    def record(self, key: Hashable, slots: Tensor, function: Callable[[Tensor], object]) -> None:
        """Have function's graph for `run` before it is needed; function runs with these slots."""
        ...

    def clear(self) -> None:
        """Forget every graph."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepContext(ForwardContext[Hidden]):
    """A fused step: one token of every row.

    rows: by the window of the layer, 0 where it attends to all tokens
    slots: [B], the rows'
    """

    rows: Mapping[int, StepRows]
    bounds: Bounds
    slots: Tensor | None = None

    def recur(self, projected: Tensor, branch: Recurrent) -> Tensor:
        if self.slots is None:
            raise ValueError("the step says nothing of the rows' slots")
        return branch.decode(projected, self.slots)

    def attend(self, x: Hidden, layer: SelfAttention) -> Tensor:
        if isinstance(layer, LatentAttention):
            return self._attend_latent(x, layer)
        if layer.query_scale is not None:
            return self._attend_scaled(x, layer)
        return layer.kernels.attend_own(
            x,
            layer.input_projection(self.lora_adapters),
            layer.heads,
            self.rotary[layer.table],
            self.rows[layer.window],
            layer.cache,
            self._longest(layer),
            layer.scores,
            layer.head_norms,
        )

    @cached_property
    def cache_tokens(self) -> Tensor:
        """Cache tokens [B] of the new tokens, the same in all layers."""
        return self.rows[0].cache_tokens

    @cached_property
    def _with_rotary_rows(self) -> ForwardContext[Any]:
        """The context with rotary tables of the new tokens alone, the same in all layers."""
        return replace(self, rotary=tuple(self.rows[0].rotary(table) for table in self.rotary))

    def _attend_latent(self, x: Hidden, layer: LatentAttention) -> Tensor:
        rows = self.rows[layer.window]
        query = layer.store(x, self.cache_tokens, self._with_rotary_rows)
        of_rows = (*rows.attended, self._longest(layer))
        return layer.attend_rows(query, of_rows, rows.positions, self.lora_adapters)

    def _attend_scaled(self, x: Hidden, layer: SelfAttention) -> Tensor:
        """The same where queries change between their projection and the attention."""
        rows = self.rows[layer.window]
        return layer.kernels.decode_attention(
            layer.store(x, self.cache_tokens, self._with_rotary_rows),
            layer.cache,
            *rows.attended,
            self._longest(layer),
            layer.scores,
            positions=rows.positions,
        )

    def _longest(self, layer: SelfAttention) -> int:
        return min(self.bounds.own, layer.window or self.bounds.own)

    def attend_source(self, x: Hidden, layer: CrossAttention) -> Tensor:
        return layer.kernels.attend_source(
            x,
            layer.in_proj,
            layer.heads,
            self.rows[0],
            layer.cache,
            self.bounds.source,
            layer.scores,
        )


@dataclass(frozen=True, kw_only=True)
class CacheContext(ForwardContext[Tensor | Hidden]):
    """A pass whose keys and values go to the cache before its queries attend.

    slots: [N], the cache tokens of the new tokens
    """

    slots: Tensor

    @property
    def cache_tokens(self) -> Tensor:
        """As a StepContext's."""
        return self.slots

    def attend(self, x: Tensor | Hidden, layer: SelfAttention) -> Tensor:
        return self.attend_stored(layer.store(x, self.slots, self), layer)

    @abstractmethod
    def attend_stored(self, query: Tensor, layer: SelfAttention) -> Tensor:
        """Attention of queries [N, heads, head_size] whose keys and values are in the cache."""


@dataclass(frozen=True, kw_only=True)
class PrefillContext(CacheContext):
    """The new tokens of prompts.

    chunks:   the rows, in order;  spans: which of the tokens are whose
    windowed: whether a chunk has a window
    """

    chunks: tuple[Chunk, ...]
    spans: VarlenBatch
    windowed: bool

    def attend_stored(self, query: Tensor, layer: SelfAttention) -> Tensor:
        if isinstance(layer, LatentAttention):
            return layer.attend_prompts(query, self.chunks, self.spans, self.lora_adapters)
        merged = isinstance(layer, MergedAttention)
        if not self.windowed and not merged:
            return layer.kernels.prompt_attention(
                query, layer.cache, self.spans, layer.scores, window=layer.window
            )
        parts = query.split([chunk.count for chunk in self.chunks])
        outputs = [
            layer.kernels.context_attention(
                part,
                layer.cache,
                chunk.start,
                chunk.past,
                layer.scores,
                window=min(filter(None, (chunk.window, layer.window)), default=0),
                source=chunk.source if merged else 0,
            )
            for part, chunk in zip(parts, self.chunks, strict=True)
        ]
        return torch.cat(outputs)

    def recur(self, projected: Tensor, branch: Recurrent) -> Tensor:
        return branch.prompts(projected, self.chunks)

    def attend_source(self, x: Tensor | Hidden, layer: CrossAttention) -> Tensor:
        parts = layer.query(x).split([chunk.count for chunk in self.chunks])
        outputs = []
        for part, chunk in zip(parts, self.chunks, strict=True):
            tokens = layer.cache.of_row(chunk.start - chunk.source, chunk.start)
            key, value = layer.cache.keys[None, :, tokens], layer.cache.values[None, :, tokens]
            out = layer.kernels.source_attention(
                part[None], key, value, layer.scores, first=chunk.past
            )
            outputs.append(out[0])
        return torch.cat(outputs)


@dataclass(frozen=True, kw_only=True)
class DecodeContext(CacheContext):
    """One token of every row, on the general path.

    starts, lengths, longest: the rows (see decode_attention);  source: those of the encoder
    positions: [B], of the new tokens; a relative bias counts from them
    rows: [B], the rows' slots
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    positions: Tensor
    source: SourceRows | None
    rows: Tensor | None = None

    def recur(self, projected: Tensor, branch: Recurrent) -> Tensor:
        if self.rows is None:
            raise ValueError("the step says nothing of the rows' slots")
        return branch.decode(projected, self.rows)

    def attend_stored(self, query: Tensor, layer: SelfAttention) -> Tensor:
        if isinstance(layer, LatentAttention):
            rows = self._within(layer.window)
            return layer.attend_rows(query, rows, self.positions, self.lora_adapters)
        if isinstance(layer, MergedAttention):
            source = self._source
            spans = (source.starts, source.lengths, source.longest), self._within(layer.window)
            return attend_joined_spans(query, layer.cache, spans, layer.scores)
        return layer.kernels.decode_attention(
            query,
            layer.cache,
            *self._within(layer.window),
            layer.scores,
            positions=self.positions,
        )

    def attend_source(self, x: Tensor | Hidden, layer: CrossAttention) -> Tensor:
        source = self._source
        return layer.kernels.decode_attention(
            layer.query(x),
            layer.cache,
            source.starts,
            source.lengths,
            source.longest,
            layer.scores,
            positions=self.positions,
        )

    @property
    def _source(self) -> SourceRows:
        if self.source is None:
            raise ValueError("the step says nothing of the encoder's inputs")
        return self.source

    def _within(self, window: int) -> tuple[Tensor, Tensor, int]:
        """Starts, lengths and longest of the last `window` tokens; 0: of all."""
        if not window or window >= self.longest:
            return self.starts, self.lengths, self.longest
        outside = (self.lengths - window).clamp(min=0)
        return self.starts + outside, self.lengths - outside, window


@dataclass(frozen=True, kw_only=True)
class MixedContext(CacheContext):
    """One token of every row that decodes, and then the new tokens of prompts: one pass over the
    weights.
    """

    decoding: DecodeContext
    prompts: PrefillContext

    def attend_stored(self, query: Tensor, layer: SelfAttention) -> Tensor:
        rows = self.decoding.slots.shape[0]
        decoded = self.decoding.attend_stored(query[:rows], layer)
        return torch.cat([decoded, self.prompts.attend_stored(query[rows:], layer)])

    def recur(self, projected: Tensor, branch: Recurrent) -> Tensor:
        rows = self.decoding.slots.shape[0]
        decoded = self.decoding.recur(projected[:rows], branch)
        return torch.cat([decoded, self.prompts.recur(projected[rows:], branch)])


@dataclass(frozen=True, kw_only=True)
class EncodeContext(ForwardContext[Tensor | Hidden]):
    """Whole inputs of an encoder, whose tokens attend to all others of their row.

    spans:      the rows
    attentions: takes, layer after layer, the attention of every row, float32 [heads, n, n]; then
                counts are the rows' tokens
    """

    spans: Spans
    counts: Sequence[int] = ()
    attentions: list[Tensor] | None = None

    def attend(self, x: Tensor | Hidden, layer: SelfAttention) -> Tensor:
        kernels, heads, rotary = layer.kernels, layer.heads, self.rotary[layer.table]
        qkv = scaled(layer.project(x), layer.ia3, self.ia3_tasks)  # [N, q + k + v]
        qkv = norm_heads(qkv, heads, layer.head_norms, kernels.norm)
        if rotary is not None:
            qkv = kernels.apply_rotary(qkv, heads, rotary)
        out = kernels.attend_spans(qkv, heads, self.spans, layer.scores, window=layer.window)
        if self.attentions is not None:
            sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            for row in qkv.split(self.counts):
                query, key, _ = row.view(1, len(row), -1, heads.head_size).split(sizes, dim=2)
                self.attentions.extend(
                    kernels.source_attention_weights(
                        query, key.transpose(1, 2), layer.scores, window=layer.window
                    )
                )
        return out
