"""The rows in flight as the device sees them: one column per slot, gathered by index each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher_scripts.engine.messages.plan import NO_TASK, Move, RowStart, TokenMask
from launcher_scripts.kernels.operands import MAX_LISTED, BlockTable, RowColumns

NO_TOKEN = -1
NEVER = -1e9  # added to log-probabilities
NO_WINDOW = 1 << 40  # longer than any row


class RowStates:
    """State of `slots` rows, and of one more slot that padding rows of a step use.

    Every attribute is a vector [slots + 1]. token is the last id chosen, not yet in the cache;
    length counts the row's tokens in the cache; start is its first address. source_length
    counts the tokens of the encoder's input, from source_start on; ia3_task is the row of the IA3
    factors, lora_adapter the number of a LoRA adapter or NO_TASK. dropped counts the tokens of a
    session that have left its blocks, and window is how many of the last ones attention covers;
    maximum is how many positions the row may come to have.
    beam_score is a hypothesis's cumulative log-probability. masks, int32 [slots + 1, words], has a
    bit for every id that may come next in a guided row. SamplingColumns says what the lists are.
    """

    token: Tensor
    length: Tensor
    start: Tensor
    prompt_length: Tensor
    source_start: Tensor
    source_length: Tensor
    ia3_task: Tensor
    lora_adapter: Tensor
    seed: Tensor
    end_id: Tensor
    min_length: Tensor
    top_k: Tensor
    no_repeat_ngram_size: Tensor
    bias_count: Tensor
    word_count: Tensor
    dropped: Tensor
    window: Tensor
    maximum: Tensor
    reset_id: Tensor
    temperature: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    output_presence_penalty: Tensor
    min_p: Tensor
    top_p: Tensor
    initial_top_p: Tensor
    top_p_decay: Tensor
    top_p_min: Tensor
    beam_score: Tensor
    masks: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    word_ids: Tensor
    word_lengths: Tensor

    def __init__(
        self, slots: int, scratch: int, device: torch.device, table: BlockTable | None = None
    ) -> None:
        self.padding_slot = slots
        self.table = table
        self.device = device
        some = RowStart(slot=slots, start=scratch, ids=(0,), end_id=0)
        integers, floats = _integers(some, scratch), _floats(some, slots)
        self._integers = torch.zeros(len(integers), slots + 1, dtype=torch.int64, device=device)
        self._floats = torch.ones(len(floats), slots + 1, device=device)
        columns = (*self._integers, *self._floats)
        for name, column in zip((*integers, *floats), columns, strict=True):
            setattr(self, name, column)
        self.start[slots] = self.source_start[slots] = scratch
        self.top_p[slots] = 0.0  # padding rows take the likeliest token
        self.lora_adapter[slots] = NO_TASK
        self.window[slots] = NO_WINDOW
        self.masks = torch.zeros(slots + 1, 0, dtype=torch.int32, device=device)
        lists = torch.zeros(3, slots + 1, MAX_LISTED, dtype=torch.int32, device=device)
        self.bias_ids, self.word_ids, self.word_lengths = lists
        self.bias_values = torch.zeros(slots + 1, MAX_LISTED, device=device)

    @property
    def columns(self) -> RowColumns:
        """Return the columns that a decode step begins with."""
        return RowColumns(
            self.token, self.start, self.length, self.source_start, self.source_length, self.table
        )

    def join(self, rows: Sequence[RowStart]) -> None:
        """Set the state of rows whose prompts are about to run, and of all their hypotheses."""
        targets = [(row, slot, start) for row in rows for slot, start in row.places]
        integers = torch.tensor(
            [[slot, *_integers(row, start).values()] for row, slot, start in targets],
            dtype=torch.int64,
        ).to(self.device, non_blocking=True)
        floats = torch.tensor([[*_floats(row, slot).values()] for row, slot, _ in targets])
        slots = integers[:, 0]
        self._integers.index_copy_(1, slots, integers[:, 1:].t())
        self._floats.index_copy_(1, slots, floats.to(self.device, non_blocking=True).t())
        self._set_lists([row for row in rows if not row.beams and row.fits_columns])

    def _set_lists(self, rows: Sequence[RowStart]) -> None:
        """Set the lists of all rows that have any; the counts say how many entries belong to a
        row."""
        rows = [row for row in rows if row.request.logit_bias or row.request.bad_words]
        if not rows:
            return
        slots = indices([row.slot for row in rows], self.device)
        biases = [row.request.logit_bias for row in rows]
        words = [row.request.bad_words for row in rows]
        for column, lists in (
            (self.bias_ids, [[token for token, _ in row_list] for row_list in biases]),
            (self.bias_values, [[value for _, value in row_list] for row_list in biases]),
            (self.word_ids, [[token for word in row_list for token in word] for row_list in words]),
            (
                self.word_lengths,
                [[size for word in row_list for size in _ends(word)] for row_list in words],
            ),
        ):
            filled = torch.tensor(
                [[*row_list, *[0] * (MAX_LISTED - len(row_list))] for row_list in lists]
            )
            column[slots] = filled.to(column.dtype).to(self.device, non_blocking=True)

    def set_masks(self, masks: Sequence[TokenMask]) -> None:
        """Set the masks of allowed next tokens of these rows; all masks of a model are of one
        size."""
        slots = indices([mask.slot for mask in masks], self.device)
        words = torch.frombuffer(
            bytearray(b"".join(mask.words for mask in masks)), dtype=torch.int32
        ).view(len(masks), -1)
        if not self.masks.shape[1]:
            self.masks = self.masks.new_zeros(self.masks.shape[0], words.shape[1])
        self.masks.index_copy_(0, slots, words.to(self.device, non_blocking=True))

    def slide(self, moves: Sequence[Move]) -> None:
        """The first tokens of these rows have left the cache."""
        slots = indices([move.slot for move in moves], self.device)
        by = indices([move.by for move in moves], self.device)
        self.length.index_add_(0, slots, by, alpha=-1)
        self.prompt_length.index_add_(0, slots, by, alpha=-1)
        self.dropped.index_add_(0, slots, by)

    def set_length(self, slots: Tensor, lengths: Tensor) -> None:
        """The cache now holds `lengths` tokens of the rows in `slots`."""
        self.length.index_copy_(0, slots, lengths)

    def advance(self, slots: Tensor) -> None:
        """One more token of each row is in the cache; padding rows stay empty."""
        self.length.index_add_(0, slots, (slots != self.padding_slot).long())


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _ends(word: Sequence[int]) -> list[int]:
    """At the end of a word its length, 0 before."""
    return [*[0] * (len(word) - 1), len(word)]


def _integers(row: RowStart, start: int) -> dict[str, int]:
    """Return the integer columns of a row or a hypothesis from address `start` on."""
    sampling, listed = row.request.sampling, row.fits_columns
    reset = NO_TOKEN if sampling.top_p_reset_id is None else sampling.top_p_reset_id
    return {
        "token": row.ids[0] if len(row.ids) == 1 else NO_TOKEN,
        "length": row.past,
        "start": start,
        "prompt_length": row.past + len(row.ids) - row.generated,
        "source_start": row.source_start,
        "source_length": len(row.source),
        "ia3_task": row.ia3_task,
        "lora_adapter": row.lora_adapter,
        "seed": _signed(sampling.random_seed),
        "end_id": row.end_id,
        "min_length": sampling.min_length,
        "top_k": sampling.top_k,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "bias_count": len(row.request.logit_bias) if listed else 0,
        "word_count": sum(map(len, row.request.bad_words)) if listed else 0,
        "dropped": row.dropped,
        "window": row.window or NO_WINDOW,
        "maximum": row.maximum,
        "reset_id": reset,
    }


def _floats(row: RowStart, slot: int) -> dict[str, float]:
    """Return the float columns; only the first hypothesis counts until the search has made
    others.
    """
    sampling = row.request.sampling
    return {
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "output_presence_penalty": sampling.output_presence_penalty,
        "min_p": sampling.min_p,
        "top_p": sampling.top_p,
        "initial_top_p": sampling.top_p,
        "top_p_decay": sampling.top_p_decay,
        "top_p_min": sampling.top_p_min,
        "beam_score": 0.0 if slot == row.slot else NEVER,
    }


def _signed(seed: int) -> int:
    """A 64-bit pattern as the signed integer torch has."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
