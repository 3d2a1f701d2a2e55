"""Statistics of an engine's rows, for monitoring."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from launcher_scripts.contract import metric_names as names
from launcher_scripts.engine.core.row import Row


class Sample(NamedTuple):
    """A value that only ever grows. labels: in the order of their names, the model's left out"""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Histogram:
    """Number of values in each bucket, and their sum."""

    def __init__(self, metric: names.MetricSpec) -> None:
        self._metric = metric
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` equal values."""
        self._counts[bisect_left(self._metric.buckets, value)] += times
        self._sum += value * times

    def samples(self) -> Iterator[Sample]:
        """As Prometheus has it: a bucket counts the values up to its bound, `le`.

        The counts of wider buckets come first: whoever adds to theirs in this order never shows a
        bucket with more in it than a wider one has.
        """
        bucket, total, count = self._metric.samples
        counts = list(self._counts)
        below = sum(counts)
        yield Sample(count, (), below)
        bounds = [*map(str, self._metric.buckets), "+Inf"]
        for bound, local in zip(reversed(bounds), reversed(counts), strict=True):
            yield Sample(bucket, (("le", bound),), below)
            below -= local
        yield Sample(total, (), self._sum)


class Statistics:
    """Written by the thread that steps alone; any may read. Times are time.perf_counter's.

    steps, step_rows: how many steps were launched, and the rows in all of them together
    """

    def __init__(self) -> None:
        self.steps = self.step_rows = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = 0
        self._draft_tokens = self._accepted_tokens = 0
        self._completed = {names.STOP: 0, names.LENGTH: 0}
        self._histograms = tuple(map(Histogram, names.HISTOGRAMS))
        (
            self._first_token,
            self._inter_token,
            self._request,
            self._queue,
            self._prefill,
            self._step_tokens,
        ) = self._histograms
        # When the newest tokens were seen, when those before, and how many rows had both.
        self._newest = self._before = 0.0
        self._rows_of_both = 0

    def admit(self, row: Row, now: float) -> None:
        """The row got its place, or another one after it had given that up."""
        if row.placed_at:
            return
        row.placed_at = now
        self._queue.observe(now - row.came_at)
        self._prompt_tokens += row.num_sent

    def find_prefix(self, tokens: int, cached: int) -> None:
        """A prompt of so many tokens began after those that were found in the cache."""
        self._prefix_queries += tokens
        self._prefix_hits += cached

    def preempt(self) -> None:
        """A row gave its place up."""
        self._preemptions += 1

    def draft(self, tokens: int) -> None:
        """A draft of so many tokens was tried."""
        self._draft_tokens += tokens

    def accept_drafted(self) -> None:
        """A token of a draft came."""
        self._accepted_tokens += 1

    def launch(self, rows: int, tokens: int) -> None:
        """A step of so many rows was launched, and computes so many tokens."""
        self.steps += 1
        self.step_rows += rows
        self._step_tokens.observe(tokens)

    def begin_apply(self) -> None:
        """The tokens of a step are coming."""
        self._before = self._newest
        self._rows_of_both = 0

    def tokens_are_here(self) -> float:
        """Record that tokens of some rows have arrived; returns the time, which is all of theirs.
        The decoding rows' come last."""
        self._newest = time.perf_counter()
        return self._newest

    def token(self, row: Row, now: float) -> None:
        """The row has a token more."""
        before, row.newest_at = row.newest_at, now
        self._generation_tokens += 1
        if not before:
            self._first_token.observe(now - row.came_at)
            self._prefill.observe(now - row.placed_at)
        elif before == self._before:  # most rows get a token in every step
            self._rows_of_both += 1
        else:
            self._inter_token.observe(now - before)

    def end_apply(self) -> None:
        """All rows have their tokens of the step."""
        if self._rows_of_both:
            self._inter_token.observe(self._newest - self._before, self._rows_of_both)
            self._rows_of_both = 0

    def end(self, row: Row, now: float) -> None:
        """The row is going to be answered; whoever gets the answer finds its tokens counted."""
        self.end_apply()
        self._completed[names.STOP if row.stopped else names.LENGTH] += 1
        self._request.observe(now - row.came_at)

    def samples(self) -> Iterator[Sample]:
        """Everything that was counted so far."""
        yield Sample(names.PROMPT_TOKENS.name, (), self._prompt_tokens)
        yield Sample(names.GENERATION_TOKENS.name, (), self._generation_tokens)
        yield Sample(names.PREEMPTIONS.name, (), self._preemptions)
        yield Sample(names.PREFIX_HITS.name, (), self._prefix_hits)
        yield Sample(names.PREFIX_QUERIES.name, (), self._prefix_queries)
        yield Sample(names.DRAFT_TOKENS.name, (), self._draft_tokens)
        yield Sample(names.ACCEPTED_TOKENS.name, (), self._accepted_tokens)
        for reason, count in self._completed.items():
            yield Sample(names.SUCCESS.name, (("finished_reason", reason),), count)
        for histogram in self._histograms:
            yield from histogram.samples()
