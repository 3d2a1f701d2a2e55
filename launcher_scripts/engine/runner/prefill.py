"""Prompts at work: the new tokens of all rows of a step in one pass, and the first tokens.

Rows that decode take their next token in the same pass: it reads the weights once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.core.beam_search import BeamSearch, beam_batches
from launcher_scripts.engine.core.results import StepResult
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.core.sampler import Sampled, SamplingBatch
from launcher_scripts.engine.core.step_outputs import ContextResults, TokenChoice
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import (
    Bounds,
    Choice,
    PrefillPart,
    Prompt,
    RowStart,
    StepShape,
)
from launcher_scripts.engine.model.forward_context import Rows, StepGraphs
from launcher_scripts.engine.model.layers import Chunk
from launcher_scripts.engine.model.network import Network, PromptBatch
from launcher_scripts.engine.runner.graphs import bucket_tokens, row_buckets, token_buckets
from launcher_scripts.engine.runner.prompt_batch import (
    TOKEN_BUCKETS,
    Nowhere,
    PackedPrompts,
    Sizes,
    bucket_sizes,
    prompt_bucket,
    several_rows,
    unpacked,
)
from launcher_scripts.kernels.operands import VarlenBatch


class Prefill:
    """Runs prompts on one rank.

    Where steps are CUDA graphs, short prompts are filled up to a bucket and replayed too: launching
    the layers' kernels one by one takes the host longer than they run.
    """

    def __init__(
        self,
        network: Network,
        communicator: Communicator,
        states: RowStates,
        choice: TokenChoice,
        beams: BeamSearch,
        graphs: StepGraphs | None,
        device: torch.device,
    ) -> None:
        self._network = network
        self._communicator = communicator
        self._states = states
        self._choice = choice
        self._beams = beams
        self._device = device
        self._context = ContextResults(network, communicator, device)
        self._nowhere = Nowhere(network.cache.scratch, states.padding_slot)
        self._graphs = graphs if network.replays_prompts else None

    def mixes(self, rows: Sequence[RowStart]) -> bool:
        """Return whether rows may decode in the pass over these rows' prompts."""
        return self._network.replays_prompts and _alike(rows)

    def run(
        self,
        rows: Sequence[RowStart],
        parts: Sequence[PrefillPart],
        result: StepResult,
        decoding: Sequence[RowStart],
        bounds: Bounds,
    ) -> None:
        """Run the parts of the rows' prompts; prompts that end give their first tokens.

        decoding: rows that run one token in the same pass;  bounds: theirs
        """
        prompts = PackedPrompts(rows, parts, decoding, bounds)
        sizes = self._bucket(prompts)
        if self._graphs is None or sizes is None:
            self._launch(prompts, result)
        else:
            self._replay(self._graphs, prompts, sizes, result)

    def _bucket(self, prompts: PackedPrompts) -> Sizes | None:
        """Return the sizes to which a pass with a CUDA graph is padded; None if it is launched
        eagerly."""
        if self._graphs is None or not _alike(prompts.rows):
            return None
        return prompts.bucket(self._states.padding_slot)

    def logits(
        self, rows: Sequence[RowStart], parts: Sequence[PrefillPart], ids: Tensor
    ) -> Tensor | None:
        """Run the parts; logits [tokens, vocab] behind every token, on the last stage.

        ids: [tokens], on the device; those of the rows do not count
        """
        prompts = PackedPrompts(rows, parts, ids=ids)
        sizes = self._bucket(prompts)
        if self._graphs is None or sizes is None:
            hidden = self._hidden(prompts, prompts.sizes, drafts=True)
            return self._network.logits(hidden) if self._communicator.is_last_stage else None
        packed = prompts.to_device(self._device, self._nowhere, sizes)

        def step(packed: Tensor) -> Tensor | None:
            hidden = self._network.prefill(unpacked(packed, sizes, prompts.spans))
            return self._network.logits(hidden) if self._communicator.is_last_stage else None

        logits = self._graphs.run(("drafts", sizes), packed, step)
        return None if logits is None else logits[: prompts.tokens]

    def settle_drafts(self, counts: Tensor) -> None:
        """The first counts [R] tokens of the rows of the last `logits` are theirs."""
        self._network.settle_drafts(counts)

    def shapes_to_record(self) -> list[StepShape]:
        """The passes that requests may need, where they are CUDA graphs; short ones first."""
        if self._graphs is None:
            return []
        return [
            StepShape(several_rows(tokens) if several else 1, 0, 0, choice, prompt=tokens)
            for several in (False, True)
            for choice in Choice
            for tokens in TOKEN_BUCKETS
        ]

    def mixed_shapes_to_record(self, longest: int) -> list[StepShape]:
        """A short prompt beside each number of rows, of up to `longest` tokens, so that what all
        such passes need is compiled."""
        if self._graphs is None:
            return []
        shapes = [
            (prompt_bucket(1, 1, rows), bucket)
            for bucket in token_buckets(longest)
            for rows in row_buckets(self._states.padding_slot)
        ]
        return [
            StepShape(sizes.rows, bucket, 0, Choice.GREEDY, sizes.tokens, sizes.decoding)
            for sizes, bucket in shapes
            if sizes is not None
        ]

    def record(self, shape: StepShape, graphs: StepGraphs) -> None:
        """Have the graph of such a pass; it is tried out on nobody's tokens."""
        sizes = bucket_sizes(shape.prompt, shape.rows)
        sizes = sizes._replace(decoding=shape.decoding, lora=shape.lora)
        prompts = PackedPrompts([], [])
        packed = prompts.to_device(self._device, self._nowhere, sizes)
        graphs.record(*self._recorded(packed, sizes, prompts.spans, shape.own, shape.choice))

    def _recorded(
        self, packed: Tensor, sizes: Sizes, spans: VarlenBatch, longest: int, choice: Choice
    ) -> tuple[Hashable, Tensor, Callable[[Tensor], Sampled | Tensor | None]]:
        """Arguments of StepGraphs.run for a pass over a packed batch, which makes the tokens that
        follow or, where rows choose eagerly, the logits of the rows that get one; None but on the
        last stage.
        """

        def step(packed: Tensor) -> Sampled | Tensor | None:
            prompts = unpacked(packed, sizes, spans)
            hidden = self._forward(prompts, longest)
            if not self._communicator.is_last_stage:
                return None
            logits = self._network.logits(hidden[prompts.last])
            if choice == Choice.EAGER:
                return logits
            return self._choice.in_step(logits, prompts.finished, choice)

        return ("prompts", sizes, longest, choice), packed, step

    def _forward(self, prompts: PromptBatch, longest: int) -> Tensor:
        """The hidden states behind a pass, whose tokens are then in the cache."""
        states, slots = self._states, prompts.decoding
        decoding = None
        if slots.shape[0]:
            adapters = None if prompts.lora_adapters is None else states.lora_adapter[slots]
            rows = Rows(
                states.start[slots],
                states.length[slots],
                longest,
                lora_adapters=adapters,
                slots=slots,
            )
            decoding = states.token[slots], rows
        hidden = self._network.prefill(prompts, decoding)
        states.set_length(prompts.row_slots, prompts.lengths)
        if decoding is not None:
            states.advance(slots)
        return hidden

    def _replay(
        self, graphs: StepGraphs, prompts: PackedPrompts, sizes: Sizes, result: StepResult
    ) -> None:
        """The pass as a CUDA graph, up to the tokens or, where rows choose eagerly, the logits."""
        rows = prompts.going_on
        batch = SamplingBatch(rows, self._device)
        packed = prompts.packed(self._device, self._nowhere, sizes)
        longest = _bucketed(prompts.longest)
        outputs = graphs.run(*self._recorded(packed, sizes, prompts.spans, longest, batch.choice))
        if not rows:
            return
        if isinstance(outputs, Tensor):
            outputs = self._choice.chosen(outputs[: len(rows)], batch)
        self._choice.give(result, [row.slot for row in rows], outputs, batch)

    def _hidden(self, prompts: PackedPrompts, sizes: Sizes, *, drafts: bool = False) -> Tensor:
        """The hidden states [tokens, hidden] behind a pass that is launched kernel by kernel.

        sizes: what its rows that decode are filled up to;  drafts: see Chunk
        """
        chunks = tuple(
            Chunk(
                row.start,
                part.past,
                part.count,
                len(row.source),
                None if row.source else self.prompt_of(row),
                row.ia3_task,
                row.dropped,
                row.window,
                row.prompt_end,
                row.maximum,
                part.slot,
                part.saves,
                drafts,
            )
            for row, part in zip(prompts.rows, prompts.parts, strict=True)
        )
        packed = prompts.to_device(self._device, self._nowhere, sizes)
        batch = unpacked(packed, sizes, prompts.spans, chunks)
        return self._forward(batch, _bucketed(prompts.longest))

    def _launch(self, prompts: PackedPrompts, result: StepResult) -> None:
        sizes = prompts.sizes if self._graphs is None else prompts.padded(self._states.padding_slot)
        hidden, first = self._hidden(prompts, sizes), sizes.decoding
        self._context.add(hidden[first:], prompts.rows, prompts.parts, result)
        rows = dict(zip(prompts.places(first), prompts.going_on, strict=True))
        plain = {at: row for at, row in rows.items() if not row.beams}
        self._next_tokens(hidden, plain, result)
        self._first_beams(hidden, {at: row for at, row in rows.items() if row.beams}, result)

    def _next_tokens(
        self, hidden: Tensor, rows: Mapping[int, RowStart], result: StepResult
    ) -> None:
        """The next token of rows without beams; keys: their last tokens in hidden."""
        if not rows:
            return
        batch = SamplingBatch(list(rows.values()), self._device)
        sampled = self._choice.chosen(self._logits_at(hidden, list(rows)), batch)
        self._choice.give(result, [row.slot for row in rows.values()], sampled, batch)

    def _first_beams(
        self, hidden: Tensor, rows: Mapping[int, RowStart], result: StepResult
    ) -> None:
        """The first tokens of every hypothesis; see `_next_tokens`."""
        if not rows:
            return
        self._beams.start(rows.values())
        batches = beam_batches(rows.values(), self._device)
        order = {row.slot: index for index, row in enumerate(rows.values())}
        logits = self._logits_at(hidden, list(rows))
        if logits is not None:
            copies = [
                order[slot]
                for batch in batches
                for slot in batch.searches
                for _ in range(batch.shape.width)
            ]
            logits = logits[indices(copies, self._device)]
        longest = max(len(row.ids) for row in rows.values())
        result.beams += self._beams.step(logits, batches, longest, reorder=0)

    def _logits_at(self, hidden: Tensor, positions: list[int]) -> Tensor | None:
        """[len(places), vocab] on the last stage."""
        if not self._communicator.is_last_stage:
            return None
        return self._network.logits(hidden[indices(positions, self._device)])

    def prompt_of(self, row: RowStart) -> Prompt | None:
        """The row's prompt table where it is needed, on the first stage."""
        if not self._communicator.is_first_stage:
            return None
        if isinstance(row.prompt, Tensor):
            return row.prompt.to(self._device, non_blocking=True)
        return row.prompt


def _bucketed(longest: int) -> int:
    """The context that the kernels of rows which decode beside prompts are chosen for."""
    return bucket_tokens(longest) if longest else 0


def _alike(rows: Sequence[RowStart]) -> bool:
    """Return whether nothing about the rows but their numbers decides what is launched."""
    return not any(
        row.general or row.beams or row.prompt is not None or row.request.asks_of_prompt
        for row in rows
    )
