"""One rank's part of a model: token ids in, logits out, keys and values left in the cache.

Where there is an encoder, the keys and values of a row's source are computed once per decoder layer
and kept in the tokens right before the row's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Prompt
from launcher_scripts.engine.model.decode_step import (
    DecodeStep,
    capped,
    local_logits,
    unsupported_reasons,
)
from launcher_scripts.engine.model.encoder import Encoder, EncodeStep, encode_unsupported_reasons
from launcher_scripts.engine.model.families import engine_family
from launcher_scripts.engine.model.forward_context import (
    CacheContext,
    DecodeContext,
    MixedContext,
    PrefillContext,
    Rows,
    Stack,
)
from launcher_scripts.engine.model.kv_cache import KVCache
from launcher_scripts.engine.model.latent_attention import LatentAttention, LatentAttentionWeights
from launcher_scripts.engine.model.layers import (
    MLP,
    AttentionOptions,
    Chunk,
    CrossAttention,
    ForwardContext,
    Input,
    Layer,
    MergedAttention,
    MixtureOfExperts,
    SelfAttention,
    Sublayer,
)
from launcher_scripts.engine.model.recurrent import (
    RECURRENT,
    RecurrentBranch,
    RecurrentWeights,
    recurrence,
)
from launcher_scripts.engine.model.rotary import (
    RotaryTables,
    alibi_slopes,
    rotaries,
    rotary_tables,
    table_of,
)
from launcher_scripts.engine.model.side_streams import (
    CutMLP,
    CutMLPWeights,
    Laurel,
    LaurelWeights,
    LayerInput,
    LayerInputWeights,
    NormedExperts,
    NormedMixture,
    SharingAttention,
    SharingAttentionWeights,
    SideStreams,
    shared_layers,
    with_streams,
)
from launcher_scripts.engine.model.weights import (
    AttentionWeights,
    CrossAttentionWeights,
    Experts,
    LayerWeights,
    LinearWeights,
    MLPWeights,
    ModelWeights,
    SublayerWeights,
    token_tasks,
)
from launcher_scripts.kernels.operands import (
    WIDEST_PROMPT_HEAD,
    AttentionScores,
    Linear,
    VarlenBatch,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig


@dataclass(frozen=True)
class Encoded:
    """Encoder outputs of several rows.

    hidden:     float32 [N, hidden], the rows one after the other
    attentions: of each row float32 [layers, heads, n, n]; None where nobody asked
    """

    hidden: Tensor
    attentions: list[Tensor] | None = None


@dataclass(frozen=True)
class PromptBatch:
    """New tokens of several rows, one row after the other.

    ids, positions, addresses: [N]
    row_slots, lengths:    [R], the rows, and how many tokens of each are then in the cache
    decoding:              [B], slots of the rows that run one token beside
    last, ended:           [B + R], of the rows that get a token, those that decode first: places of
                           their last tokens in the pass, which begins with the rows that decode;
                           and their slots
    chunks:                of every row; none where the batch only fills a recorded one
    lora_adapters:         [N], each token's LoRA adapter or NO_TASK; None where no row has one
    """

    ids: Tensor
    positions: Tensor
    addresses: Tensor
    spans: VarlenBatch
    row_slots: Tensor
    lengths: Tensor
    decoding: Tensor
    last: Tensor
    finished: Tensor
    chunks: tuple[Chunk, ...]
    lora_adapters: Tensor | None = None


class LinearBranch(Sublayer):
    """A linear layer in place of attention or of the MLP."""

    def prepare(self) -> None:
        """Nothing: its norm is not that of a projection."""

    def branch(self, x: Input, _context: ForwardContext[Input], /) -> Tensor:
        """What out_proj reads, this rank's features."""
        size = self.out_proj.in_size
        first = self.communicator.tp_rank * size
        return self._normalized(x)[:, first : first + size].contiguous()


class Network:
    """The layers of one pipeline stage of a decoder, and of its encoder where it has one.

    step: the fast way to decode; None where there is none, for step_unsupported_reasons
    encode_step, encode_unsupported_reasons: the same of encoding; None and empty without an encoder
    has_copies: layers compute with copies of the weights
    replays_prompts: whether the sizes of a prefill step decide alone what it launches
    """

    has_copies = False

    def __init__(
        self,
        weights: ModelWeights,
        cache: KVCache,
        kernels: Ops,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        config = weights.config
        self.config: ModelConfig = config
        self.weights = weights
        self.cache = cache
        self.kernels = kernels
        self.communicator = communicator
        self.device = device
        self.heads = engine_family(config).heads(config, communicator.tp_size)
        shared = (kernels, communicator, device)
        self._rotaries = rotaries(config, device)
        self._encoder: Encoder | None = None
        if weights.encoder is not None:
            self._encoder = Encoder(config, weights.encoder, weights.encoder_norm, *shared)
        layers = [
            self._layer(layer, layer_weights)
            for layer, layer_weights in weights.decoder.layers.items()
        ]
        side = self._side_streams()
        self.stack = Stack(weights.decoder, layers, config.hidden_size, *shared, side)
        self._readers: list[CrossAttention | MergedAttention] = []
        for layer in layers:
            self._readers += layer.of_kind(CrossAttention) + layer.of_kind(MergedAttention)
        self.step_unsupported_reasons = unsupported_reasons(
            config, weights.decoder.layers.values(), communicator.tp_size
        )
        self._heads = [] if weights.head is None else self.head_shards()
        self.step = self._decode_step()
        self.encode_unsupported_reasons: list[str] = []
        self.encode_step: EncodeStep | None = None
        if self._encoder is not None:
            self.encode_unsupported_reasons = encode_unsupported_reasons(weights, communicator)
            embedding = self._encoder.stack.embedding
            if embedding is not None and not self.encode_unsupported_reasons:
                self.encode_step = EncodeStep(self._encoder, embedding, self._readers)
        branches = [item for layer in layers for both in layer.branches for item in both]
        self._recurrent = [branch for branch in branches if isinstance(branch, RecurrentBranch)]
        self.replays_prompts = (
            self._encoder is None
            and not config.has_row_states
            and not self._rotates_by_row
            and getattr(config, "kv_lora_rank", None) is None
            and config.head_size <= WIDEST_PROMPT_HEAD
        )

    def say_general_paths(self) -> None:
        """Print why the fast paths are not taken, where they are not."""
        for which, reasons in (
            ("decode steps take", self.step_unsupported_reasons),
            ("the encoder takes", self.encode_unsupported_reasons),
        ):
            if reasons:
                print(f"{which} the general path: {'; '.join(reasons)}")

    def encode(self, ids: Tensor, chunks: tuple[Chunk, ...], *, attentions: bool) -> Encoded:
        """Run the encoder over ids [N] of several rows and keep what the decoder needs of it.

        Only called for models with an encoder; a chunk's start is its row's first address.
        """
        if self._encoder is None:
            raise ValueError("a decoder alone encodes nothing")
        tasks = token_tasks([(chunk.ia3_task, chunk.source) for chunk in chunks], self.device)
        encoded = Encoded(*self._encoder.forward(ids, chunks, tasks, attentions=attentions))
        if self._readers:
            spans = [torch.arange(chunk.start - chunk.source, chunk.start) for chunk in chunks]
            slots = self.cache.table.locate(torch.cat(spans).to(self.device, non_blocking=True))
            for reader in self._readers:
                reader.store_source(encoded.hidden, slots, tasks)
        return encoded

    def prefill(self, prompts: PromptBatch, decoding: tuple[Tensor, Rows] | None = None) -> Tensor:
        """Run the new tokens of several rows: hidden states [N, hidden], also sent on.

        decoding: rows that run one token in the same pass, and the tokens [B]; their hidden states
                  come first, and their positions are their lengths
        A decoder alone goes by fused steps where it can.
        """
        chunks, ids, positions = prompts.chunks, prompts.ids, prompts.positions
        windowed = any(chunk.window for chunk in chunks)
        tasks = token_tasks([(chunk.ia3_task, chunk.count) for chunk in chunks], self.device)
        of_prompts = PrefillContext(
            slots=self.cache.table.locate(prompts.addresses),
            chunks=chunks,
            spans=prompts.spans,
            windowed=windowed,
            lora_adapters=prompts.lora_adapters,
            ia3_tasks=tasks,
        )
        context: CacheContext = of_prompts
        if decoding is not None:
            tokens, rows = decoding
            local = self._decode_context(rows)
            slots = torch.cat([local.slots, of_prompts.slots])
            context = MixedContext(
                slots=slots,
                decoding=local,
                prompts=of_prompts,
                lora_adapters=_joined(rows.lora_adapters, prompts.lora_adapters),
            )
            ids, positions = torch.cat([tokens, ids]), torch.cat([rows.lengths, positions])
        context = replace(context, rotary=self._tables(positions, self._max_positions_of(chunks)))
        prompt_rows = [(chunk.prompt, chunk.count) for chunk in chunks]
        if self.step is None or self._encoder is not None or windowed or tasks is not None:
            return self._forward(ids, positions, context, prompt_rows)
        self.cache.ids[context.slots] = ids
        return self.step.prompts(self.stack.embed(ids, positions, prompt_rows), context)

    def decode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Run one token per row: hidden states [B, hidden].

        A row's tokens before this one are its position, unless its positions say otherwise. Rows
        that only fill a step up have no source, and attend to themselves.
        """
        positions = rows.lengths if rows.positions is None else rows.positions
        rotary = self._tables(positions, self._next_max_positions(positions, rows))
        context = replace(self._decode_context(rows), rotary=rotary)
        return self._forward(ids, positions, context)

    def weights_changed(self) -> None:
        """Derive again, in place, what fused steps know of the weights beforehand."""
        stacks = [self.stack] if self._encoder is None else [self._encoder.stack, self.stack]
        linears = [item for stack in stacks for part in stack.sublayers for item in _linears(part)]
        linears += [] if self.step is None else self.step.heads
        for linear in linears:
            if linear.folded is None:
                continue
            fresh = self.kernels.prepare(linear).folded
            for name in ("sums", "offsets"):
                if (tensor := getattr(linear.folded, name)) is not None:
                    tensor.copy_(getattr(fresh, name))

    def settle_drafts(self, counts: Tensor) -> None:
        """Keep what is left of rows' states behind the first counts [R] tokens of their drafts,
        which ran last.
        """
        for branch in self._recurrent:
            branch.settle_drafts(counts)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, vocab] on every rank of the last stage."""
        if not self._heads:
            raise RuntimeError("only the last pipeline stage has an output projection")
        local = local_logits(hidden, self._heads, self.kernels)
        logits = self.communicator.tp_concat(local)[:, : self.config.vocab_size]
        return capped(logits, self.weights.config.logits_softcap)

    def head_shards(self) -> list[Linear]:
        """Return the output projection, in the parts that are computed one after the other."""
        return [] if self.weights.head is None else [self.weights.head]

    def _decode_context(self, rows: Rows) -> DecodeContext:
        source = rows.source
        return DecodeContext(
            slots=self.cache.table.locate(rows.starts + rows.lengths),
            starts=rows.starts,
            lengths=rows.lengths + 1,
            longest=rows.longest,
            positions=rows.lengths,
            source=source and replace(source, lengths=source.lengths.clamp(min=1)),
            ia3_tasks=rows.ia3_tasks,
            lora_adapters=rows.lora_adapters,
            rows=rows.slots,
        )

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: CacheContext,
        rows: Sequence[tuple[Prompt | None, int]] = (),
    ) -> Tensor:
        self.cache.ids[context.slots] = ids
        return self.stack.forward(ids, positions, context, rows)

    def _layer(self, layer: int, weights: LayerWeights) -> Layer:
        result = Layer(
            tuple(tuple(self._branch(layer, item) for item in both) for both in weights.branches)
        )
        return replace(result, combined=with_streams(weights, result.sublayers, self.kernels))

    def _side_streams(self) -> SideStreams | None:
        decoder, config = self.weights.decoder, self.config
        if decoder.side is None:
            return None
        layers = range(min(decoder.layers), max(decoder.layers) + 1)
        received, sent = (
            [self.cache.layers[layer] for layer in numbers]
            for numbers in shared_layers(config, layers)
        )
        return SideStreams(decoder.side, config.hidden_size, (received, sent), self.kernels)

    def _branch(self, layer: int, weights: SublayerWeights) -> Sublayer:
        """The branch of a layer that such weights are of: a row for each kind."""
        config, shared = self.weights.config, (self.kernels, self.communicator)
        if isinstance(weights, NormedExperts):
            return NormedMixture(weights, *shared, config.activation)
        if isinstance(weights, Experts):
            return MixtureOfExperts(weights, *shared, config.activation)
        if isinstance(weights, LinearWeights):
            return LinearBranch(weights, *shared)
        if isinstance(weights, LaurelWeights):
            return Laurel(weights, *shared)
        if isinstance(weights, LayerInputWeights):
            return LayerInput(weights, *shared, config.activation)
        if isinstance(weights, CutMLPWeights):
            return CutMLP(weights, *shared, config.activation)
        if isinstance(weights, MLPWeights):
            return MLP(weights, *shared, config.activation)
        if isinstance(weights, AttentionWeights):
            window, table = config.window(layer), table_of(config, layer)
            options = self._attention_options(layer)
            if isinstance(weights, LatentAttentionWeights):
                return LatentAttention(weights, *shared, options, window=window, table=table)
            if isinstance(weights, SharingAttentionWeights):
                return SharingAttention(weights, *shared, options, window=window, table=table)
            attention = MergedAttention if weights.reads_source else SelfAttention
            return attention(weights, *shared, options, window=window, table=table)
        if isinstance(weights, CrossAttentionWeights):
            return CrossAttention(weights, *shared, self._attention_options(layer))
        if isinstance(weights, RecurrentWeights):
            kind = next(kind for kind in RECURRENT if isinstance(weights, kind))
            states = self.cache.row_states.layers[layer]
            return RECURRENT[kind](weights, *shared, recurrence(config, states))
        raise TypeError(f"no branch has {type(weights).__name__}")

    def _attention_options(self, layer: int) -> AttentionOptions:
        config = self.weights.config
        scale = getattr(config, "decoder_attention_scale", config.attention_scale)
        scores = AttentionScores(scale, config.attention_softcap, self._slopes(layer))
        local = config.of_layer(layer)
        heads = engine_family(config).heads(local, self.communicator.tp_size)
        source = config.kv_source(layer) if isinstance(config, GPTConfig) else layer
        return AttentionOptions(self.cache.layers[source], heads, scores)

    def _decode_step(self) -> DecodeStep | None:
        if not self.weights.decoder.layers or self.step_unsupported_reasons:
            return None
        rotary = self._tables(torch.arange(self.cache.capacity + 1, device=self.device))
        return DecodeStep(
            self.stack,
            self._heads,
            self.weights,
            rotary,
            self.cache.ids,
            self.kernels,
            self.communicator,
        )

    @property
    def _rotates_by_row(self) -> bool:
        """See Rotary.of_row."""
        default = self._rotaries[0]
        return default is not None and default.of_row

    def _tables(self, positions: Tensor, max_positions: Tensor | None = None) -> RotaryTables:
        return rotary_tables(self._rotaries, self.kernels, positions, max_positions)

    def _max_positions_of(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """See Rotary.tables."""
        rotary = self._rotaries[0]
        if rotary is None or not rotary.of_row:
            return None
        max_positions = [
            rotary.reach_of_prompt(chunk.prompt_end, chunk.maximum) for chunk in chunks
        ]
        counts = torch.tensor([chunk.count for chunk in chunks])
        return (
            torch.tensor(max_positions).repeat_interleave(counts).to(self.device, non_blocking=True)
        )

    def _next_max_positions(self, positions: Tensor, rows: Rows) -> Tensor | None:
        rotary = self._rotaries[0]
        if rotary is None or not rotary.of_row:
            return None
        return rotary.reach_of_next(positions, rows.maximum)

    def _slopes(self, layer: int) -> Tensor | None:
        """ALiBi slopes of this rank's heads, float32 [heads]."""
        config, heads = self.weights.config, self.heads.num_heads
        if config.position_embedding != "alibi":
            return None
        first = self.communicator.tp_rank * heads
        slopes = alibi_slopes(config.num_heads)[first : first + heads]
        scale = config.alibi_scale or 1.0
        if config.alibi_layer_scaling:
            scale *= layer + 1
        return torch.tensor(slopes, device=self.device) * scale


def _linears(part: object) -> list[Linear]:
    """The projections of a part of a network, as fused steps have them."""
    values = list(vars(part).values())
    inner = [item for value in values if isinstance(value, Sublayer) for item in _linears(value)]
    return [value for value in values if isinstance(value, Linear)] + inner


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])
