"""The fast way through a decode step: every row's last token in, hidden states or tokens out.

The sublayers hand each other their hidden states in the form that the next one's first projection
reads. The operations are fusions of those of the general path; what they cannot express goes
through `Network.decode` (see `unsupported_reasons`). The prompts of a GPT take this way, too, all
new tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Bounds
from launcher_scripts.engine.model.forward_context import (
    CacheContext,
    HiddenStates,
    Stack,
    StepContext,
)
from launcher_scripts.engine.model.layers import ForwardContext, ParallelSublayers, Sublayer
from launcher_scripts.engine.model.rotary import RotaryTables
from launcher_scripts.engine.model.weights import LayerWeights, ModelWeights, sublayers_of
from launcher_scripts.kernels.operands import (
    EmbeddingTables,
    Hidden,
    Linear,
    Norm,
    RowColumns,
    StepRows,
)
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.reference import EXACT_IDS
from launcher_scripts.models.gpt import GPTConfig

Sublayers = Sequence[Sublayer | ParallelSublayers]


class DecodeStep:
    """The layers of one pipeline stage of a decoder, one token of every row at a time.

    Between stages travel hidden states, float32 [N, hidden].

    stack:   has at least one layer;  heads: see Network.head_shards
    rotary:  of all positions
    history: [cache tokens], the ids in the cache
    in_sequence: rows may be tokens of one sequence (see StepRows)
    """

    def __init__(
        self,
        stack: Stack,
        heads: Sequence[Linear],
        weights: ModelWeights,
        rotary: RotaryTables,
        history: Tensor,
        kernels: Ops,
        communicator: Communicator,
    ) -> None:
        config, embedding = weights.config, stack.embedding
        self.in_sequence = False
        self.stack = stack
        self.sublayers: Sublayers = stack.sublayers
        self.heads = [kernels.prepare(head) for head in heads]
        self._is_sharded = len(heads) > 1
        self.embedding = embedding
        self.rotary = rotary
        self.vocab_size: int = config.vocab_size
        self.logits_softcap: float | None = config.logits_softcap
        self.history = history
        self.kernels = kernels
        self.communicator = communicator
        if embedding is None:
            linear = next(iter(sublayers_of(weights.decoder.layers.values()))).in_proj
            zeros = linear.weight.new_zeros(1, config.hidden_size, dtype=linear.dtype)
            self._tables = EmbeddingTables(zeros, 0, None)
        else:
            tokens, positions = embedding.tokens, embedding.positions
            self._tables = EmbeddingTables(tokens, embedding.first_id, positions)
        self._norms = prepared(self.sublayers, self.heads[0].norm if self.heads else None)
        self._windows = {sublayer.window for sublayer in self.sublayers} - {0}

    def forward(
        self,
        columns: RowColumns,
        slots: Tensor,
        bounds: Bounds,
        lora_adapters: Tensor | None = None,
    ) -> Hidden:
        """Hidden states [B, hidden] after the last layer; the rows in slots [B] grow by a token.

        lora_adapters: int64 [B], the rows' LoRA adapters, where any has one
        """
        x, rows = self.kernels.begin_step(
            slots,
            columns,
            self.history,
            self._local_tables(),
            self._norms[0],
            sources=bounds.source > 0,
        )
        x = self._entered(x)
        rows = replace(rows, in_sequence=self.in_sequence)
        context = self._context(rows, bounds, slots, lora_adapters)
        return self._through(x, context)

    def _entered(self, x: Hidden) -> Hidden:
        """Return the input of the first layer from the output of begin_step."""
        embedding = self.embedding
        if embedding is None:
            exact = self.communicator.from_previous_stage(x.exact)
        elif self.communicator.tp_size == 1 and not self._is_sharded and self._embeds_plainly:
            return x
        else:
            exact = self.kernels.sum_over_ranks(x.exact, self.communicator)
            if embedding.scale is not None:
                exact = exact * embedding.scale
            if embedding.norm is not None:
                exact = self.kernels.norm(exact, embedding.norm, torch.float32)
        return self.kernels.hidden(exact, self._norms[0], x.operand.dtype)

    @property
    def _embeds_plainly(self) -> bool:
        embedding = self.embedding
        return embedding is not None and embedding.norm is None and embedding.scale is None

    def _through(self, x: Hidden, context: StepContext | CacheContext) -> Hidden:
        """Hidden states after the stage's last layer, also sent on."""
        features = self.stack.features
        x = through(self.sublayers, x, context, self._norms, features)
        if features is not None:
            features.store(context.cache_tokens, x.exact)
        if not self.communicator.is_last_stage:
            self.communicator.to_next_stage(x.exact)
        return x

    def _context(
        self, rows: StepRows, bounds: Bounds, slots: Tensor, lora_adapters: Tensor | None
    ) -> StepContext:
        of_windows = {window: rows.within(window) for window in self._windows}
        return StepContext(
            rows={0: rows, **of_windows},
            bounds=bounds,
            slots=slots,
            rotary=self.rotary,
            lora_adapters=lora_adapters,
        )

    def prompts(self, embedded: Tensor, context: CacheContext) -> Tensor:
        """Hidden states float32 [N, hidden] after the last layer, of what `Stack.embed` gives of
        the new tokens.
        """
        x = self.kernels.hidden(embedded, self._norms[0], self._tables.tokens.dtype)
        return self._through(x, context).exact

    def logits(self, x: Hidden) -> Tensor:
        """Float32 [B, vocab] on every rank of the last stage."""
        local = local_logits(x.exact, self.heads, self.kernels)
        logits = self.communicator.tp_concat(local)[:, : self.vocab_size]
        return capped(logits, self.logits_softcap)

    def greedy(self, x: Hidden, columns: RowColumns, slots: Tensor) -> Tensor:
        """The ids that argmax would find in `logits`, int64 [B]; now the rows' last tokens."""
        if self._is_sharded:
            tokens = self.kernels.argmax(self.logits(x))
            columns.token.index_copy_(0, slots, tokens)
            return tokens
        if self.communicator.tp_size == 1:
            return self.kernels.choose(x, self._local_head, self.vocab_size, columns, slots)
        tokens = self._argmax_of_ranks(x)
        columns.token.index_copy_(0, slots, tokens)
        return tokens

    def _argmax_of_ranks(self, x: Hidden) -> Tensor:
        rows, part = x.exact.shape[0], self._local_head.weight.shape[0]
        if part * self.communicator.tp_size >= EXACT_IDS:
            return self.kernels.argmax(self.logits(x))
        first = self.communicator.tp_rank * part
        size = min(part, self.vocab_size - first)
        if size > 0:
            values, indices = self.kernels.largest(x, self._local_head, size)
        else:
            values = x.exact.new_full((rows,), -torch.inf)
            indices = torch.zeros(rows, dtype=torch.int64, device=values.device)
        return self.kernels.largest_of_ranks(values, indices + first, self.communicator)

    @property
    def _local_head(self) -> Linear:
        if not self.heads:
            raise RuntimeError("only the last pipeline stage has an output projection")
        return self.heads[0]

    def _local_tables(self) -> EmbeddingTables:
        """One rank adds the positions: the embeddings are summed over the ranks."""
        if self.communicator.tp_rank == 0:
            return self._tables
        return replace(self._tables, positions=None)


def prepared(sublayers: Sublayers, last: Norm | None) -> list[Norm | None]:
    """Prepare the sublayers for fused steps: the norm before each, and the `last` after them."""
    for sublayer in sublayers:
        sublayer.prepare()
    return [*(sublayer.input_norm for sublayer in sublayers), last]


def through(
    sublayers: Sublayers,
    x: Hidden,
    context: ForwardContext[Hidden],
    norms: Sequence[Norm | None],
    features: HiddenStates | None = None,
) -> Hidden:
    """Hidden states after the sublayers.  norms: as `prepared` gives them"""
    for index, (sublayer, norm_of_next) in enumerate(zip(sublayers, norms[1:], strict=True)):
        if features is not None:
            features.collect(index, x.exact)
        x = sublayer.step(x, context, norm_of_next)
    return x


def local_logits(x: Tensor, heads: Sequence[Linear], kernels: Ops) -> Tensor:
    """Return a rank's logits [N, rows] float32.  heads: see Network.head_shards"""
    shards = [kernels.logits(x, head) for head in heads]
    return shards[0] if len(shards) == 1 else torch.cat(shards, 1)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), which keeps their order."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def unsupported_reasons(
    config: object, layers: Iterable[LayerWeights], tp_size: int = 1
) -> list[str]:
    """Why the model's decode steps cannot go through a DecodeStep; empty where they can.

    Rows with IA3 do not; see RowStart.general.
    """
    result = []
    placement = getattr(config, "norm_placement", "pre")
    if placement == "post" or (placement != "pre" and not isinstance(config, GPTConfig)):
        result.append("norms follow the branches or the sums")
    if isinstance(config, GPTConfig):
        if config.joint_qk_norm and tp_size > 1:
            result.append("queries and keys are normalized over the heads of all ranks")
        if config.rotary_scaling in ("longrope", "dynamic"):
            result.append("rotary positions depend on a row's length")
        if config.layer_input_size or config.layer_kv_sources or config.expert_norms:
            result.append("layers read inputs or keys besides their own, or norm experts apart")
        if config.qk_norm_per_head or config.attention_clip:
            result.append("every head's norm has weights of its own, or queries are cut off")
        if config.value_norm or config.layer_scale or config.layer_head_sizes:
            result.append("layers have heads of their own sizes, normalized values or a scale")
    if any(sublayer.adapter is not None for layer in layers for sublayer in layer.sublayers):
        result.append("adapters work inside the layers")
    if getattr(config, "head_size", 2) % 2:
        result.append("heads have an odd number of features")
    return result
