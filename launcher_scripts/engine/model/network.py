"""What a runner asks of the model it runs, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from launcher_scripts.engine.core.kv_cache import KVCache
from launcher_scripts.engine.model.decode_step import DecodeStep
from launcher_scripts.engine.model.encode_step import EncodeStep
from launcher_scripts.engine.model.layers import Chunk, Rows
from launcher_scripts.engine.runner.prompt_batch import PromptBatch
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.family import ModelConfig


@dataclass(frozen=True)
class Encoded:
    """What an encoder made of several rows.

    hidden:     float32 [N, hidden], the rows one after the other
    attentions: of each row float32 [layers, heads, n, n]; None where nobody asked
    """

    hidden: Tensor
    attentions: list[Tensor] | None = None


class Network(Protocol):
    """One rank's part of a model; its keys and values are in `cache`.

    step: the fast way to decode, or None where there is none, for the reasons in step_obstacles;
    encode_step, encode_obstacles: the same of encoding, None and empty without an encoder
    replays_prompts: whether the sizes of a prefill step decide alone what it launches
    """

    cache: KVCache
    kernels: Ops
    step_obstacles: list[str]
    encode_step: EncodeStep | None
    encode_obstacles: list[str]
    replays_prompts: bool

    @property
    def config(self) -> ModelConfig: ...

    @property
    def step(self) -> DecodeStep | None: ...

    def encode(self, ids: Tensor, chunks: tuple[Chunk, ...], *, attentions: bool) -> Encoded:
        """Run the encoder over ids [N] of several rows and keep what the decoder needs of it.

        Only called for models with an encoder; a chunk's start is its row's first cache token.
        """
        ...

    def prefill(self, prompts: PromptBatch) -> Tensor:
        """Run the new tokens of several rows: hidden states [N, hidden]."""
        ...

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Run one token per row: hidden states [B, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, vocab] on every rank of the last stage."""
        ...
