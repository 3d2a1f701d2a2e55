"""One rank at work: carries out plans on its weights, its cache and its rows' state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from launcher_scripts.engine.core.beam_search import BeamBatch, BeamSearch, Candidates, beam_batches
from launcher_scripts.engine.core.results import BeamCopy, EncodedRow, StepResult
from launcher_scripts.engine.core.row_state import RowStates, indices
from launcher_scripts.engine.core.sampler import Sampled, SamplingBatch
from launcher_scripts.engine.core.step_budget import DraftOptions
from launcher_scripts.engine.core.step_outputs import TokenChoice
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.messages.plan import Bounds, Choice, Plan, RowStart, StepShape
from launcher_scripts.engine.model.draft_head import DraftHead
from launcher_scripts.engine.model.forward_context import Rows, SourceRows, StepGraphs
from launcher_scripts.engine.model.layers import Chunk
from launcher_scripts.engine.model.network import Encoded, Network
from launcher_scripts.engine.runner.drafts import DraftModel, Drafts, Lanes
from launcher_scripts.engine.runner.graphs import (
    bucket_bounds,
    bucket_reorder,
    bucket_rows,
    step_shapes,
)
from launcher_scripts.engine.runner.prefill import Prefill
from launcher_scripts.engine.runner.prompt_batch import recorded_tokens
from launcher_scripts.models.adapters import adapters_of


@dataclass(frozen=True)
class MixedBatch:
    """A decode step with beam searches: all slots, those of `plain` first, padding last.

    alone: whether one batch of searches is all of it, whose kernels depend on slots alone; padding
           are whole searches then
    """

    slots: Tensor
    plain: SamplingBatch | None
    beams: tuple[BeamBatch, ...]
    alone: bool


class DecodeBatches:
    """The batches of the rows that ran since others joined.

    max_rows: where steps are CUDA graphs, to what buckets of rows are padded at most; else None
    fixed:    whether all steps are padded to max_rows, and rows choose tokens in one way as far as
              they can, so that a row's tokens do not depend on those beside
    """

    def __init__(
        self,
        rows: Mapping[int, RowStart],
        max_rows: int | None,
        padding_slot: int,
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self._rows = rows
        self._fixed = fixed
        self._least = Choice.SAMPLED if fixed else Choice.GREEDY
        self._max_rows = max_rows
        self._padding_slot = padding_slot
        self._device = device
        self._plain: dict[tuple[int, ...], SamplingBatch] = {}
        self._mixed: tuple[tuple[tuple[int, ...], ...], MixedBatch] | None = None

    def forget(self) -> None:
        """Other rows may be in the same slots."""
        self._plain.clear()
        self._mixed = None

    def plain(self, slots: tuple[int, ...]) -> SamplingBatch:
        """The sampling of rows without beam searches."""
        if slots not in self._plain:
            rows = [self._rows[slot] for slot in slots]
            rows += [_padding_row(self._padding_slot)] * self._padding(len(rows))
            self._plain[slots] = SamplingBatch(rows, self._device, self._least)
        return self._plain[slots]

    def mixed(self, plan: Plan) -> MixedBatch:
        """The sampling of the rows in `decode`, and the searches beside them."""
        key = (plan.decode, plan.beams)
        if self._mixed is None or self._mixed[0] != key:
            plain = [self._rows[slot] for slot in plan.decode]
            beams = beam_batches([self._rows[slot] for slot in plan.beams], self._device)
            count = len(plain) + sum(batch.slots.shape[0] for batch in beams)
            alike = len(beams) == 1 and beams[0].kernels_key is not None
            is_plain = alike and not plain and not self._fixed
            padding = self._padding(count, beams[0].shape.width if is_plain else 1)
            parts = [
                indices(plan.decode, self._device),
                *(batch.slots for batch in beams),
                indices([self._padding_slot] * padding, self._device),
            ]
            sampling = SamplingBatch(plain, self._device, self._least) if plain else None
            self._mixed = (key, MixedBatch(torch.cat(parts), sampling, beams, is_plain))
        return self._mixed[1]

    def _padding(self, rows: int, width: int = 1) -> int:
        """Return the number of rows that pad a step of searches of this width."""
        if self._max_rows is None:
            return 0
        if self._fixed:
            return self._max_rows - rows
        return bucket_rows(rows // width, self._max_rows // width) * width - rows


def _padding_row(slot: int) -> RowStart:
    return RowStart(slot=slot, start=0, ids=(0,), end_id=0)


FIRST_STEPS = 2  # shapes of decode steps that are recorded before those of inputs
FIRST_PROMPTS = 4  # shapes that are recorded before those of decode steps


class Runner:
    """Carries out plans. Every rank of an engine gets the same plans in the same order."""

    def __init__(
        self,
        decoder: Network,
        communicator: Communicator,
        slots: int,
        device: torch.device,
        longest: Bounds,
        graphs: StepGraphs | None,
        draft: Runner | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """longest: what a decode step reads of a row of the model's full length;  graphs: where
        steps are kept as such;  draft: the draft model's runner, on the same rank;
        deterministic: all steps have the same shape (see EngineSettings)
        """
        self.decoder = decoder
        self._slots, self._longest = slots, longest
        self.communicator = communicator
        self.device = device
        self.states = RowStates(slots, decoder.cache.scratch, device, decoder.cache.table)
        self._rows: dict[int, RowStart] = {}
        self.beams = BeamSearch(decoder, communicator, self.states)
        self._graphs = graphs
        self._deterministic = deterministic
        padded = slots if deterministic or self._graphs is not None else None
        self._batches = DecodeBatches(
            self._rows, padded, self.states.padding_slot, device, fixed=deterministic
        )
        self._choice = TokenChoice(decoder, communicator, self.states, device)
        self._prefill = Prefill(
            decoder, communicator, self.states, self._choice, self.beams, self._graphs, device
        )
        self._has_ia3 = adapters_of(decoder.config).ia3_num_tasks > 0
        self._has_lora = bool(adapters_of(decoder.config).loras.count)
        lanes = None
        if deterministic:
            lanes = Lanes(decoder, graphs, slots, self._bucketed(Bounds()))
        self.drafts = Drafts(self._prefill, self._choice, self.states, device, lanes)
        self.draft = draft
        self._draft_model: DraftModel | None = None
        if draft is not None:
            self._draft_model = DraftModel(draft.launch, draft.states, is_head=draft.is_head)
        self._unsettled: deque[StepResult] = deque()

    @property
    def recorded_tokens(self) -> Callable[[int], list[int]] | None:
        """See Scheduler."""
        mixes = self._mixes([])
        return partial(recorded_tokens, max_rows=self.states.padding_slot) if mixes else None

    @property
    def draft_options(self) -> DraftOptions:
        """See plan_drafts; a deterministic model tries drafts in the rows of a decode step."""
        return DraftOptions(
            self.draft is not None,
            self.draft is not None and self.draft.is_head,
            self._slots if self._deterministic else None,
        )

    @property
    def is_head(self) -> bool:
        """True if the network is a draft head."""
        return isinstance(self.decoder, DraftHead)

    def _mixes(self, prompts: Sequence[RowStart]) -> bool:
        """Return whether rows decode in the pass over such prompts."""
        return not self._deterministic and self._prefill.mixes(prompts)

    def execute(self, plan: Plan) -> StepResult:
        """Launch one step; on CUDA this returns before the device has finished."""
        self._rows.update({row.slot: row for row in plan.starts})
        self.communicator.progress.expect(*plan.size(self._rows))
        self._settle(plan.under_way)
        result = self.launch(plan)
        self._unsettled.append(result)
        return result

    def _settle(self, under_way: int) -> None:
        """Have the tokens of all steps but so many of the last ones."""
        while len(self._unsettled) > under_way:
            self._unsettled.popleft().settle()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepResult:
        """Do what is planned, as a part of a step that is under way."""
        result = StepResult()
        if plan.moves:
            self.states.slide(plan.moves)
        if plan.blocks:
            self.decoder.cache.assign(plan.blocks)
        self.decoder.cache.row_states.copy(plan.state_copies)
        if plan.starts:
            self._rows.update({row.slot: row for row in plan.starts})
            self.states.join(plan.starts)
            self._batches.forget()
        if plan.masks:
            self.states.set_masks(plan.masks)
        proposed = None
        if self._draft_model is not None:
            proposed = self._draft_model.propose(plan, self._rows)
        if plan.encode:
            self._encode(plan.encode, result)
        prompts = [self._rows[part.slot] for part in plan.prefill]
        mixed = not plan.beams and self._mixes(prompts)
        if plan.prefill:
            decoding = [self._rows[slot] for slot in plan.decode] if mixed else []
            bounds = plan.bounds if decoding else Bounds()
            self._prefill.run(prompts, plan.prefill, result, decoding, bounds)
        if plan.drafts:
            rows = [self._rows[draft.slot] for draft in plan.drafts]
            self.drafts.run(rows, plan.drafts, proposed, result)
        if plan.beams:
            self._decode_with_beams(plan, result)
        elif plan.decode and not (plan.prefill and mixed):
            self._decode(plan.decode, plan.bounds, result)
        if plan.apart:
            self._decode(plan.apart, plan.bounds._replace(general=True), result)
        if self._graphs is not None:
            for shape in plan.record:
                self._record(shape, self._graphs)
        if plan.prefill and self.device.type == "cuda":
            result.done = torch.cuda.Event()
            result.done.record(torch.cuda.current_stream(self.device))
        return result

    def shapes_to_record(self) -> list[StepShape]:
        """The steps that requests may need, where steps are CUDA graphs; likely ones first, and
        those of the draft model, which takes the likeliest tokens, last.
        """
        if self.draft is None:
            return self._shapes_to_record()
        drafting = [
            shape for shape in self.draft.shapes_to_record() if shape.choice == Choice.GREEDY
        ]
        return [
            *self._shapes_to_record(),
            *(replace(shape, draft_model=True) for shape in drafting),
        ]

    def _shapes_to_record(self) -> list[StepShape]:
        if self._graphs is None:
            return []
        steps = self._steps_to_record()
        if self.decoder.encode_step is not None:
            buckets = self.decoder.encode_step.buckets()
            sources = [StepShape(1, 0, 0, Choice.EAGER, prompt=tokens) for tokens in buckets]
            return [*steps[:FIRST_STEPS], *sources, *steps[FIRST_STEPS:]]
        prompts = self._prefill.shapes_to_record()
        if self._deterministic:
            return [*self._with_lora(prompt for prompt in prompts if prompt.rows == 1), *steps]
        first, later = prompts[:FIRST_PROMPTS], prompts[FIRST_PROMPTS:]
        mixed = self._prefill.mixed_shapes_to_record(self._longest.own)
        return self._with_lora([*first, *steps, *mixed, *later])

    def _with_lora(self, shapes: Iterable[StepShape]) -> list[StepShape]:
        """Return shapes with adapters, too, if the model has any."""
        both = (False, True) if self._has_lora else (False,)
        return [replace(shape, lora=lora) for shape in shapes for lora in both]

    def _steps_to_record(self) -> list[StepShape]:
        if not self._deterministic or not self._longest.own:
            return step_shapes(self._longest, self._slots)
        bounds = self._bucketed(Bounds())
        return [
            StepShape(self._slots, bounds.own, bounds.source, choice, lora=bounds.lora)
            for choice in (Choice.SAMPLED, Choice.PROCESSED, Choice.EAGER)
        ]

    def _bucketed(self, bounds: Bounds) -> Bounds:
        """Return the bounds that the kernels of a step of such rows are chosen for."""
        if self._deterministic:
            general = bounds.general or self._has_ia3
            bounds = self._longest._replace(general=general, lora=self._has_lora)
        elif self._graphs is None:
            return bounds
        return bucket_bounds(bounds)

    def close(self) -> None:
        """Finish what was launched and leave the other ranks."""
        self._settle(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.forget_graphs()
        self.communicator.close()

    def forget_graphs(self) -> None:
        """Have steps recorded again: their graphs know addresses, and hold the communicator."""
        for runner in (self, self.draft):
            if runner is not None and runner._graphs is not None:
                runner._graphs.clear()

    def _encode(self, slots: Sequence[int], result: StepResult) -> None:
        rows = [self._rows[slot] for slot in slots]
        encoded = self._encoded(rows)
        if self.communicator.rank != 0:
            return
        hidden = encoded.hidden.split([len(row.source) for row in rows])
        for index, row in enumerate(rows):
            if row.request.return_hidden_state:
                attentions = None
                if encoded.attentions is not None and row.request.return_attentions:
                    attentions = encoded.attentions[index].cpu()
                result.encoded.append(EncodedRow(row.slot, hidden[index].cpu(), attentions))

    def _encoded(self, rows: Sequence[RowStart]) -> Encoded:
        with_attentions = any(row.request.return_attentions for row in rows)
        step = self.decoder.encode_step
        if step is not None and not with_attentions and all(row.prompt is None for row in rows):
            sources = [(row.source, row.source_start) for row in rows]
            padding = self.decoder.cache.scratch
            return Encoded(step.run(sources, padding, self.device, self._graphs))
        ids = [token for row in rows for token in row.source]
        chunks = tuple(
            Chunk(row.start, 0, 0, len(row.source), self._prefill.prompt_of(row), row.ia3_task)
            for row in rows
        )
        return self.decoder.encode(indices(ids, self.device), chunks, attentions=with_attentions)

    def _decode(self, slots: tuple[int, ...], bounds: Bounds, result: StepResult) -> None:
        batch = self._batches.plain(slots)
        bounds = self._bucketed(bounds)
        if self._graphs is None:
            sampled = self._choice.chosen(self._forward_step(batch.slots, bounds), batch)
        else:
            sampled = self._decode_on_graph(self._graphs, batch, bounds)
        self._choice.give(result, slots, sampled, batch)

    def _decode_on_graph(
        self, graphs: StepGraphs, batch: SamplingBatch, bounds: Bounds
    ) -> Sampled | None:
        """The step as a CUDA graph: if it is not, recorded when its shape comes a second time."""
        outputs = graphs.run(*self._recorded(batch.host_slots, bounds, batch.choice))
        return self._choice.chosen(outputs, batch) if batch.choice == Choice.EAGER else outputs

    def _recorded(
        self, slots: Tensor, bounds: Bounds, choice: Choice
    ) -> tuple[Hashable, Tensor, Callable[[Tensor], Any]]:
        """Arguments of StepGraphs.run for steps that make tokens (see token_step) or, where rows
        choose eagerly, logits.
        """
        step: Callable[[Tensor], Any] = partial(self.token_step, bounds=bounds, choice=choice)
        if choice == Choice.EAGER:
            step = partial(self._forward_step, bounds=bounds)
        return (slots.shape[0], bounds, choice), slots, step

    def _record(self, shape: StepShape, graphs: StepGraphs) -> None:
        """Have the graph of such steps; it is tried out on padding rows."""
        if shape.draft_model and self.draft is not None:
            self.draft.launch(Plan(record=(replace(shape, draft_model=False),)))
            return
        if shape.prompt and self.decoder.encode_step is not None:
            padding = self.decoder.cache.scratch
            self.decoder.encode_step.record(shape.prompt, padding, self.device, graphs)
            return
        if shape.prompt:
            self._prefill.record(shape, graphs)
            return
        bounds = Bounds(shape.own, shape.source, lora=shape.lora)
        slots = indices([self.states.padding_slot] * shape.rows, self.device)
        graphs.record(*self._recorded(slots, bounds, shape.choice))

    def _decode_with_beams(self, plan: Plan, result: StepResult) -> None:
        mixed = self._batches.mixed(plan)
        general = any(self._rows[slot].general for slot in plan.beams)
        bounds = self._bucketed(plan.bounds._replace(general=general))
        if self._graphs is None:
            logits = self._forward_step(mixed.slots, bounds)
        elif mixed.alone:
            result.beams += self._beams_on_graph(self._graphs, mixed, bounds, plan.reorder)
            return
        else:
            logits = self._graphs.run(*self._recorded(mixed.slots, bounds, Choice.EAGER))
        plain = len(plan.decode)
        if mixed.plain is not None:
            plain_logits = None if logits is None else logits[:plain]
            sampled = self._choice.chosen(plain_logits, mixed.plain)
            self._choice.give(result, plan.decode, sampled, mixed.plain)
        beam_logits = None if logits is None else logits[plain:]
        result.beams += self.beams.step(beam_logits, mixed.beams, plan.longest, plan.reorder)

    def _beams_on_graph(
        self, graphs: StepGraphs, mixed: MixedBatch, bounds: Bounds, reorder: int
    ) -> list[BeamCopy]:
        """A step of nothing but searches of one kind as a CUDA graph, with their ranking."""
        (batch,) = mixed.beams
        reorder = bucket_reorder(reorder)
        key = (mixed.slots.shape[0], bounds, batch.kernels_key, reorder)
        step = partial(self.beam_step, batch=batch, bounds=bounds, reorder=reorder)
        return self.beams.copies(batch, graphs.run(key, mixed.slots, step))

    def beam_step(
        self, slots: Tensor, batch: BeamBatch, bounds: Bounds, reorder: int
    ) -> Candidates:
        """One token of every hypothesis in slots [B], and which of them go on; see BeamSearch."""
        logits = self._forward_step(slots, bounds)
        return self.beams.go_on(logits, batch.on(slots), bounds.own, reorder)

    def token_step(self, slots: Tensor, bounds: Bounds, choice: Choice) -> Sampled | None:
        """One token of every row in slots [B], not chosen eagerly; None but on the last stage."""
        step = self.decoder.step
        if choice == Choice.GREEDY and step is not None and not bounds.general:
            columns = self.states.columns
            hidden = step.forward(columns, slots, bounds, self._lora_adapters(slots, bounds))
            if not self.communicator.is_last_stage:
                return None
            return self._choice.arriving(Sampled(step.greedy(hidden, columns, slots)), slots)
        logits = self._forward_step(slots, bounds)
        return None if logits is None else self._choice.in_step(logits, slots, choice)

    def _forward_step(self, slots: Tensor, bounds: Bounds) -> Tensor | None:
        """One token of every row through this stage; logits [B, vocab] on the last one."""
        states, step = self.states, self.decoder.step
        adapters = self._lora_adapters(slots, bounds)
        if step is not None and not bounds.general:
            x = step.forward(states.columns, slots, bounds, adapters)
            return step.logits(x) if self.communicator.is_last_stage else None
        start, length, positions = states.start[slots], states.length[slots], None
        if bounds.general:
            positions = length + states.dropped[slots]
            outside = (length + 1 - states.window[slots]).clamp(min=0)
            start, length = start + outside, length - outside
        source = None
        if bounds.source:
            sources = states.source_start[slots], states.source_length[slots]
            source = SourceRows(*sources, bounds.source)
        rows = Rows(
            start,
            length,
            bounds.own,
            source,
            states.ia3_task[slots] if self._has_ia3 else None,
            positions,
            adapters,
            states.maximum[slots],
            slots,
        )
        hidden = self.decoder.decode(states.token[slots], rows)
        states.advance(slots)
        return self.decoder.logits(hidden) if self.communicator.is_last_stage else None

    def _lora_adapters(self, slots: Tensor, bounds: Bounds) -> Tensor | None:
        """The LoRA adapters of the rows in slots [B], where any row of the step has one."""
        return self.states.lora_adapter[slots] if bounds.lora else None
