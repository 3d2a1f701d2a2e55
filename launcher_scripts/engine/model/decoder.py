"""A GPT decoder on one rank: token ids in, logits out, keys and values left in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.core.kv_cache import KVCache
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.adapters import layer_adapters, with_virtual_tokens
from launcher_scripts.engine.model.decode_step import (
    MLP,
    Block,
    Context,
    ParallelSublayers,
    PromptContext,
    PromptStep,
    SelfAttention,
    capped,
    obstacles,
)
from launcher_scripts.engine.model.embedding import embed
from launcher_scripts.engine.model.encode_step import EncodeStep
from launcher_scripts.engine.model.experts import Experts
from launcher_scripts.engine.model.gpt_weights import GPTWeights
from launcher_scripts.engine.model.heads import local_heads
from launcher_scripts.engine.model.layers import (
    Chunk,
    DecodeContext,
    DecoderLayer,
    LayerContext,
    PrefillContext,
    Rows,
    alibi_slopes,
    new_token_tasks,
)
from launcher_scripts.engine.model.network import Encoded
from launcher_scripts.engine.model.rotary import Rotary, gpt_rotary, plain_frequencies
from launcher_scripts.engine.model.weights import Embedding
from launcher_scripts.engine.runner.prompt_batch import PromptBatch
from launcher_scripts.kernels.operands import WIDEST_PROMPT_HEAD, EmbeddingTables, Linear
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.gpt import GPTConfig


class Decoder:
    """The layers of one pipeline stage, with the embedding on the first and the head on the last.

    Hidden states between stages are float32 [N, hidden].
    """

    def __init__(
        self,
        weights: GPTWeights,
        cache: KVCache,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.config = weights.config
        self.weights = weights
        self.cache = cache
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self.heads = local_heads(self.config, communicator.tp_size)
        self._rotary, self._local_rotary = self._rotaries()
        self._layers = [
            DecoderLayer(
                self.config,
                layer,
                layer_weights,
                cache.layers[layer],
                self.heads,
                self._slopes(layer),
                kernels,
                communicator,
            )
            for layer, layer_weights in weights.layers.items()
        ]
        self.step_obstacles = obstacles(
            self.config,
            communicator,
            layer_adapters(weights.layers.values()),
        )
        self.step: PromptStep | None = None
        if weights.embedding is not None and weights.head is not None and not self.step_obstacles:
            self.step = self._decode_step(weights.embedding, weights.head)
        turns_alike = self._rotary is None or not self._rotary.of_row
        self.replays_prompts = (
            turns_alike
            and self.config.head_size <= WIDEST_PROMPT_HEAD
            and not self.config.num_experts
        )
        self.encode_step: EncodeStep | None = None
        self.encode_obstacles: list[str] = []

    def encode(self, *_: object, **__: object) -> Encoded:
        """See Network."""
        raise ValueError("a decoder alone encodes nothing")

    def prefill(self, prompts: PromptBatch) -> Tensor:
        """Run the new tokens of several rows: hidden states [N, hidden].

        Through the sublayers of a decode step where these can; between ranks the layers send half.
        """
        reach = self._reach_of(prompts.chunks)
        rotary = self._turns(self._rotary, prompts.positions, reach)
        windows = any(chunk.window for chunk in prompts.chunks)
        embedding = self.weights.embedding
        if (
            self.step is not None
            and embedding is not None
            and self.communicator.tp_size == 1
            and not windows
        ):
            self.cache.ids[prompts.slots] = prompts.ids
            exact = self._embed(embedding, prompts.ids, prompts.positions, prompts.chunks)
            turns = (rotary, self._turns(self._local_rotary, prompts.positions))
            return self.step.prompts(exact, PromptContext(prompts.slots, prompts.spans, turns))
        context = PrefillContext(
            slots=prompts.slots,
            positions=prompts.positions,
            rotary=rotary,
            local_rotary=self._turns(self._local_rotary, prompts.positions),
            chunks=prompts.chunks,
            spans=prompts.spans,
            ia3_tasks=new_token_tasks(self.config, prompts.chunks, self.device),
        )
        return self._forward(prompts.ids, prompts.positions, context)

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Run one token per row: hidden states [B, hidden].

        A row's tokens before this one are its position, unless its positions say otherwise.
        """
        positions = rows.lengths if rows.positions is None else rows.positions
        context = DecodeContext(
            slots=rows.starts + rows.lengths,
            positions=rows.lengths,
            rotary=self._turns(self._rotary, positions, self._reach_of_next(positions, rows)),
            local_rotary=self._turns(self._local_rotary, positions),
            starts=rows.starts,
            lengths=rows.lengths + 1,
            longest=rows.longest,
            ia3_tasks=rows.ia3_tasks,
        )
        return self._forward(ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, vocab] on every rank of the last stage."""
        if self.weights.head is None:
            raise RuntimeError("only the last pipeline stage has an output projection")
        local = self.kernels.logits(hidden, self.weights.head)
        logits = self.communicator.tp_concat(local)[:, : self.config.vocab_size]
        return capped(logits, self.config.logits_softcap)

    def _forward(self, ids: Tensor, positions: Tensor, context: LayerContext) -> Tensor:
        self.cache.ids[context.slots] = ids
        embedding = self.weights.embedding
        if embedding is not None:
            chunks = context.chunks if isinstance(context, PrefillContext) else ()
            x = self._embed(embedding, ids, positions, chunks)
        else:
            x = self.communicator.from_previous_stage(
                torch.empty(
                    ids.shape[0],
                    self.config.hidden_size,
                    dtype=torch.float32,
                    device=self.device,
                )
            )
        for layer in self._layers:
            x = layer.forward(x, context)
        if not self.communicator.is_last_stage:
            self.communicator.to_next_stage(x)
        return x

    def _decode_step(self, embedding: Embedding, head: Linear) -> PromptStep:
        shared = (self.kernels, self.communicator)
        positions = torch.arange(self.cache.capacity + 1, device=self.device)
        sublayers: list[Block[Context]] = []
        for layer, own in self.weights.layers.items():
            if isinstance(own.mlp, Experts):
                raise ValueError("a decode step cannot choose among experts")
            cache = self.cache.layers[layer]
            attention = SelfAttention(
                own.query_key_value,
                own.attention_dense,
                *shared,
                cache=cache,
                heads=self.heads,
                slopes=self._slopes(layer),
                bias=own.relative,
                scale=self.config.attention_scale,
                window=self.config.window(layer),
                softcap=self.config.attention_softcap,
                norms=own.head_norms,
                local=self._turns_locally(layer),
                output_norm=own.attention_output_norm,
            )
            mlp = MLP(own.mlp, *shared, activation=self.config.activation)
            if self.config.parallel_residual:
                sublayers.append(ParallelSublayers(attention, mlp))
            else:
                sublayers += [attention, mlp]
        tables = EmbeddingTables(embedding.tokens, embedding.first_id, embedding.positions)
        return PromptStep(
            sublayers,
            head,
            tables,
            embedding.norm,
            (self._turns(self._rotary, positions), self._turns(self._local_rotary, positions)),
            self.config.vocab_size,
            self.cache.ids,
            *shared,
            embedding_scale=embedding.scale,
            logits_softcap=self.config.logits_softcap,
        )

    def _embed(
        self, embedding: Embedding, ids: Tensor, positions: Tensor, chunks: Sequence[Chunk]
    ) -> Tensor:
        counts = [chunk.count for chunk in chunks]
        prompts = [chunk.prompt for chunk in chunks]
        return embed(
            embedding,
            ids,
            positions,
            self.kernels,
            self.communicator,
            lambda x: with_virtual_tokens(x, ids, prompts, counts, self.weights.prompt_tables),
        )

    def _rotaries(self) -> tuple[Rotary | None, Rotary | None]:
        """Of layers that attend to everything, and of those with a window if they differ."""
        config = self.config
        if not isinstance(config, GPTConfig) or config.position_embedding != "rope":
            return None, None
        rotary, base = gpt_rotary(config, self.device), config.rotary_local_base
        if base is None:
            return rotary, None
        return rotary, Rotary(plain_frequencies(config.rotary_size, base), self.device)

    def _turns(
        self, rotary: Rotary | None, positions: Tensor, reach: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        return None if rotary is None else rotary.tables(self.kernels, positions, reach)

    def _reach_of(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """See Rotary.tables."""
        if self._rotary is None or not self._rotary.of_row:
            return None
        reach = [self._rotary.reach_of_prompt(each.prompt_end, each.most) for each in chunks]
        counts = torch.tensor([each.count for each in chunks])
        return torch.tensor(reach).repeat_interleave(counts).to(self.device, non_blocking=True)

    def _reach_of_next(self, positions: Tensor, rows: Rows) -> Tensor | None:
        if self._rotary is None or not self._rotary.of_row:
            return None
        return self._rotary.reach_of_next(positions, rows.most)

    def _turns_locally(self, layer: int) -> bool:
        """Whether a layer has a base of its own."""
        return self._local_rotary is not None and self.config.window(layer) > 0

    def _slopes(self, layer: int) -> Tensor | None:
        """ALiBi slopes of this rank's heads, float32 [heads]."""
        if self.config.position_embedding != "alibi":
            return None
        first = self.communicator.tp_rank * self.heads.num_heads
        slopes = alibi_slopes(self.config.num_heads)[first : first + self.heads.num_heads]
        scale = self.config.alibi_scale or 1.0
        if self.config.alibi_layer_scaling:
            scale *= layer + 1
        return torch.tensor(slopes, device=self.device) * scale
