"""What rank 0 decides and every rank carries out: one plan per step."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_scripts.protocol import SamplingParameters


@dataclass(frozen=True)
class RowStart:
    """A row that joins: its place and everything that decides its tokens.

    slot:  index of the row's state on the device
    start: first cache token of the row's extent
    ids:   prompt, never empty (an empty one has become the start token)
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    end_id: int
    sampling: SamplingParameters
    bad_words: tuple[tuple[int, ...], ...] = ()
    return_log_probs: bool = False
    return_context_logits: bool = False


@dataclass(frozen=True)
class PrefillPart:
    """The next `count` prompt tokens of a row, after `past` that the cache already holds."""

    slot: int
    past: int
    count: int


@dataclass(frozen=True)
class Plan:
    """One step: rows that join, prompt tokens to run, rows to run one token further.

    longest bounds the tokens in the cache of the rows in `decode`, their new ones included.
    """

    starts: tuple[RowStart, ...] = ()
    prefill: tuple[PrefillPart, ...] = ()
    decode: tuple[int, ...] = ()
    longest: int = 0


@dataclass(frozen=True)
class Stop:
    """The engine is closing."""
