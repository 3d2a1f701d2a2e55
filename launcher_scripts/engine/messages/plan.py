"""The plan of a step, which rank 0 makes and every rank carries out."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.messages.message import Message, Record
from launcher_scripts.kernels.operands import MAX_LISTED

# The last row of every IA3 table: factors of one, for rows without a task.
NO_TASK = -1
# A row's prompt table: the number of a loaded one, or one of its own, [virtual tokens, hidden].
Prompt = int | Tensor


class Choice(IntEnum):
    """Sampling of a step's rows; work that one of them needs is done for all.

    GREEDY: the likeliest token;  SAMPLED: by temperature, top-k, top-p and min-p;
    PROCESSED: as SAMPLED, after biases, penalties, bad words, minimum lengths and n-grams;
    EAGER: outside of CUDA graphs, which leave logits: rows with a grammar, with lists that are too
    long for their columns, or with the model's log-probabilities; and beam searches, but for steps
    of nothing else (see MixedBatch.alone)
    """

    GREEDY = 0
    SAMPLED = 1
    PROCESSED = 2
    EAGER = 3


class RowStart(Record, frozen=True, dict=True):
    """A row that joins: its place and everything that decides its tokens.

    slot:   index of the row's state on the device
    start:  first address of the row's prompt and what it generates
    ids:    prompt, never empty (an empty one has become the start token); of a model with an
            encoder what the decoder is given
    request: what the row asks for and how it chooses its tokens, without what other fields
            have: its ids, its grammar and its own prompt table
    source: what the encoder reads, if there is one; its addresses lie right before `start`
    prompt_embedding: [virtual tokens, hidden], the row's own table
    beams:  slots of the hypotheses of a beam search, `slot` first; none without one
    guided: a mask of what may come is set for each of the row's tokens
    stride: most cache tokens of each hypothesis
    spacing: addresses from one slot to the next
    generated: how many of the ids, the last ones, the row has generated in a place it had before
    past:   tokens of the row's session in the cache already, from `start` on;  dropped: tokens of
            it that are no longer there
    window: how many of the last tokens attention covers; 0: all
    general: whether the row needs the general path, for its window or for IA3
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    end_id: int
    request: GenerateRequest = GenerateRequest((), 0)
    guided: bool = False
    source: tuple[int, ...] = ()
    prompt_embedding: Tensor | None = None
    beams: tuple[int, ...] = ()
    stride: int = 0
    spacing: int = 0
    generated: int = 0
    past: int = 0
    dropped: int = 0
    window: int = 0
    general: bool = False

    @property
    def prompt(self) -> Prompt | None:
        """The table of the row's virtual tokens, which are negative ids: its own wins over the
        number of a loaded one.
        """
        return self.request.prompt_task if self.prompt_embedding is None else self.prompt_embedding

    @property
    def ia3_task(self) -> int:
        return NO_TASK if self.request.ia3_task is None else self.request.ia3_task

    @property
    def lora_adapter(self) -> int:
        return NO_TASK if self.request.lora_adapter is None else self.request.lora_adapter

    @cached_property
    def fits_columns(self) -> bool:
        """Return whether the columns of row_state.py have room for the row's lists."""
        words = sum(map(len, self.request.bad_words))
        return max(words, len(self.request.logit_bias)) <= MAX_LISTED

    @cached_property
    def choice(self) -> Choice:
        """The simplest way in which the row can choose its tokens."""
        request, sampling = self.request, self.request.sampling
        if self.beams or self.guided or request.num_log_probs >= 0 or not self.fits_columns:
            return Choice.EAGER
        lists = request.bad_words or request.logit_bias
        if lists or sampling.penalizes or sampling.min_length or sampling.no_repeat_ngram_size:
            return Choice.PROCESSED
        draws = sampling.top_k > 1 or (sampling.top_k == 0 and sampling.top_p > 0)
        return Choice.SAMPLED if draws or request.return_log_probs else Choice.GREEDY

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Slot and first address of the row, or of every hypothesis."""
        slots = self.beams or (self.slot,)
        return tuple((slot, self.start + (slot - self.slot) * self.spacing) for slot in slots)

    @property
    def source_start(self) -> int:
        return self.start - len(self.source)

    @property
    def prompt_end(self) -> int:
        """The position after the prompt."""
        return self.dropped + self.past + len(self.ids)

    @property
    def maximum(self) -> int:
        """Maximum number of positions of the row."""
        return self.dropped + self.past + self.stride


class PrefillPart(Record, frozen=True):
    """The next `count` prompt tokens of a row, after `past` that the cache already holds.

    saves: how many tokens of the row its states are kept behind, ascending, and in which snapshots
    """

    slot: int
    past: int
    count: int
    saves: tuple[tuple[int, int], ...] = ()


class Draft(Record, frozen=True):
    """Tokens of a row that run in one pass: its last one, and those that may follow it.

    past:     cache tokens of the row before them
    ids:      those that are known when the step is planned
    proposed: how many more follow, which the row's proposal in the same step brings
    reread:   the draft model reads them again, those that come
    """

    slot: int
    past: int
    ids: tuple[int, ...]
    proposed: int = 0
    reread: bool = False

    @property
    def tokens(self) -> int:
        """Number of running rows."""
        return len(self.ids) + self.proposed

    @property
    def foretold(self) -> int:
        """Maximum number of tokens after the last one."""
        return self.tokens - 1


class Proposal(Record, frozen=True):
    """The draft model's work for a row: it reads on, and proposes `count` tokens after that.

    past: tokens of the row in the draft model's cache, at the places that they have in the model's
    ids:  the row's tokens behind them, never empty
    """

    slot: int
    past: int
    ids: tuple[int, ...]
    count: int


def first_address(slot: int, capacity: int) -> int:
    """Return the address of the first token of a row that is not its encoder's input, whose
    addresses lie right before. capacity: of the cache, in tokens
    """
    return (2 * slot + 1) * capacity


class Move(Record, frozen=True):
    """The first `by` tokens of a session have left the cache.  slot: of the row that runs"""

    slot: int
    by: int


class AssignedBlocks(Record, frozen=True):
    """Blocks of a row, from its block `first` on; those before 0 are of its encoder's input."""

    slot: int
    first: int
    blocks: tuple[int, ...]


class StateCopy(Record, frozen=True):
    """The states of slot `source` that do not depend on a row's length go to slot `target`: to a
    snapshot, or from one.
    """

    source: int
    target: int


class TokenMask(NamedTuple):
    """Allowed next ids of a guided row; words as Guide.mask gives them."""

    slot: int
    words: bytes


class Bounds(NamedTuple):
    """The most cache tokens of any row in a step.

    own:    prompt and generated tokens, the new one included
    source: the encoder's input; 0 without an encoder

    general: whether the step takes the general path, for rows that ask for it
    lora:    whether any row has a LoRA adapter
    """

    own: int = 0
    source: int = 0
    general: bool = False
    lora: bool = False


class StepShape(Record, frozen=True):
    """Properties that the kernels of a decode step depend on: number of rows, the buckets of its
    bounds (see graphs.py), and sampling.

    prompt: of a pass over prompts instead, the bucket of its tokens (see prompt_batch.py); where
            there is an encoder, of its pass over one input (see encode_step.py)
    decoding: of a pass over prompts, how many rows decode in it
    lora:   whether any row has a LoRA adapter
    draft_model: whether it is a step of the draft model
    """

    rows: int
    own: int
    source: int
    choice: Choice
    prompt: int = 0
    decoding: int = 0
    lora: bool = False
    draft_model: bool = False


class Plan(Message, frozen=True):
    """One step: rows that join, that are encoded, whose prompts run on, that run one token further,
    or with a draft of several.

    beams are the first slots of the beam searches of which every hypothesis runs one token further,
    beside the rows in `decode`. reorder bounds how many of the last tokens in the cache may differ
    between hypotheses of the searches that go on after the step. moves come before everything else,
    then the rows' new blocks, and the copies of states, in order.
    apart: rows that run one token further, too, but by the general path (see RowStart.general).
    lora: whether any row that runs one token further has a LoRA adapter. longest and
    longest_source bound the cache tokens of all of them: prompt and generated ones, the new one
    included; and those of the encoder's input, where there is one.

    masks: of the guided rows that get a token in the step. proposals: of the draft model, in the
    order of the drafts that they bring tokens for; those that bring none only read.

    record: decode steps that are recorded for later; such a plan has nothing else.

    under_way: how many of the steps before this one may still be on their way through the pipeline
    stages when it begins; none of its rows gets a token in those.
    """

    starts: tuple[RowStart, ...] = ()
    encode: tuple[int, ...] = ()
    prefill: tuple[PrefillPart, ...] = ()
    decode: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    drafts: tuple[Draft, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    beams: tuple[int, ...] = ()
    reorder: int = 0
    longest: int = 0
    longest_source: int = 0
    moves: tuple[Move, ...] = ()
    blocks: tuple[AssignedBlocks, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    lora: bool = False
    masks: tuple[TokenMask, ...] = ()
    record: tuple[StepShape, ...] = ()
    under_way: int = 0

    def size(self, rows: Mapping[int, RowStart]) -> tuple[tuple[bool, ...], int]:
        """Return the kinds of work of the step, and its number of tokens; rows: by their slots."""
        copied = self.moves or self.blocks or self.state_copies
        kinds = (
            copied,
            self.encode,
            self.prefill,
            self.decode or self.apart,
            self.drafts,
            self.proposals,
            self.beams,
            self.record,
        )
        tokens = sum(part.count for part in self.prefill) + len(self.decode) + len(self.apart)
        tokens += sum(draft.tokens for draft in self.drafts)
        tokens += sum(len(proposal.ids) + proposal.count for proposal in self.proposals)
        tokens += sum(len(rows[slot].source) for slot in self.encode)
        tokens += sum(len(rows[slot].beams) for slot in self.beams)
        tokens += sum(shape.prompt or shape.rows for shape in self.record)
        return tuple(map(bool, kinds)), tokens

    @property
    def bounds(self) -> Bounds:
        """Bounds of all rows but those in `apart`."""
        return Bounds(self.longest, self.longest_source, lora=self.lora)
