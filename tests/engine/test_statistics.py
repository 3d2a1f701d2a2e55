"""What the engine counts, against the answers that it gave and times that the test gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.core.statistics import Histogram, Statistics
from launcher_scripts.engine.engine import Engine
from tests.engine import small_t5
from tests.engine.small_models import engine_for, random_tensors, small_config

CONFIG = small_config(end_id=67, max_positions=200)


def values(statistics: Statistics, metric: names.MetricSpec) -> dict[str, float]:
    """A metric's values by what its labels say; of a histogram its count and sum."""
    found = {}
    for sample in statistics.samples():
        if sample.name in metric.samples and not sample.name.endswith("_bucket"):
            label = sample.labels[0][1] if sample.labels else sample.name.removeprefix(metric.name)
            found[label] = sample.value
    return found


def buckets(histogram: Histogram) -> dict[float, float]:
    """How many values lie in each bucket and those below it, by its bound."""
    found = {
        float(sample.labels[0][1]): sample.value for sample in histogram.samples() if sample.labels
    }
    return dict(sorted(found.items()))


def test_a_bucket_holds_what_is_no_more_than_its_bound() -> None:
    metric = names.MetricSpec("x", names.HISTOGRAM, "", buckets=(0.5, 1.0, 8.0))
    histogram = Histogram(metric)
    for value, times in ((0.25, 1), (0.5, 2), (0.75, 1), (8.0, 3), (9.0, 1)):
        histogram.observe(value, times)
    assert buckets(histogram) == {0.5: 3, 1.0: 4, 8.0: 7, math.inf: 8}
    shown = {sample.name: sample.value for sample in histogram.samples()}
    assert (shown["x_count"], shown["x_sum"]) == (8, 0.25 + 2 * 0.5 + 0.75 + 3 * 8 + 9)


def test_wider_buckets_are_shown_first() -> None:
    """So nobody sees one with less in it than a narrower one."""
    order = [s.labels[0][1] for s in Histogram(names.FIRST_TOKEN).samples() if s.labels]
    assert order[0] == "+Inf"
    assert list(map(float, order)) == sorted(map(float, order), reverse=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; its only element is the time, in seconds."""
    now = [100.0]
    monkeypatch.setattr("launcher_scripts.engine.core.scheduler.time.perf_counter", lambda: now[0])
    return now


class Step(StepResult):
    """A token of each of the rows in `slots`."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        super().__init__()
        self._slots = slots

    def read(self) -> Iterator[list[TokenResult]]:
        yield [TokenResult(slot, 1, None) for slot in self._slots]


def row(output_len: int, came_at: float) -> Row:
    request = GenerateRequest((1, 2, 3), output_len)
    return Row(request, Future(), request.input_ids, end_id=5, came_at=came_at)


def test_times_are_those_of_the_rows(clock: list[float]) -> None:
    """One place: the second row comes with the first, and waits until that has ended."""
    statistics = Statistics()
    scheduler = Scheduler(1, cache_tokens=100, prefill_tokens=50, statistics=statistics)
    for length in (3, 1):
        scheduler.add(row(length, clock[0]))
    for seconds in (1.0, 0.25, 0.5, 2.0):  # the first row's three tokens, then the second's one
        plan = scheduler.plan()
        assert plan is not None
        clock[0] += seconds
        scheduler.apply(Step((0,)))
    assert scheduler.plan() is None
    expected = {
        names.QUEUE: (0.0, 1.75),
        names.PREFILL: (1.0, 2.0),
        names.FIRST_TOKEN: (1.0, 3.75),
        names.INTER_TOKEN: (0.25, 0.5),
        names.REQUEST: (1.75, 3.75),
        names.STEP_TOKENS: (3, 1, 1, 3),
    }
    for metric, seen in expected.items():
        assert values(statistics, metric) == {"_count": len(seen), "_sum": sum(seen)}, metric.name
    assert (statistics.steps, statistics.step_rows) == (4, 4)


def test_rows_of_one_step_share_its_time(clock: list[float]) -> None:
    statistics = Statistics()
    scheduler = Scheduler(4, cache_tokens=100, prefill_tokens=50, statistics=statistics)
    for length in (2, 3, 3):
        scheduler.add(row(length, clock[0]))
    for slots in ((0, 1, 2), (0, 1, 2), (1, 2)):
        scheduler.plan()
        clock[0] += 0.5
        scheduler.apply(Step(slots))
    assert values(statistics, names.INTER_TOKEN) == {"_count": 5, "_sum": 2.5}
    assert values(statistics, names.FIRST_TOKEN) == {"_count": 3, "_sum": 1.5}


def test_all_tokens_of_a_row_are_counted_when_it_is_answered(clock: list[float]) -> None:
    statistics = Statistics()
    scheduler = Scheduler(4, cache_tokens=100, prefill_tokens=50, statistics=statistics)
    seen = []
    for length in (2, 3):
        waiting = row(length, clock[0])
        waiting.future.add_done_callback(
            lambda _: seen.append(values(statistics, names.INTER_TOKEN)["_count"])
        )
        scheduler.add(waiting)
    for slots in ((0, 1), (0, 1), (1,)):
        scheduler.plan()
        clock[0] += 0.5
        scheduler.apply(Step(slots))
    assert seen == [1, 3]


def test_a_row_may_be_left_out_of_a_step(clock: list[float]) -> None:
    """As one whose next token a guide must see first."""
    statistics = Statistics()
    scheduler = Scheduler(4, cache_tokens=100, prefill_tokens=50, statistics=statistics)
    for length in (4, 4):
        scheduler.add(row(length, clock[0]))
    for slots in ((0, 1), (0,), (0, 1)):
        scheduler.plan()
        clock[0] += 0.5
        scheduler.apply(Step(slots))
    assert values(statistics, names.INTER_TOKEN) == {"_count": 3, "_sum": 0.5 + 0.5 + 1.0}
    assert values(statistics, names.GENERATION_TOKENS) == {"": 5}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = engine_for(CONFIG, random_tensors(CONFIG), max_batch_size=4)
    yield loaded
    loaded.close()


def counted(engine: Engine, *requests: GenerateRequest) -> tuple[list[GenerateOutput], list[float]]:
    """The answers, and by how much the counters went up: tokens of prompts and generated ones,
    rows that stopped, and that have their length, first tokens, later ones, and ends.
    """

    def totals() -> list[float]:
        statistics = engine.statistics
        ended = values(statistics, names.SUCCESS)
        of = (names.PROMPT_TOKENS, names.GENERATION_TOKENS)
        counts = (names.FIRST_TOKEN, names.INTER_TOKEN, names.REQUEST)
        return [
            *(value for metric in of for value in values(statistics, metric).values()),
            *(ended[names.STOP], ended[names.LENGTH]),
            *(values(statistics, metric)["_count"] for metric in counts),
        ]

    before = totals()
    answers = [future.result(60) for future in map(engine.submit, requests)]
    # A row is counted before it is answered, the last step's tokens right after it.
    engine.submit(GenerateRequest((1,), 0)).result(60)
    after = totals()
    grown = [now - then for now, then in zip(after, before, strict=True)]
    grown[0] -= 1
    grown[3] -= 1
    grown[6] -= 1
    return answers, grown


def test_tokens_and_ends_are_those_of_the_answers(engine: Engine) -> None:
    prompts = [tuple(range(1, 2 + n)) for n in range(7)]
    answers, grown = counted(engine, *(GenerateRequest(prompt, 9) for prompt in prompts))
    lengths = [len(answer.output_ids) for answer in answers]
    tokens = sum(lengths)
    prompt_tokens = sum(map(len, prompts))
    stopped = sum(answer.output_ids[-1] == CONFIG.end_id for answer in answers)
    assert grown == [prompt_tokens, tokens, stopped, 7 - stopped, 7, tokens - 7, 7]


def test_an_end_token_or_a_stop_word_stops_a_row(engine: Engine) -> None:
    (whole,), _ = counted(engine, GenerateRequest((3, 4, 5), 6))
    second, third = whole.output_ids[1:3]
    where = whole.output_ids.index(third)
    (one,), grown = counted(engine, GenerateRequest((3, 4, 5), 6, end_id=third))
    assert grown[2:4] == [1, 0]
    assert len(one.output_ids) == where + 1
    words = ((second, third),)
    _, grown = counted(engine, GenerateRequest((3, 4, 5), 6, stop_words=words))
    assert grown[2:4] == [1, 0]


def test_a_row_without_output_has_no_first_token(engine: Engine) -> None:
    _, grown = counted(engine, GenerateRequest((3, 4, 5), 0, return_context_logits=True))
    assert grown == [3, 0, 0, 1, 0, 0, 1]


def test_a_stop_word_at_the_end_of_a_prompt_stops_nothing(engine: Engine) -> None:
    _, grown = counted(engine, GenerateRequest((3, 4, 5), 0, stop_words=((5,),)))
    assert grown[2:4] == [0, 1]


def test_a_beam_search_counts_as_one_row(engine: Engine) -> None:
    sampling = SamplingParameters(beam_width=3)
    (answer,), grown = counted(engine, GenerateRequest((3, 4), 5, sampling, end_id=CONFIG.end_id))
    stopped = answer.output_ids[-1] == CONFIG.end_id
    assert grown == [2, 5, int(stopped), int(not stopped), 1, 4, 1]


def test_a_cancelled_row_is_no_answer(engine: Engine) -> None:
    submitted = Event()

    def cancel(_: object) -> None:
        submitted.wait(60)
        future.cancel()

    before = values(engine.statistics, names.REQUEST)["_count"]
    future = engine.submit(GenerateRequest((1, 2), 190), cancel)
    submitted.set()
    engine.submit(GenerateRequest((1, 2), 190)).result(60)
    assert future.cancelled()
    assert values(engine.statistics, names.REQUEST)["_count"] == before + 1


def test_an_encoders_input_is_the_prompt() -> None:
    config = small_t5.t5_config()
    engine = engine_for(config, small_t5.t5_tensors(config))
    try:
        answer = engine.submit(GenerateRequest((5, 6, 7, 8), 3)).result(60)
        engine.submit(GenerateRequest((5,), 1)).result(60)
        assert values(engine.statistics, names.PROMPT_TOKENS) == {"": 5}
        assert values(engine.statistics, names.STEP_TOKENS)["_sum"] == (
            4 + len(answer.output_ids) + 1 + 1
        )
    finally:
        engine.close()
