"""The operations of a transformer, which every implementation has.

reference.py defines what each one computes, and its tensors' shapes and types; cuda/fused.py
computes the same with kernels in the Triton language.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from launcher_scripts.kernels.operands import (
    AttentionScores,
    EmbeddingTables,
    ExpertMLPs,
    HeadNorms,
    Heads,
    Hidden,
    LayerCache,
    Linear,
    Norm,
    Ranks,
    RotaryTable,
    Router,
    RowColumns,
    Spans,
    StepRows,
    VarlenBatch,
)
from launcher_scripts.kernels.reference_recurrence import (
    ConvOperands,
    DeltaOperands,
    Mamba2Operands,
    States,
)
from launcher_scripts.kernels.reference_sampling import BeamColumns, BeamShape, SamplingColumns


class Ops(Protocol):
    """An implementation: a module with these functions."""

    # Rows of any number

    def embed(self, ids: Tensor, table: Tensor, first_id: int) -> Tensor: ...

    def norm(self, x: Tensor, weights: Norm, dtype: torch.dtype) -> Tensor: ...

    def project(self, x: Tensor, linear: Linear) -> Tensor: ...

    def project_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor: ...

    def mlp_up(self, x: Tensor, up: Linear, gate: Linear | None, activation: str) -> Tensor: ...

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]: ...

    def mixture(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMLPs
    ) -> Tensor: ...

    def logits(self, x: Tensor, head: Linear) -> Tensor: ...

    def argmax(self, logits: Tensor) -> Tensor: ...

    def copy_to_host(
        self, tokens: Tensor, slots: Tensor, memory: Tensor, written: Tensor, padding: int
    ) -> None: ...

    def add_residual(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor: ...

    def prepare(self, linear: Linear) -> Linear: ...

    # Positions and the cache

    def rotary_table(self, positions: Tensor, frequencies: Tensor) -> RotaryTable: ...

    def apply_rotary(self, qkv: Tensor, heads: Heads, rotary: RotaryTable) -> Tensor: ...

    def store_kv(
        self,
        qkv: Tensor,
        heads: Heads,
        rotary: RotaryTable | None,
        slots: Tensor,
        cache: LayerCache,
        norms: HeadNorms | None = None,
    ) -> Tensor: ...

    # States of rows; see reference_recurrence.py

    def scan_short_conv(
        self,
        projected: Tensor,
        layer: ConvOperands,
        states: States,
        count: Tensor | None = None,
    ) -> tuple[Tensor, States]: ...

    def step_short_conv(self, projected: Tensor, layer: ConvOperands, slots: Tensor) -> Tensor: ...

    def scan_mamba2(
        self,
        projected: Tensor,
        layer: Mamba2Operands,
        states: States,
        count: Tensor | None = None,
    ) -> tuple[Tensor, States]: ...

    def step_mamba2(self, projected: Tensor, layer: Mamba2Operands, slots: Tensor) -> Tensor: ...

    def scan_delta(
        self,
        projected: Tensor,
        layer: DeltaOperands,
        states: States,
        count: Tensor | None = None,
    ) -> tuple[Tensor, States]: ...

    def step_delta(self, projected: Tensor, layer: DeltaOperands, slots: Tensor) -> Tensor: ...

    # Attention

    def context_attention(
        self,
        query: Tensor,
        cache: LayerCache,
        start: int,
        past: int,
        scores: AttentionScores,
        *,
        window: int = 0,
        source: int = 0,
    ) -> Tensor: ...

    def prompt_attention(
        self,
        query: Tensor,
        cache: LayerCache,
        spans: VarlenBatch,
        scores: AttentionScores,
        *,
        window: int = 0,
    ) -> Tensor: ...

    def decode_attention(
        self,
        query: Tensor,
        cache: LayerCache,
        starts: Tensor,
        lengths: Tensor,
        longest: int,
        scores: AttentionScores,
        *,
        positions: Tensor | None = None,
        fresh: bool | None = None,
    ) -> Tensor: ...

    def store_latents(
        self,
        query: Tensor,
        latent: Tensor,
        norm: Norm,
        rotary: RotaryTable | None,
        slots: Tensor,
        cache: LayerCache,
    ) -> Tensor: ...

    def attend_latents(
        self,
        query: Tensor,
        up: Tensor,
        cache: LayerCache,
        rows: tuple[Tensor, Tensor, int],
        scores: AttentionScores,
        *,
        positions: Tensor | None = None,
        lora: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor: ...

    def source_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: AttentionScores,
        *,
        first: int = 0,
        window: int = 0,
    ) -> Tensor: ...

    def source_attention_weights(
        self, query: Tensor, key: Tensor, scores: AttentionScores, *, window: int = 0
    ) -> Tensor: ...

    def attend_spans(
        self, qkv: Tensor, heads: Heads, spans: Spans, scores: AttentionScores, *, window: int = 0
    ) -> Tensor: ...

    # Tokens

    def process(
        self, logits: Tensor, slots: Tensor, columns: SamplingColumns, history: Tensor
    ) -> Tensor: ...

    def sample(
        self, logits: Tensor, slots: Tensor, columns: SamplingColumns
    ) -> tuple[Tensor, Tensor]: ...

    def rank_beams(
        self,
        logits: Tensor,
        allowed: Tensor,
        slots: Tensor,
        columns: BeamColumns,
        shape: BeamShape,
        completed: Tensor | None = None,
        bonus: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def reorder_beams(
        self,
        pool: Tensor,
        ids: Tensor | None,
        slots: Tensor,
        parents: Tensor,
        columns: BeamColumns,
        width: int,
        count: int,
    ) -> None: ...

    # Decode steps

    def begin_step(
        self,
        slots: Tensor,
        columns: RowColumns,
        history: Tensor,
        tables: EmbeddingTables,
        norm_of_next: Norm | None,
        *,
        sources: bool = False,
    ) -> tuple[Hidden, StepRows]: ...

    def hidden(self, exact: Tensor, norm_of_next: Norm | None, dtype: torch.dtype) -> Hidden: ...

    def project_hidden(self, x: Hidden, linear: Linear) -> Tensor: ...

    def attend_own(
        self,
        x: Hidden,
        linear: Linear,
        heads: Heads,
        rotary: RotaryTable | None,
        rows: StepRows,
        cache: LayerCache,
        longest: int,
        scores: AttentionScores,
        norms: HeadNorms | None = None,
    ) -> Tensor: ...

    def attend_source(
        self,
        x: Hidden,
        linear: Linear,
        heads: Heads,
        rows: StepRows,
        cache: LayerCache,
        longest: int,
        scores: AttentionScores,
    ) -> Tensor: ...

    def expand(self, x: Hidden, up: Linear, gate: Linear | None, activation: str) -> Tensor: ...

    def partial_product(self, x: Tensor, linear: Linear) -> Tensor: ...

    def accumulate(
        self,
        x: Tensor,
        linear: Linear,
        residual: Hidden,
        norm_of_next: Norm | None,
    ) -> Hidden: ...

    def sum_over_ranks(self, x: Tensor, ranks: Ranks) -> Tensor: ...

    def product_over_ranks(self, x: Tensor, linear: Linear, ranks: Ranks) -> Tensor: ...

    def accumulate_over_ranks(
        self,
        x: Tensor,
        linear: Linear,
        residual: Hidden,
        norm_of_next: Norm | None,
        ranks: Ranks,
    ) -> Hidden: ...

    def accumulate_parts(
        self, parts: Tensor, residual: Hidden, norm_of_next: Norm | None, ranks: Ranks
    ) -> Hidden: ...

    def largest(self, x: Hidden, head: Linear, held: int) -> tuple[Tensor, Tensor]: ...

    def largest_of_ranks(self, values: Tensor, ids: Tensor, ranks: Ranks) -> Tensor: ...

    def choose(
        self,
        x: Hidden,
        head: Linear,
        held: int,
        columns: RowColumns,
        slots: Tensor,
    ) -> Tensor: ...
