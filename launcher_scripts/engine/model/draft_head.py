"""A draft head at work: hidden states of the model in, logits of the tokens after the next out.

The head's token at a place of the cache is the row's token there, with the hidden state that the
model has at the token before. So what the head keeps of a prefix depends on the prefix alone, and a
row's first token is none of the head's. Of tokens that it proposes the model has no hidden states
yet: there the head reads the output of its last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Prompt
from launcher_scripts.engine.model.decode_step import DecodeStep
from launcher_scripts.engine.model.forward_context import CacheContext, DecodeContext, Rows
from launcher_scripts.engine.model.kv_cache import KVCache
from launcher_scripts.engine.model.layers import SelfAttention, Sublayer
from launcher_scripts.engine.model.network import Network, PromptBatch
from launcher_scripts.engine.model.rotary import table_of
from launcher_scripts.engine.model.weights import (
    DraftHeadWeights,
    HeadAttentionWeights,
    ModelWeights,
    SublayerWeights,
)
from launcher_scripts.kernels.operands import Hidden, Linear
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.draft_heads import hidden_state_layers


def with_tables(head: ModelWeights, model: ModelWeights) -> ModelWeights:
    """Return a head's weights with the model's embedding and, unless it has its own, output
    projection."""
    if head.draft is None or head.head is None or model.head is None:
        raise ValueError("a draft head and its model are on one stage")
    decoder, projection = replace(head.decoder, embedding=model.decoder.embedding), head.head
    if head.draft.ids is None:
        projection = replace(model.head, norm=projection.norm)
    return replace(head, decoder=decoder, head=projection)


class Features:
    """Hidden states of a model's tokens that a draft head reads, by their cache tokens.

    tokens: [all of the cache, hidden], an EAGLE-3's after the head's projection
    """

    def __init__(self, weights: DraftHeadWeights, network: Network) -> None:
        """network: the model's, of whose passes the hidden states are stored from now on"""
        model_head, decoder = network.weights.head, network.stack
        if model_head is None:
            raise ValueError("a draft head reads the hidden states after the last layer")
        self._weights, self._norm, self._kernels = weights, model_head.norm, network.kernels
        self._inputs: list[int] = []  # may repeat one
        if weights.ids is not None:
            sizes = [len(layer.sublayers) for layer in decoder.layers]
            self._inputs = [sum(sizes[:layer]) for layer in hidden_state_layers(len(sizes))]
        self._collected: dict[int, Tensor] = {}
        self._dtype = weights.input.weight.dtype
        width = weights.input.weight.shape[0]
        rows = len(network.cache.ids)
        self.tokens = torch.zeros(rows, width, dtype=self._dtype, device=network.device)
        decoder.features = self

    def collect(self, index: int, x: Tensor) -> None:
        """See HiddenStates; a fused step may add to x in place."""
        if index in self._inputs:
            self._collected[index] = x.to(self._dtype, copy=True)

    def store(self, slots: Tensor, x: Tensor) -> None:
        """See HiddenStates."""
        if self._collected:
            joined = torch.cat([self._collected[index] for index in self._inputs], 1)
            values = self._kernels.project(joined, self._weights.input)
            self._collected.clear()
        elif self._norm is None:
            values = x.to(self._dtype)
        else:
            values = self._kernels.norm(x, self._norm, self._dtype)
        self.tokens.index_copy_(0, slots, values.to(self._dtype))


class HeadAttention(SelfAttention):
    """Attention of an EAGLE-3.  embedded: of the new tokens, [N, hidden]"""

    embedded: Tensor

    def __init__(
        self,
        weights: HeadAttentionWeights,
        kernels: Ops,
        communicator: Communicator,
        options: Any,
        **more: int,
    ) -> None:
        super().__init__(weights, kernels, communicator, options, **more)
        self._hidden_norm = weights.hidden_norm

    def project(self, x: Tensor | Hidden, adapters: Tensor | None = None) -> Tensor:
        """See Sublayer."""
        if isinstance(x, Hidden):
            raise TypeError("a draft head takes the general path")
        linear: Linear = self.input_projection(adapters)
        hidden = self.kernels.norm(x, self._hidden_norm, linear.dtype)
        embedded = self.embedded.to(linear.dtype)
        if linear.norm is not None:
            embedded = self.kernels.norm(self.embedded, linear.norm, linear.dtype)
        return self.kernels.project(torch.cat([embedded, hidden], 1), replace(linear, norm=None))


class DraftHead(Network):
    """The network of a draft head."""

    def __init__(
        self,
        weights: ModelWeights,
        cache: KVCache,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
        slots: int,
    ) -> None:
        """weights: see with_tables;  slots: of rows"""
        # Rows begin with their second tokens.
        cache.layers = {
            number: replace(layer, aligned=False) for number, layer in cache.layers.items()
        }
        super().__init__(weights, cache, kernels, communicator, device)
        if weights.draft is None:
            raise ValueError("the weights are not of a draft head")
        self._draft = weights.draft
        self._previous: Tensor
        self._outputs = torch.zeros(slots + 1, self.config.hidden_size, device=device)
        self.features: Features | None = None  # set when the model's network is there

    def prefill(self, prompts: PromptBatch, decoding: tuple[Tensor, Rows] | None = None) -> Tensor:
        """See Network."""
        before = (prompts.addresses - 1).clamp(min=0)
        self._previous = self.cache.table.locate(before)  # cache tokens before the new ones
        hidden = super().prefill(prompts, decoding)
        self._outputs.index_copy_(0, prompts.finished, hidden[prompts.last].float())
        return hidden

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """See Network; tokens that the head has proposed."""
        hidden = super().decode(ids, rows)
        if rows.slots is not None:
            self._outputs.index_copy_(0, rows.slots, hidden.float())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Network; ids that the head does not have are never chosen."""
        ids = self._draft.ids
        if ids is None or self.weights.head is None:
            return super().logits(hidden)
        local = self.kernels.logits(hidden, self.weights.head)
        logits = self.communicator.tp_concat(local)[:, : len(ids)]
        result = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return result.index_copy_(1, ids, logits)

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: CacheContext,
        rows: Sequence[tuple[Prompt | None, int]] = (),
    ) -> Tensor:
        if self.features is None:
            raise RuntimeError("the model's hidden states are missing")
        if isinstance(context, DecodeContext):
            features = self._outputs[context.rows]
        else:
            features = self.features.tokens[self._previous]
        self.cache.ids[context.slots] = ids
        x = self._entered(self.stack.embed(ids, positions, rows), features)
        for sublayer in self.stack.sublayers:
            x = sublayer.forward(x, context)
        return x

    def _entered(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return the input of the layer, float32 [N, hidden]."""
        draft, kernels = self._draft, self.kernels
        if draft.embedding_norm is None:
            (attention,) = self.stack.layers[0].of_kind(HeadAttention)
            attention.embedded = embedded
            return features.float()
        dtype = draft.input.dtype
        joined = [
            kernels.norm(embedded, draft.embedding_norm, dtype),
            kernels.norm(features.float(), draft.hidden_norm, dtype),
        ]
        return kernels.project(torch.cat(joined, 1), draft.input).float()

    def _branch(self, layer: int, weights: SublayerWeights) -> Sublayer:
        if isinstance(weights, HeadAttentionWeights):
            options, window = self._attention_options(layer), self.config.window(layer)
            table = table_of(self.config, layer)
            shared = (self.kernels, self.communicator, options)
            return HeadAttention(weights, *shared, window=window, table=table)
        return super()._branch(layer, weights)

    def _decode_step(self) -> DecodeStep | None:
        return None
