"""One rank at work: carries out plans on its weights, its cache and its rows' state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.beam_search import BeamSearch, beam_batches
from launcher_scripts.engine.communicator import Communicator
from launcher_scripts.engine.context_results import ContextResults
from launcher_scripts.engine.decode_batches import DecodeBatches
from launcher_scripts.engine.graphs import GraphCache, bucket_bounds, step_shapes
from launcher_scripts.engine.layers import Rows, Segment
from launcher_scripts.engine.learned_parts import Prompt
from launcher_scripts.engine.network import Encoded, Network
from launcher_scripts.engine.plan import Bounds, Plan, PrefillPart, RowStart, StepShape
from launcher_scripts.engine.results import EncodedRow, StepResult, TokenCopy
from launcher_scripts.engine.row_state import RowStates
from launcher_scripts.engine.sampler import Sampled, SamplingBatch, sample, sampling_batch
from launcher_scripts.models.learned_parts import learned_parts_of


class Runner:
    """Carries out plans. Every rank of an engine gets the same plans in the same order."""

    def __init__(
        self,
        decoder: Network,
        communicator: Communicator,
        slots: int,
        device: torch.device,
        longest: Bounds = Bounds(),
    ) -> None:
        """longest: what a decode step reads of one row at most, rarely exceeded"""
        self.decoder = decoder
        self._slots, self._longest = slots, longest
        self.communicator = communicator
        self.device = device
        self.states = RowStates(slots, decoder.cache.scratch, device)
        self._rows: dict[int, RowStart] = {}
        self._context = ContextResults(decoder, communicator, device)
        self.beams = BeamSearch(decoder.cache, communicator, self.states, decoder.config.vocab_size)
        self._graphs = GraphCache(communicator.progress) if device.type == "cuda" else None
        padded = None if self._graphs is None else slots
        self._batches = DecodeBatches(self._rows, padded, self.states.padding_slot, device)
        self._has_ia3 = learned_parts_of(decoder.config).ia3_num_tasks > 0

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Launch one step; on CUDA this returns before the device has finished."""
        result = StepResult()
        if plan.moves:
            self.decoder.cache.shift(plan.moves)
            self.states.slide(plan.moves)
        if plan.starts:
            self._rows.update({row.slot: row for row in plan.starts})
            self.states.join(plan.starts)
            self._batches.forget()
        self.communicator.progress.expect(*plan.size(self._rows))
        if plan.encode:
            self._encode(plan.encode, result)
        if plan.prefill:
            self._prefill(plan.prefill, result)
        if plan.beams:
            self._decode_with_beams(plan, result)
        elif plan.decode:
            self._decode(plan, result)
        for shape in plan.record:
            self._record(shape)
        return result

    def shapes_to_record(self) -> list[StepShape]:
        """The decode steps that requests may need, where steps are CUDA graphs."""
        return [] if self._graphs is None else step_shapes(self._longest, self._slots)

    def close(self) -> None:
        """Finish what was launched and leave the other ranks."""
        if self._graphs is not None:
            torch.cuda.synchronize(self.device)
            self._graphs.clear()
        self.communicator.close()

    def _encode(self, slots: Sequence[int], result: StepResult) -> None:
        rows = [self._rows[slot] for slot in slots]
        encoded = self._encoded(rows)
        if self.communicator.rank != 0:
            return
        hidden = encoded.hidden.split([len(row.source) for row in rows])
        for index, row in enumerate(rows):
            if row.return_hidden_state:
                attentions = encoded.attentions[index].cpu() if row.return_attentions else None
                result.encoded.append(EncodedRow(row.slot, hidden[index].cpu(), attentions))

    def _encoded(self, rows: Sequence[RowStart]) -> Encoded:
        asked = any(row.return_attentions for row in rows)
        step = self.decoder.encode_step
        if step is not None and not asked and all(row.prompt is None for row in rows):
            sources = [(row.source, row.source_start) for row in rows]
            padding = self.decoder.cache.scratch
            return Encoded(step.run(sources, padding, self.device, self._graphs))
        ids = [token for row in rows for token in row.source]
        segments = tuple(
            Segment(row.start, 0, 0, len(row.source), self._prompt(row), row.ia3_task)
            for row in rows
        )
        return self.decoder.encode(self._to_device(ids), segments, attentions=asked)

    def _prefill(self, parts: Sequence[PrefillPart], result: StepResult) -> None:
        rows = [self._rows[part.slot] for part in parts]
        ids = [
            token
            for row, part in zip(rows, parts, strict=True)
            for token in row.ids[part.past - row.past : part.past - row.past + part.count]
        ]
        segments = tuple(
            Segment(
                row.start,
                part.past,
                part.count,
                len(row.source),
                None if row.source else self._prompt(row),
                row.ia3_task,
                row.dropped,
                row.window,
            )
            for row, part in zip(rows, parts, strict=True)
        )
        hidden = self.decoder.prefill(self._to_device(ids), segments)
        self.states.set_length(
            self._to_device([part.slot for part in parts]),
            self._to_device([part.past + part.count for part in parts]),
        )
        self._context.add(hidden, rows, parts, result)
        ends = 0
        complete: dict[int, RowStart] = {}  # by the last token's place in the step
        for row, part in zip(rows, parts, strict=True):
            ends += part.count
            if part.past + part.count == row.past + len(row.ids):
                complete[ends - 1] = row
        self._first_tokens(
            hidden, {at: row for at, row in complete.items() if not row.beams}, result
        )
        self._first_beams(hidden, {at: row for at, row in complete.items() if row.beams}, result)

    def _first_tokens(
        self, hidden: Tensor, rows: Mapping[int, RowStart], result: StepResult
    ) -> None:
        """The first token of rows whose prompts have run; keys: their last tokens in hidden."""
        if not rows:
            return
        batch = sampling_batch(list(rows.values()), self.device)
        longest = max(row.past + len(row.ids) for row in rows.values())
        sampled = self._sample(self._logits_at(hidden, list(rows)), batch, longest)
        result.tokens.append(TokenCopy([row.slot for row in rows.values()], sampled))

    def _first_beams(
        self, hidden: Tensor, rows: Mapping[int, RowStart], result: StepResult
    ) -> None:
        """The first tokens of every hypothesis; see `_first_tokens`."""
        if not rows:
            return
        self.beams.start(rows.values())
        batches = beam_batches(rows.values(), self.device)
        order = {row.slot: index for index, row in enumerate(rows.values())}
        logits = self._logits_at(hidden, list(rows))
        if logits is not None:
            copies = [
                order[slot]
                for batch in batches
                for slot in batch.searches
                for _ in range(batch.width)
            ]
            logits = logits[self._to_device(copies)]
        longest = max(len(row.ids) for row in rows.values())
        result.beams += self.beams.step(logits, batches, longest, reorder=0)

    def _logits_at(self, hidden: Tensor, places: list[int]) -> Tensor | None:
        """[len(places), vocab] on the last stage."""
        if not self.communicator.is_last_stage:
            return None
        return self.decoder.logits(hidden[self._to_device(places)])

    def _decode(self, plan: Plan, result: StepResult) -> None:
        batch = self._batches.plain(plan.decode)
        if self._graphs is None:
            logits = self._forward_step(batch.slots, plan.bounds)
            sampled = self._sample(logits, batch, plan.bounds.own)
        else:
            sampled = self._decode_on_graph(batch, bucket_bounds(plan.bounds))
        result.tokens.append(TokenCopy(plan.decode, sampled))

    def _decode_on_graph(self, batch: SamplingBatch, bounds: Bounds) -> Sampled:
        """The step as a CUDA graph: if it is not, recorded when its shape comes a second time."""
        key = (batch.slots.shape[0], bounds, batch.greedy)
        step = self._recordable(batch, bounds, batch.greedy)
        found = self._graphs.run(key, batch.slots, step)
        return Sampled(found, None) if batch.greedy else self._sample(found, batch, bounds.own)

    def _record(self, shape: StepShape) -> None:
        """Have the graph of such steps; it is tried out on padding rows."""
        batch, bounds = self._batches.padding(shape.rows), Bounds(shape.own, shape.source)
        step = self._recordable(batch, bounds, shape.greedy)
        self._graphs.record((shape.rows, bounds, shape.greedy), batch.slots, step)

    def _recordable(
        self, batch: SamplingBatch, bounds: Bounds, greedy: bool
    ) -> Callable[[Tensor], Tensor | None]:
        """A step of rows in slots [B]: the ids of greedy ones, logits of others."""
        if greedy:
            return lambda slots: self.greedy_step(batch, slots, bounds)
        return lambda slots: self._forward_step(slots, bounds)

    def _decode_with_beams(self, plan: Plan, result: StepResult) -> None:
        mixed = self._batches.mixed(plan)
        if self._graphs is None:
            logits = self._forward_step(mixed.slots, plan.bounds)
        else:
            bounds = bucket_bounds(plan.bounds)
            logits = self._graphs.run(
                (mixed.slots.shape[0], bounds, False),
                mixed.slots,
                lambda slots: self._forward_step(slots, bounds),
            )
        plain = len(plan.decode)
        if mixed.plain is not None:
            own = None if logits is None else logits[:plain]
            sampled = self._sample(own, mixed.plain, plan.longest)
            result.tokens.append(TokenCopy(plan.decode, sampled))
        rest = None if logits is None else logits[plain:]
        result.beams += self.beams.step(rest, mixed.beams, plan.longest, plan.reorder)

    def greedy_step(self, batch: SamplingBatch, slots: Tensor, bounds: Bounds) -> Tensor:
        """One token of every row in slots [B], all greedy: the ids, int64 [B]."""
        step = self.decoder.step
        if step is None or bounds.windows:
            chosen = self._greedy(self._forward_step(slots, bounds))
            return self._finish(chosen, slots, batch).tokens
        columns = self.states.columns
        return step.greedy(step.forward(columns, slots, bounds), columns, slots)

    def _forward_step(self, slots: Tensor, bounds: Bounds) -> Tensor | None:
        """One token of every row through this stage; logits [B, vocab] on the last one."""
        states, step = self.states, self.decoder.step
        if step is not None and not bounds.windows:
            return step.logits(step.forward(states.columns, slots, bounds))
        start, length, positions = states.start[slots], states.length[slots], None
        if bounds.windows:
            positions = length + states.dropped[slots]
            outside = (length + 1 - states.window[slots]).clamp(min=0)
            start, length = start + outside, length - outside
        rows = Rows(
            start,
            length,
            bounds.own,
            states.source_length[slots] if bounds.source else None,
            bounds.source,
            states.ia3_task[slots] if self._has_ia3 else None,
            states.source_start[slots] if bounds.source else None,
            positions,
        )
        hidden = self.decoder.decode(states.token[slots], rows)
        states.advance(slots)
        return self.decoder.logits(hidden) if self.communicator.is_last_stage else None

    def _sample(self, logits: Tensor | None, batch: SamplingBatch, longest: int) -> Sampled:
        if logits is None:
            sampled = None
        elif batch.greedy:
            sampled = self._greedy(logits)
        else:
            sampled = sample(logits, batch, self.states, self.decoder.cache.ids, longest)
        return self._finish(sampled, batch.slots, batch)

    def _greedy(self, logits: Tensor | None) -> Sampled | None:
        if logits is None:
            return None
        return Sampled(self.decoder.kernels.argmax(logits), None)

    def _finish(self, sampled: Sampled | None, slots: Tensor, batch: SamplingBatch) -> Sampled:
        """The last stage's choice on every stage, kept as the rows' next tokens."""
        if sampled is None:
            rows = slots.shape[0]
            log_probs = torch.empty(2, rows, device=self.device) if batch.log_probs else None
            tokens = torch.empty(rows, dtype=torch.int64, device=self.device)
            sampled = Sampled(tokens, log_probs)
        self.communicator.from_last_stage(sampled.tokens)
        if sampled.log_probs is not None:
            self.communicator.from_last_stage(sampled.log_probs)
        self.states.token.index_copy_(0, slots, sampled.tokens)
        return sampled

    def _prompt(self, row: RowStart) -> Prompt | None:
        """The row's prompt table where it is needed, on the first stage."""
        if not self.communicator.is_first_stage:
            return None
        if isinstance(row.prompt, Tensor):
            return row.prompt.to(self.device, non_blocking=True)
        return row.prompt

    def _to_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)
