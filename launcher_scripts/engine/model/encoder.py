"""An encoder on one rank: rows of different lengths in, their hidden states out.

The fast way through an encoder: rows of several tokens in, their hidden states out.

The sublayers take fused steps, as those of a decode step do (see decode_step.py); what these cannot
express goes through `Encoder`. A pass reads all that changes from one tensor, so that short ones
can be recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.model.decode_step import prepared, through, unsupported_reasons
from launcher_scripts.engine.model.forward_context import EncodeContext, Stack, StepGraphs
from launcher_scripts.engine.model.layers import (
    MLP,
    AttentionOptions,
    Chunk,
    CrossAttention,
    Layer,
    MergedAttention,
    MixtureOfExperts,
    SelfAttention,
)
from launcher_scripts.engine.model.rotary import rotaries, rotary_tables, table_of
from launcher_scripts.engine.model.weights import (
    Embedding,
    Experts,
    LayerWeights,
    ModelWeights,
    StackWeights,
    sublayers_of,
)
from launcher_scripts.kernels.operands import (
    SPAN_QUERIES,
    AttentionScores,
    Heads,
    LayerCache,
    Norm,
    Spans,
    locate,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference_attention import span_blocks
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.t5 import T5Config


class Encoder:
    """The encoder's layers of one pipeline stage.

    norm: after the last layer, on the last stage
    """

    def __init__(
        self,
        config: T5Config | BartConfig,
        weights: StackWeights,
        norm: Norm | None,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.config = config
        self.weights = weights
        self.norm = norm
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self._rotaries = rotaries(config, device)
        layers = [
            self._layer(layer, layer_weights) for layer, layer_weights in weights.layers.items()
        ]
        self.stack = Stack(weights, layers, config.hidden_size, kernels, communicator, device)

    def _layer(self, layer: int, weights: LayerWeights) -> Layer:
        config, shared = self.config, (self.kernels, self.communicator)
        tp_size = self.communicator.tp_size
        heads = Heads(config.num_heads // tp_size, config.kv_heads // tp_size, config.head_size)
        empty = torch.empty(heads.num_kv_heads, 0, heads.head_size, device=self.device)
        attention = SelfAttention(
            weights.attention,
            *shared,
            AttentionOptions(
                LayerCache(empty, empty),
                heads,
                AttentionScores(config.attention_scale, config.attention_softcap),
            ),
            window=config.encoder_window(layer),
            table=table_of(config, layer),
        )
        mlp = weights.mlp
        if isinstance(mlp, Experts):
            branch: MLP = MixtureOfExperts(mlp, *shared, config.activation)
        else:
            branch = MLP(mlp, *shared, config.activation)
        return Layer(((attention,), (branch,)))

    def context(self, spans: Spans, positions: Tensor) -> EncodeContext:
        """Return the shared context of a pass over rows with positions [N]."""
        tables = rotary_tables(self._rotaries, self.kernels, positions)
        return EncodeContext(spans=spans, rotary=tables)

    def normed(self, x: Tensor) -> Tensor:
        """Hidden states float32 [N, hidden] after the last layer's norm, where that is here."""
        return x if self.norm is None else self.kernels.norm(x, self.norm, torch.float32)

    def forward(
        self, ids: Tensor, chunks: Sequence[Chunk], tasks: Tensor | None, *, attentions: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Run ids [N] of the chunks' sources; every rank gets the result, as `Encoded` has it.

        tasks: [N], each token's row of the IA3 factors
        """
        counts = [chunk.source for chunk in chunks]
        spans = Spans(torch.tensor(span_blocks(counts)).to(self.device, non_blocking=True))
        positions = torch.cat([torch.arange(count) for count in counts])
        positions = positions.to(self.device, non_blocking=True)
        outputs: list[Tensor] = []
        context = replace(
            self.context(spans, positions),
            ia3_tasks=tasks,
            counts=counts,
            attentions=outputs if attentions else None,
        )
        prompts = [(chunk.prompt, chunk.source) for chunk in chunks]
        x = self.stack.forward(ids, positions, context, prompts)
        hidden = self.communicator.from_last_stage(self.normed(x).contiguous())
        if not attentions:
            return hidden, None
        return hidden, [self._gathered(outputs[row :: len(counts)]) for row in range(len(counts))]

    def _gathered(self, states: list[Tensor]) -> Tensor:
        """One row's attention in all layers and heads, [layers, heads, n, n], on every rank.

        own: [heads / tp, n, n] of this stage's layers
        """
        communicator, size = self.communicator, states[0].shape[-1]
        gathered = communicator.tp_concat(torch.stack(states).flatten(1))
        gathered = gathered.view(len(states), self.config.num_heads, size, size)
        if not communicator.is_first_stage:
            first = min(self.weights.layers)
            earlier = gathered.new_empty(first, *gathered.shape[1:])
            gathered = torch.cat([communicator.from_previous_stage(earlier), gathered])
        if not communicator.is_last_stage:
            communicator.to_next_stage(gathered)
            gathered = gathered.new_empty(self.config.num_layers, *gathered.shape[1:])
        return communicator.from_last_stage(gathered)


# Tokens times weights that a device multiplies while its host launches a product and its company.
LAUNCH_WORK = 12_000_000_000
MIN_BUCKET, COARSE_BUCKETS = 16, 128
LONGEST_BEFOREHAND = 512


@dataclass(frozen=True)
class Sources:
    """Encoder inputs of several rows.

    values: int64 [3 * tokens + 3 * blocks]: ids, their positions, the addresses that get their
            keys and values, and the blocks of their Spans
    """

    values: Tensor
    tokens: int

    @property
    def ids(self) -> Tensor:
        return self.values[: self.tokens]

    @property
    def positions(self) -> Tensor:
        return self.values[self.tokens : 2 * self.tokens]

    @property
    def addresses(self) -> Tensor:
        return self.values[2 * self.tokens : 3 * self.tokens]

    @property
    def spans(self) -> Spans:
        return Spans(self.values[3 * self.tokens :].view(-1, 3))


def pack_rows(
    rows: Sequence[tuple[Sequence[int], int]], padding: int = 0, filled: int | None = None
) -> list[int]:
    """Sources.values of rows: ids and first address of each.

    filled: how many tokens to fill up to by one more row, with blocks that suffice for any one row
            of so many, or a power of two;  padding: the address of those, which no row has
    """
    counts = [len(ids) for ids, _ in rows]
    more = 0 if filled is None else filled - sum(counts)
    ids = itertools.chain(*(ids for ids, _ in rows), [0] * more)
    positions = itertools.chain(*map(range, counts), [0] * more)
    slots = itertools.chain(
        *(range(start, start + len(ids)) for ids, start in rows), [padding] * more
    )
    blocks = span_blocks([*counts, more])
    if filled is not None:
        enough = max(len(blocks), filled // SPAN_QUERIES + 2)
        blocks += [(0, 0, 0)] * (_power_of_two(enough) - len(blocks))
    return [*ids, *positions, *slots, *itertools.chain(*blocks)]


def pass_tokens(tokens: int) -> int:
    """Return the number of tokens of a recorded pass: powers of two, then four to an octave."""
    if tokens <= COARSE_BUCKETS:
        return max(MIN_BUCKET, _power_of_two(tokens))
    step = _power_of_two(tokens) // 8
    return -(-tokens // step) * step


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def encode_unsupported_reasons(weights: ModelWeights, communicator: Communicator) -> list[str]:
    """Why a model's inputs cannot go through an EncodeStep; empty where they can."""
    layers = [layer for stack in weights.stacks for layer in stack.layers.values()]
    result = unsupported_reasons(weights.config, layers)
    if communicator.parallelism.pp_size > 1:
        result.append("the layers are split into pipeline stages")
    if any(sublayer.ia3 is not None for layer in layers for sublayer in layer.sublayers):
        result.append("IA3 works inside the layers")
    return result


class EncodeStep:
    """The encoder of a rank that has all layers, and the keys and values the decoder wants of it.

    longest_recorded: tokens, up to which the host would hold the device up; the same on all
                      tensor-parallel ranks, whose weights have the same shapes
    readers: the decoder's attention to the states
    """

    def __init__(
        self,
        encoder: Encoder,
        embedding: Embedding,
        readers: Sequence[CrossAttention | MergedAttention],
    ) -> None:
        self.encoder = encoder
        self.embedding = embedding
        self.readers = readers
        self._norms = prepared(encoder.stack.sublayers, None)
        parts = sublayers_of(encoder.weights.layers.values())
        linears = [linear for part in parts for linear in part.linears()]
        linears += [reader.key_value for reader in readers]
        sizes = [linear.weight.numel() for linear in linears]
        self.longest_recorded = LAUNCH_WORK * len(sizes) // sum(sizes)
        self._states: Tensor | None = None

    def forward(self, sources: Sources) -> Tensor:
        """Hidden states, float32 [tokens, hidden]; the cache holds what the decoder reads."""
        encoder, dtype = self.encoder, self.embedding.tokens.dtype
        positions = sources.positions
        embedded = encoder.stack.embed(sources.ids, positions)
        x = encoder.kernels.hidden(embedded, self._norms[0], dtype)
        context = encoder.context(sources.spans, positions)
        x = through(encoder.stack.sublayers, x, context, self._norms)
        states = encoder.normed(x.exact)
        operand = states.to(dtype)
        if self.readers:
            slots = locate(self.readers[0].cache.table, sources.addresses)
            for reader in self.readers:
                reader.store_source(operand, slots)
        return states

    def run(
        self,
        rows: Sequence[tuple[Sequence[int], int]],
        padding: int,
        device: torch.device,
        graphs: StepGraphs | None,
    ) -> Tensor:
        """forward of rows, as in `pack`; short ones on a CUDA graph, filled up with padding."""
        tokens = sum(len(ids) for ids, _ in rows)
        filled = pass_tokens(tokens)
        if graphs is None or filled > self.longest_recorded:
            values = torch.tensor(pack_rows(rows)).to(device, non_blocking=True)
            return self.forward(Sources(values, tokens))
        values = torch.tensor(pack_rows(rows, padding, filled)).to(device, non_blocking=True)
        return graphs.run(*self._recorded(values, filled))[:tokens]

    def buckets(self) -> list[int]:
        """The tokens of passes that are recorded before an input needs them, few first."""
        max_tokens = min(self.longest_recorded, LONGEST_BEFOREHAND)
        sizes = {pass_tokens(tokens) for tokens in range(1, max_tokens + 1)}
        return sorted(bucket for bucket in sizes if bucket <= max_tokens)

    def record(self, filled: int, padding: int, device: torch.device, graphs: StepGraphs) -> None:
        """Have the graph of one input's pass, filled up to a bucket; it is tried out on padding."""
        values = torch.tensor(pack_rows([], padding, filled)).to(device, non_blocking=True)
        graphs.record(*self._recorded(values, filled))

    def _recorded(
        self, values: Tensor, filled: int
    ) -> tuple[Hashable, Tensor, Callable[[Tensor], Tensor]]:
        """Arguments of StepGraphs.run; the states of all passes are kept in the same place."""
        states = self._states
        if states is None:
            shape = self.longest_recorded, self.embedding.tokens.shape[1]
            states = self._states = torch.empty(shape, device=values.device)
        used_states = states[:filled]
        key = ("sources", filled, values.shape[0])
        return key, values, lambda values: used_states.copy_(self.forward(Sources(values, filled)))
