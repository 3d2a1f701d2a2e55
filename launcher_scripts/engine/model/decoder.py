"""A GPT decoder on one rank: token ids in, logits out, keys and values left in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from launcher_scripts.engine.core.kv_cache import KVCache
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.decode_step import (
    MLP,
    DecodeStep,
    ParallelSublayers,
    PromptContext,
    SelfAttention,
    Sublayer,
    capped,
    obstacles,
)
from launcher_scripts.engine.model.heads import local_heads
from launcher_scripts.engine.model.layers import (
    DecoderLayer,
    Rows,
    Segment,
    Step,
    alibi_slopes,
    new_token_tasks,
)
from launcher_scripts.engine.model.learned_parts import learned_of, with_virtual_tokens
from launcher_scripts.engine.model.rotary import Rotary
from launcher_scripts.engine.model.weights import GPTWeights
from launcher_scripts.engine.runner.prompt_batch import PromptBatch
from launcher_scripts.kernels.operands import WIDEST_PROMPT_HEAD, EmbeddingTables


class Decoder:
    """The layers of one pipeline stage, with the embedding on the first and the head on the last.

    Hidden states between stages are float32 [N, hidden].
    """

    def __init__(
        self,
        weights: GPTWeights,
        cache: KVCache,
        kernels: ModuleType,
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
            learned_of(weights.layers.values()),
        )
        self.step = None if self.step_obstacles else self._decode_step()
        turns_alike = self._rotary is None or not self._rotary.of_row
        self.replays_prompts = (
            turns_alike
            and self.config.head_size <= WIDEST_PROMPT_HEAD
            and not self.config.num_experts
        )
        self.encode_step = None
        self.encode_obstacles: list[str] = []

    def prefill(self, prompts: PromptBatch) -> Tensor:
        """Run the new tokens of several rows: hidden states [N, hidden].

        Through the sublayers of a decode step where these can; between ranks the layers send half.
        """
        reach = self._reach_of(prompts.segments)
        rotary = self._turns(self._rotary, prompts.positions, reach)
        windows = any(segment.window for segment in prompts.segments)
        if self.step is not None and self.communicator.tp_size == 1 and not windows:
            self.cache.ids[prompts.slots] = prompts.ids
            exact = self._embed(prompts.ids, prompts.positions, prompts.segments)
            turns = (rotary, self._turns(self._local_rotary, prompts.positions))
            return self.step.prompts(exact, PromptContext(prompts.slots, prompts.spans, turns))
        step = Step(
            slots=prompts.slots,
            rotary=rotary,
            local_rotary=self._turns(self._local_rotary, prompts.positions),
            segments=prompts.segments,
            spans=prompts.spans,
            ia3_tasks=new_token_tasks(self.config, prompts.segments, self.device),
        )
        return self._forward(prompts.ids, prompts.positions, step)

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Run one token per row: hidden states [B, hidden].

        A row's tokens before this one are its position, unless its positions say otherwise.
        """
        positions = rows.lengths if rows.positions is None else rows.positions
        step = Step(
            slots=rows.starts + rows.lengths,
            rotary=self._turns(self._rotary, positions, self._reach_of_next(positions, rows)),
            local_rotary=self._turns(self._local_rotary, positions),
            starts=rows.starts,
            lengths=rows.lengths + 1,
            longest=rows.longest,
            positions=rows.lengths,
            ia3_tasks=rows.ia3_tasks,
        )
        return self._forward(ids, positions, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, vocab] on every rank of the last stage."""
        if self.weights.head is None:
            raise RuntimeError("only the last pipeline stage has an output projection")
        local = self.kernels.logits(hidden, self.weights.head)
        logits = self.communicator.tp_concat(local)[:, : self.config.vocab_size]
        return capped(logits, self.config.logits_softcap)

    def _forward(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        self.cache.ids[step.slots] = ids
        if self.communicator.is_first_stage:
            x = self._embed(ids, positions, step.segments or ())
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
            x = layer.forward(x, step)
        if not self.communicator.is_last_stage:
            self.communicator.to_next_stage(x)
        return x

    def _decode_step(self) -> DecodeStep:
        weights = self.weights
        shared = (self.kernels, self.communicator)
        positions = torch.arange(self.cache.capacity + 1, device=self.device)
        sublayers: list[Sublayer | ParallelSublayers] = []
        for layer, own in weights.layers.items():
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
            mlp = MLP(
                own.mlp_up,
                own.mlp_down,
                *shared,
                gate=own.mlp_gate,
                activation=self.config.activation,
                output_norm=own.mlp_output_norm,
            )
            if self.config.parallel_residual:
                sublayers.append(ParallelSublayers(attention, mlp))
            else:
                sublayers += [attention, mlp]
        tables = EmbeddingTables(weights.token_table, weights.first_id, weights.position_table)
        return DecodeStep(
            sublayers,
            weights.head,
            tables,
            weights.embedding_norm,
            (self._turns(self._rotary, positions), self._turns(self._local_rotary, positions)),
            self.config.vocab_size,
            self.cache.ids,
            *shared,
            embedding_scale=self.config.embedding_scale,
            logits_softcap=self.config.logits_softcap,
        )

    def _embed(self, ids: Tensor, positions: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        weights = self.weights
        x = self.kernels.embed(ids, weights.token_table, weights.first_id)
        x = self.communicator.tp_sum(x)
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        if segments:
            counts = [segment.count for segment in segments]
            prompts = [segment.prompt for segment in segments]
            x = with_virtual_tokens(x, ids, prompts, counts, weights.prompt_tables)
        if weights.position_table is not None:
            x = x + self.kernels.embed(positions, weights.position_table, 0)
        if weights.embedding_norm is not None:
            x = self.kernels.norm(x, weights.embedding_norm, torch.float32)
        return x

    def _rotaries(self) -> tuple[Rotary | None, Rotary | None]:
        """Of layers that attend to everything, and of those with a window if they differ."""
        if self.config.position_embedding != "rope":
            return None, None
        rotary = Rotary(self.config, self.device)
        if self.config.rotary_local_base is None:
            return rotary, None
        return rotary, Rotary(self.config, self.device, local=True)

    def _turns(
        self, rotary: Rotary | None, positions: Tensor, reach: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        return None if rotary is None else rotary.tables(self.kernels, positions, reach)

    def _reach_of(self, segments: Sequence[Segment]) -> Tensor | None:
        """See Rotary.tables."""
        if self._rotary is None or not self._rotary.of_row:
            return None
        reach = [self._rotary.reach_of_prompt(each.prompt_end, each.most) for each in segments]
        counts = torch.tensor([each.count for each in segments])
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
