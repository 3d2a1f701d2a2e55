"""How many prompt tokens a step computes, and of which rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from launcher_scripts.engine.core.row import Row

# The fewest prompt tokens of a pass in which rows decode, or so many for each of those rows: with
# less, reading the weights costs more than the products with them.
MIN_MIXED_TOKENS = 512
TOKENS_PER_DECODING_ROW = 4
# Up to so many steps with the fewest tokens keep the times between tokens even: a 1.3B with 128
# clients got its tokens every 6.0 ms at worst (p99) with 512 prompt tokens a step, 8.0 with 1,024.
EVEN_STEPS = 2
# A prompt whose last tokens would need a step more has them in this one: so many, as a share.
OVERSHOOT = 0.25
# A pass that is too large for a CUDA graph takes the host milliseconds, so it has so many times the
# tokens of the largest graph at least.
LAUNCHED_SHARE = 1.5
# An estimate is the median of so many durations: it outlasts a step that recorded a graph. Passes
# over fewer tokens take about as long as over none.
SAMPLES = 9
MIN_SAMPLE_TOKENS = 256
# Before the step in flight ends, the host needs this time to plan and launch the next one, and the
# estimate of that end is wrong by such a share. Shorter steps are launched at once.
LAUNCH_SECONDS = 0.005
ESTIMATE_ERROR = 0.1
MIN_AWAITED_SECONDS = 0.03


class Limits(NamedTuple):
    """Prompt tokens of a step.

    tokens:     as many as fit the step's time
    max_tokens: so many where a prompt ends with them
    """

    tokens: int
    max_tokens: int


class PromptBudget:
    """Decides how many prompt tokens run in a step, by how long the last steps took.

    max_tokens:   most prompt tokens of one step
    recorded:     prompt tokens of the passes that are CUDA graphs, in which so many rows decode,
                  ascending; None: rows do not decode in passes over prompts
    target:       seconds that a step may take, so that rows which decode get their next tokens,
                  and new prompts their turn; 0: as long as max_tokens take
    one_by_one:   a pass takes one prompt, and its length does not depend on time
    """

    def __init__(
        self,
        max_tokens: int,
        recorded: Callable[[int], list[int]] | None = None,
        target: float = 0.0,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._max_tokens = max_tokens
        self._recorded = recorded
        self._target = 0.0 if one_by_one else target
        self._one_by_one = one_by_one
        self._decode_seconds: deque[float] = deque(maxlen=SAMPLES)
        self._seconds_per_token: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a step over so many prompt tokens took, with all that ran in it."""
        if tokens < MIN_SAMPLE_TOKENS:
            self._decode_seconds.append(seconds)
        else:
            prompt_seconds = max(seconds - self._base_seconds, seconds / 2)
            self._seconds_per_token.append(prompt_seconds / tokens)

    @property
    def _base_seconds(self) -> float:
        """Duration of a step without prompts; 0 before one was seen."""
        return median(self._decode_seconds) if self._decode_seconds else 0.0

    def limits(self, decoding: int, waiting: int) -> Limits:
        """Of a step in which so many rows decode, and so many prompt tokens wait."""
        if not self._target:
            return Limits(self._max_tokens, self._max_tokens)
        if decoding and waiting <= EVEN_STEPS * MIN_MIXED_TOKENS:
            budget = 0
        elif self._seconds_per_token:
            seconds = max(self._target - self._base_seconds * bool(decoding), self._target / 2)
            budget = int(seconds / median(self._seconds_per_token))
        else:
            budget = 0 if decoding else self._max_tokens
        budget = max(budget, MIN_MIXED_TOKENS, decoding * TOKENS_PER_DECODING_ROW)
        limit = int(budget * (1 + OVERSHOOT))
        if self._recorded is not None:
            sizes = self._recorded(decoding)
            if budget < sizes[-1] * LAUNCHED_SHARE:
                budget = max((sizes[0], *(size for size in sizes if size <= budget)))
                limit = max(size for size in sizes if size <= max(limit, budget))
        return Limits(min(budget, self._max_tokens), min(limit, self._max_tokens))

    def shares(self, rows: Sequence[Row], limits: Limits) -> Iterator[tuple[Row, int]]:
        """Rows, which are in the order they came, and how many tokens of their prompts run now.

        Half of the budget is for the prompt that came first, so that it ends; the rest for the
        shortest ones, so that none waits for a much longer one.
        """
        if not rows:
            return
        first, *others = rows[:1] if self._one_by_one else rows
        remaining = {row.slot: row.prefill_length - row.prefilled for row in rows}
        reserve = min(limits.tokens // 2, remaining[first.slot])
        left, counts = limits.tokens - reserve, {}
        for row in sorted(others, key=lambda row: remaining[row.slot]):
            counts[row.slot] = min(remaining[row.slot], left)
            left -= counts[row.slot]
        counts[first.slot] = min(remaining[first.slot], reserve + left)
        spare = limits.max_tokens - limits.tokens
        for row in (first, *others):
            count = counts[row.slot]
            rest = remaining[row.slot] - count
            if count and rest <= spare:
                count, spare = count + rest, spare - rest
            if count:
                yield row, count

    def spare_seconds(self, in_flight: Sequence[int], elapsed: float) -> float:
        """Time until the next step has to be launched for the device not to idle. A request that
        comes before then runs in that step instead of the one after it.

        in_flight: prompt tokens of the steps that were launched;  elapsed: seconds since the first
        of them began
        """
        if not self._target or not self._seconds_per_token:
            return 0.0
        seconds = sum(
            self._base_seconds + count * median(self._seconds_per_token)
            for count in in_flight
            if count >= MIN_SAMPLE_TOKENS
        )
        if seconds < MIN_AWAITED_SECONDS:
            return 0.0
        return seconds * (1 - ESTIMATE_ERROR) - LAUNCH_SECONDS - elapsed
