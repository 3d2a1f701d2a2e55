"""A model layer by layer on the CPU, with what its operations make: to compare, not to serve.

One layer is loaded at a time, in float32, and runs on hidden states that the caller gives. So a
layer's error is its local, and the memory of one layer is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.formats.source_tensor import float32
from launcher_scripts.checkpoint.verification import full_tensor
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.decode_step import DecodeStep
from launcher_scripts.engine.model.families import engine_family, kernels_for, stage_states
from launcher_scripts.engine.model.forward_context import PrefillContext
from launcher_scripts.engine.model.kv_cache import KVCache, RowStatePool, block_tokens
from launcher_scripts.engine.model.layers import (
    MLP,
    Chunk,
    CrossAttention,
    Layer,
    MergedAttention,
    MixtureOfExperts,
    SelfAttention,
    Sublayer,
)
from launcher_scripts.engine.model.network import Network
from launcher_scripts.kernels.operands import Heads, Spans, VarlenBatch
from launcher_scripts.kernels.reference_attention import span_blocks
from launcher_scripts.models.family import ModelConfig, WeightSpec

Floats = NDArray[np.float32]
Reader = Callable[[WeightSpec, int | None], NDArray[Any]]
Change = Callable[[WeightSpec, int | None, Reader], NDArray[Any]]
CPU = torch.device("cpu")
ENCODER, DECODER = STACKS = ("encoder", "decoder")
# The kinds of branches by their classes, those that are more special first.
_KINDS: tuple[tuple[type[Sublayer], str], ...] = (
    (MixtureOfExperts, "experts"),
    (MLP, "mlp"),
    (CrossAttention, "cross_attention"),
    (MergedAttention, "merged_attention"),
    (SelfAttention, "attention"),
)
# Operations of kernels/ops.py whose results are traced, by the name of what they make.
_OPERATIONS = {
    "norm": "norm",
    "project": "projection",
    "apply_rotary": "rotary",
    "store_kv": "rotary",
    "prompt_attention": "attention",
    "context_attention": "attention",
    "attend_spans": "attention",
    "source_attention": "attention",
    "mlp_up": "inner",
    "mixture": "experts",
    "project_add": "output",
    "add_residual": "output",
}


@dataclass(frozen=True)
class TracedStep:
    """The result of one operation of a layer, float32 [tokens, width].

    branch:    attention, cross_attention, mlp, experts, or mixer for another kind
    operation: norm, query, key, value, projection, rotary, attention, inner, experts or output
    """

    branch: str
    operation: str
    values: Floats


class _TracedKernels:
    """The reference kernels; what they make is added to `steps`."""

    def __init__(self, branch: str, heads: Heads | None, steps: list[TracedStep]) -> None:
        self._kernels = kernels_for("cpu")
        self._branch, self._heads, self._steps = branch, heads, steps

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        operation = _OPERATIONS.get(name)
        if operation is None:
            return function

        def traced(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if isinstance(result, Tensor):
                self._add(operation, result)
            return result

        return traced

    def _add(self, operation: str, result: Tensor) -> None:
        if operation == "experts":
            result = result.sum(0)
        values = result.detach().float().flatten(1).numpy().copy()
        heads = self._heads
        if operation == "projection" and heads is not None:
            sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            ends = np.cumsum([size * heads.head_size for size in sizes])
            if values.shape[1] == ends[-1]:
                parts = np.split(values, ends[:-1], axis=1)
                for part, block in zip(("query", "key", "value"), parts, strict=True):
                    self._steps.append(TracedStep(self._branch, part, block))
                return
        self._steps.append(TracedStep(self._branch, operation, values))


class _Stage(Network):
    """The layers of one stage without the fused steps; every branch has traced kernels."""

    def __init__(self, steps: list[TracedStep], *args: Any) -> None:
        super().__init__(*args)
        self.traced: dict[str, dict[int, Layer]] = {
            DECODER: dict(zip(self.weights.decoder.layers, self.stack.layers, strict=True))
        }
        if self._encoder is not None and self.weights.encoder is not None:
            layers = self.weights.encoder.layers
            self.traced[ENCODER] = dict(zip(layers, self._encoder.stack.layers, strict=True))
        for stack in self.traced.values():
            for layer in stack.values():
                for branch in (item for both in layer.branches for item in both):
                    heads = branch.heads if type(branch) is SelfAttention else None
                    branch.kernels = _TracedKernels(_kind(branch), heads, steps)

    def _decode_step(self) -> DecodeStep | None:
        return None

    def embed(self, stack: str, ids: Tensor) -> Tensor:
        """The input of the first layer."""
        local = self.stack if stack == DECODER or self._encoder is None else self._encoder.stack
        return local.embed(ids, torch.arange(len(ids)))

    def run(self, stack: str, layer: int, x: Tensor, source: Tensor | None) -> Tensor:
        """Hidden states [N, hidden] after the layer; source: what the decoder attends to."""
        count, positions = len(x), torch.arange(len(x))
        if stack == ENCODER and self._encoder is not None:
            spans = Spans(torch.tensor(span_blocks([count])))
            context: Any = self._encoder.context(spans, positions)
        else:
            context = self._prefill_context(count, positions, source)
        local = self.traced[stack][layer]
        for sublayer, branches in zip(local.sublayers, local.branches, strict=True):
            for branch in branches:
                if branch.input_norm is not None:  # projections apply it without a call of norm
                    branch.kernels.norm(x, branch.input_norm, torch.float32)
            x = sublayer.forward(x, context)
        return x

    def _prefill_context(
        self, count: int, positions: Tensor, source: Tensor | None
    ) -> PrefillContext:
        before = 0 if source is None else len(source)
        if source is not None:
            for reader in self._readers:
                reader.store_source(source, torch.arange(before), None)
        chunk = Chunk(before, 0, count, before, prompt_end=count, maximum=count)
        tables = self._tables(positions, self._max_positions_of([chunk]))
        return PrefillContext(
            rotary=tables,
            slots=torch.arange(before, before + count),
            chunks=(chunk,),
            spans=VarlenBatch(((before, 0, count),)),
            windowed=False,
        )


def _kind(branch: Sublayer) -> str:
    return next((name for kind, name in _KINDS if isinstance(branch, kind)), "mixer")


# Of layers that cannot run without others.
_SIDE_FIELDS = ("layer_input_size", "layer_kv_sources", "num_streams")


class TracedModel:
    """An exported folder whose layers run one by one, on one rank whatever it was split for.

    changes: fields of its configuration with other values
    change:  (spec, layer, reader of the stored tensors) -> the tensor that the layer gets
    Raises CheckpointError for layers that cannot run without others.
    """

    def __init__(
        self,
        checkpoint: FTCheckpoint,
        changes: Mapping[str, Any] | None = None,
        change: Change | None = None,
        max_tokens: int = 256,
    ) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = replace(checkpoint.config, **(changes or {}))
        side = [name for name in _SIDE_FIELDS if getattr(self.config, name, None)]
        if side:
            text = "layers that read inputs or keys besides their own are not compared one by one"
            raise CheckpointError(problem(text, got=side))
        self._change = change
        self._max_tokens = max_tokens
        self._family = engine_family(self.config)
        self._parallelism = Parallelism(1, self._family.depth(self.config))
        self._steps: list[TracedStep] = []
        self._loaded: tuple[int, _Stage] | None = None

    @property
    def stacks(self) -> dict[str, int]:
        """The number of layers of each stack, the encoder first."""
        config: Any = self.config
        if hasattr(config, "num_decoder_layers"):
            return {ENCODER: config.num_layers, DECODER: config.num_decoder_layers}
        return {DECODER: config.num_layers}

    def variant(self, changes: Mapping[str, Any], change: Change | None) -> TracedModel:
        """The same weights with other settings, or with other tensors made of them."""
        return TracedModel(self.checkpoint, changes, change, self._max_tokens)

    @torch.inference_mode()
    def embed(self, stack: str, ids: Sequence[int]) -> Floats:
        """Float32 [tokens, hidden]: what the stack's first layer reads."""
        return _array(self._stage(0).embed(stack, torch.tensor(list(ids))))

    @torch.inference_mode()
    def layer(
        self, stack: str, layer: int, x: Floats, source: Floats | None = None
    ) -> list[TracedStep]:
        """Run one layer on hidden states x; the last step is its output.

        source: the encoder's states behind their norm, of a decoder that attends to them
        """
        stage = self._stage(self._stage_of(stack, layer))
        self._steps.clear()
        output = stage.run(stack, layer, _tensor(x), None if source is None else _tensor(source))
        return [*self._steps, TracedStep("layer", "output", _array(output))]

    @torch.inference_mode()
    def encoder_norm(self, x: Floats) -> Floats:
        """The encoder's states behind its norm."""
        stage = self._stage(self._parallelism.pp_size - 1)
        return _array(stage._encoder.normed(_tensor(x))) if stage._encoder else x

    @torch.inference_mode()
    def head(self, x: Floats) -> tuple[Floats, Floats]:
        """Hidden states behind the final norm, and logits [tokens, vocab], of the last layer's."""
        stage = self._stage(self._parallelism.pp_size - 1)
        states, head = _tensor(x), stage.weights.head
        normed = states
        if head is not None and head.norm is not None:
            normed = stage.kernels.norm(states, head.norm, torch.float32)
        return _array(normed), _array(stage.logits(states))

    def _stage_of(self, stack: str, layer: int) -> int:
        sizes = range(self._parallelism.pp_size)
        return next(n for n in sizes if layer in self._parallelism.layers(self.stacks[stack], n))

    def _stage(self, number: int) -> _Stage:
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None
            self._loaded = number, self._load(number)
        return self._loaded[1]

    def _load(self, number: int) -> _Stage:
        config, family = self.config, self._family
        loader = family.loader(config, self._parallelism, number, torch.float32, CPU, self._read)
        states = stage_states(config, self._parallelism, number, 1)
        rows = RowStatePool(states, 1, 1, torch.float32, CPU)
        tokens = -(-2 * self._max_tokens // block_tokens(CPU)) * block_tokens(CPU)
        cache = KVCache(states, tokens, torch.float32, CPU, rows)
        return _Stage(self._steps, loader.load(), cache, kernels_for("cpu"), Communicator(), CPU)

    def _read(self, spec: WeightSpec, layer: int | None) -> NDArray[Any]:
        if self._change is not None:
            return self._change(spec, layer, self._stored)
        return self._stored(spec, layer)

    def _stored(self, spec: WeightSpec, layer: int | None) -> NDArray[Any]:
        return float32(full_tensor(self.checkpoint, spec, layer))


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _array(values: Tensor) -> Floats:
    return values.detach().float().numpy().copy()
