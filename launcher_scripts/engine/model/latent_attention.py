"""Latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one
latent vector of a token, and that is what the cache holds, with the part of the key that turns.

Prompts expand the latent vectors of their rows to every head's keys and values. Steps of one token
a row do not: scores and sums are made of the latent vectors themselves, by queries that went
through the keys' half of kv_up (absorbed), and sums go through the values' half. Every rank keeps
the latent vectors of all rows; ranks share the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import NO_TASK
from launcher_scripts.engine.model.layers import (
    AttentionOptions,
    Chunk,
    ForwardContext,
    SelfAttention,
)
from launcher_scripts.engine.model.weights import AttentionWeights
from launcher_scripts.kernels.operands import Hidden, LayerCache, Linear, LoRA, Norm, VarlenBatch
from launcher_scripts.kernels.ops import Ops


@dataclass(frozen=True, kw_only=True)
class LatentAttentionWeights(AttentionWeights):
    """in_proj makes the queries, or their latent vectors, then the latent
    vectors of keys and values, and the part of the keys that turns.

    query_up: behind the norm of the queries' latent vectors;  latent_norm: of the others
    kv_up:    [heads * (key + value), latent], each head's key, without the part that
              turns, and value
    lora_query_up, lora_kv_up: what adapters add to them
    """

    latent_norm: Norm
    kv_up: Linear
    query_up: Linear | None = None
    lora_query_up: LoRA | None = None
    lora_kv_up: LoRA | None = None


class LatentAttention(SelfAttention):
    """See SelfAttention. The part of queries and keys that turns is their last."""

    def __init__(
        self,
        weights: LatentAttentionWeights,
        kernels: Ops,
        communicator: Communicator,
        options: AttentionOptions,
        *,
        window: int = 0,
        table: int = 0,
    ) -> None:
        super().__init__(weights, kernels, communicator, options, window=window, table=table)
        self.latent_norm = weights.latent_norm
        self.query_up = weights.query_up
        self.kv_up = weights.kv_up
        self.lora_query_up = weights.lora_query_up
        self.lora_kv_up = weights.lora_kv_up
        heads, self.rank = self.heads, len(self.latent_norm.weight)
        self.rope_size = self.cache.keys.shape[-1] - self.rank
        key_size = heads.head_size - self.rope_size  # that kv_up makes
        self.up_sizes = key_size, self.kv_up.weight.shape[0] // heads.num_heads - key_size

    def store(
        self, x: Tensor | Hidden, slots: Tensor, context: ForwardContext[Tensor | Hidden]
    ) -> Tensor:
        """Queries [N, heads, head_size]; latent vectors go to the cache tokens slots [N]."""
        kernels, adapters = self.kernels, context.lora_adapters
        created = self.project(x, adapters)  # [N, query or its latent vector + rank + rope_size]
        local = created.shape[1] - self.rank - self.rope_size
        query: Tensor
        query, latent = created.split((local, self.rank + self.rope_size), 1)
        if self.query_up is not None:
            up = self.query_up.with_lora(self.lora_query_up, adapters)
            query = kernels.project(query.contiguous(), up)
        query = query.unflatten(1, (self.heads.num_heads, self.heads.head_size))
        rotary = context.rotary[self.table]
        return kernels.store_latents(query, latent, self.latent_norm, rotary, slots, self.cache)

    def attend_prompts(
        self, query: Tensor, chunks: Sequence[Chunk], spans: VarlenBatch, adapters: Tensor | None
    ) -> Tensor:
        """Attention of rows' new tokens [N, heads, head_size]: [N, heads * value size].

        chunks, spans: the rows; there may be no chunks;  adapters: the tokens' LoRA adapters [N]
        """
        out = query.new_zeros(len(query), self.heads.num_heads * self.up_sizes[1])
        windows = [chunk.window for chunk in chunks] or [0] * len(spans.spans)
        first = 0
        for (start, past, count), window in zip(spans.spans, windows, strict=True):
            new = slice(first, first + count)
            covered = min(filter(None, (window, self.window)), default=0)
            local = None if adapters is None else adapters[new]
            out[new] = self.attend_prompt(query[new], start, past, covered, local)
            first += count
        return out

    def attend_prompt(
        self, query: Tensor, start: int, past: int, window: int, adapters: Tensor | None
    ) -> Tensor:
        """The same of one row from its first address on, expanded with the tokens before."""
        tokens = past + len(query)
        latent, turning = (
            self.cache.keys[0, self.cache.of_row(start, start + tokens)]
            .to(query.dtype)
            .split((self.rank, self.rope_size), 1)
        )
        of_row = None if adapters is None else adapters[:1].expand(tokens).contiguous()
        up = self.kv_up.with_lora(self.lora_kv_up, of_row)
        created = self.kernels.project(latent.contiguous(), up)
        heads, (key, value) = self.heads, self.up_sizes
        keys, values = created.unflatten(1, (heads.num_heads, -1)).split(self.up_sizes, 2)
        # Kernels want values as wide as keys.
        width = max(heads.head_size, value)
        expanded = query.new_zeros(2, heads.num_heads, tokens, width)
        expanded[0, :, :, :key] = keys.transpose(0, 1)
        expanded[0, :, :, key : heads.head_size] = turning
        expanded[1, :, :, :value] = values.transpose(0, 1)
        query = functional.pad(query, (0, width - heads.head_size)).contiguous()
        alone = VarlenBatch(((0, past, len(query)),))
        alone = replace(alone, tiles=torch.tensor(alone.pieces(), device=query.device))
        wide = self.kernels.prompt_attention(
            query, LayerCache(*expanded), alone, self.scores, window=window
        )
        out: Tensor = wide.unflatten(1, (heads.num_heads, width))[:, :, :value].flatten(1)
        return out

    def attend_rows(
        self,
        query: Tensor,
        rows: tuple[Tensor, Tensor, int],
        positions: Tensor,
        adapters: Tensor | None,
    ) -> Tensor:
        """Attention of one new token per row, absorbed: [B, heads * value size].

        rows: starts, lengths and what bounds them;  adapters: the rows' LoRA adapters [B]
        """
        return self.kernels.attend_latents(
            query,
            self.kv_up.weight,
            self.cache,
            rows,
            self.scores,
            positions=positions,
            lora=self._lora_of(adapters),
        )

    def _lora_of(self, adapters: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the adapters of rows [B] add to kv_up: [B, rank of LoRA, rank] first, then [B, rank
        of LoRA, heads, key] and the same of values; zeros for a row without one.
        """
        lora = self.lora_kv_up
        if lora is None or adapters is None:
            return None
        numbers = adapters.clamp(min=0)
        down = lora.down[numbers] * (adapters != NO_TASK)[:, None, None]
        up = lora.up[numbers].unflatten(2, (self.heads.num_heads, -1))
        return down, *up.split(self.up_sizes, 3)
