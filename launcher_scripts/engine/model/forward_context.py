"""What the tokens of a pass attend to, by kind of pass; the sublayers of layers.py ask it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import Bounds
from launcher_scripts.engine.model.adapters import scaled
from launcher_scripts.engine.model.layers import (
    Chunk,
    CrossAttention,
    ForwardContext,
    SelfAttention,
    SourceRows,
)
from launcher_scripts.kernels.operands import Hidden, Spans, StepRows, VarlenBatch


@dataclass(frozen=True, kw_only=True)
class StepContext(ForwardContext[Hidden]):
    """A fused step: one token of every row.

    rows: by the window of the layer, 0 where it attends to all tokens
    """

    rows: Mapping[int, StepRows]
    bounds: Bounds

    def attend(self, x: Hidden, layer: SelfAttention) -> Tensor:
        return layer.kernels.attend_own(
            x,
            layer.input_projection(self.lora_adapters),
            layer.heads,
            self.rotary[layer.local],
            self.rows[layer.window],
            layer.cache,
            min(self.bounds.own, layer.window or self.bounds.own),
            layer.scores,
            layer.head_norms,
        )

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
        if not self.windowed:
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
            )
            for part, chunk in zip(parts, self.chunks, strict=True)
        ]
        return torch.cat(outputs)

    def attend_source(self, x: Tensor | Hidden, layer: CrossAttention) -> Tensor:
        parts = layer.query(x).split([chunk.count for chunk in self.chunks])
        outputs = []
        for part, chunk in zip(parts, self.chunks, strict=True):
            tokens = slice(chunk.start - chunk.source, chunk.start)
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
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    positions: Tensor
    source: SourceRows | None

    def attend_stored(self, query: Tensor, layer: SelfAttention) -> Tensor:
        return layer.kernels.decode_attention(
            query,
            layer.cache,
            *self._within(layer.window),
            layer.scores,
            positions=self.positions,
        )

    def attend_source(self, x: Tensor | Hidden, layer: CrossAttention) -> Tensor:
        if self.source is None:
            raise ValueError("the step says nothing of the encoder's inputs")
        return layer.kernels.decode_attention(
            layer.query(x),
            layer.cache,
            self.source.starts,
            self.source.lengths,
            self.source.longest,
            layer.scores,
            positions=self.positions,
        )

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
        kernels, heads, rotary = layer.kernels, layer.heads, self.rotary[layer.local]
        qkv = scaled(layer.project(x), layer.ia3, self.ia3_tasks)  # [N, q + k + v]
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
