"""Rows get blocks as they need them, and give them up: answers stay the same."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core import row_allocator
from launcher_scripts.engine.core.prefix_cache import prefix_of
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    generate,
    load_engine,
    random_tensors,
    small_config,
)
from tests.engine.test_prefix_cache import CONFIG, text
from tests.engine.test_prefix_sharing import MODELS, TENSORS
from tests.engine.test_statistics import values


@pytest.fixture(autouse=True)
def _no_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows wait again often."""
    monkeypatch.setattr(row_allocator, "SPARE_SHARE", 0.0)


def growing(prompt_len: int, output_len: int, seed: int = 0) -> Row:
    prompt = text(prompt_len, seed)
    return Row(GenerateRequest(prompt, output_len), Future(), prompt, end_id=-1, grows=True)


def following(ids: tuple[int, ...]) -> int:
    """A token that every one before it decides."""
    return hash(ids) % 60


class TokenDevice:
    """Carries plans out on ids alone: what a row's blocks hold decides its next token."""

    def __init__(self, capacity: int, size: int = 16) -> None:
        self._cache = [-1] * capacity
        self._size = size
        self._ids: dict[int, tuple[int, ...]] = {}
        self._tables: dict[int, dict[int, int]] = {}
        self._lengths: dict[int, int] = {}
        self._chosen: dict[int, int] = {}

    def execute(self, plan: Plan) -> StepResult:
        for change in plan.blocks:
            numbers = enumerate(change.blocks, change.first)
            self._tables.setdefault(change.slot, {}).update(numbers)
        self._ids |= {start.slot: start.ids for start in plan.starts}
        tokens = []
        for part in plan.prefill:
            ids = self._ids[part.slot][part.past : part.past + part.count]
            for position, token in enumerate(ids, part.past):
                self._cache[self._at(part.slot, position)] = token
            self._lengths[part.slot] = part.past + part.count
            if part.past + part.count == len(self._ids[part.slot]):
                tokens.append(self._sampled(part.slot))
        for slot in plan.decode:
            self._cache[self._at(slot, self._lengths[slot])] = self._chosen[slot]
            self._lengths[slot] += 1
            tokens.append(self._sampled(slot))

        class Known(StepResult):
            def read(self):
                yield tokens

        return Known()

    def _at(self, slot: int, position: int) -> int:
        block, offset = divmod(position, self._size)
        return self._tables[slot][block] * self._size + offset

    def _sampled(self, slot: int) -> TokenResult:
        ids = (self._cache[self._at(slot, position)] for position in range(self._lengths[slot]))
        self._chosen[slot] = following(tuple(ids))
        return TokenResult(slot, self._chosen[slot], None)


def run_out(scheduler: Scheduler, device: TokenDevice, ahead: int = 1) -> list[Plan]:
    """Until every row is answered; a step is launched before those before it are read."""
    plans, launched = [], deque()
    while scheduler.rows or launched:
        plan = scheduler.plan()
        if plan is not None:
            plans.append(plan)
            launched.append(device.execute(plan))
        assert launched or not scheduler.rows, "nobody can go on"
        if launched and (plan is None or len(launched) > ahead):
            scheduler.apply(launched.popleft())
    return plans


def wanted(row: Row) -> tuple[int, ...]:
    ids = row.prompt
    for _ in range(row.request.output_len):
        ids = (*ids, following(ids))
    return ids[len(row.prompt) :]


def preemptions(scheduler: Scheduler | Engine) -> float:
    found = scheduler.statistics if isinstance(scheduler, Engine) else scheduler._statistics
    return values(found, names.PREEMPTIONS)[""]


def test_rows_have_the_blocks_that_they_need() -> None:
    """The first could become as long as the cache; the others get what they need beside it."""
    scheduler, device = Scheduler(4, 96, 100), TokenDevice(96)
    rows = [growing(10, 86, 1), growing(20, 30, 2), growing(20, 2, 3)]
    for row in rows:
        scheduler.add(row)
    plan = scheduler.plan()
    assert len(plan.starts) == 3
    assert scheduler.used_tokens == 16 + 32 + 32
    scheduler.apply(device.execute(plan))
    run_out(scheduler, device)
    for row in rows:
        assert row.future.result(0).output_ids == wanted(row)
    assert scheduler.used_tokens == 0


def test_others_leave_room_for_rows_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the cache; but a row that nobody else runs beside may take all of it."""
    monkeypatch.setattr(row_allocator, "SPARE_SHARE", 0.1)
    scheduler, device = Scheduler(12, 1024, 2000), TokenDevice(1024)
    rows = [growing(100, 200, seed) for seed in range(11)] + [growing(700, 301)]
    for row in rows:
        scheduler.add(row)
    scheduler.apply(device.execute(scheduler.plan()))
    assert scheduler.rows_running == 8
    assert scheduler.used_tokens == 8 * 112
    run_out(scheduler, device)
    assert [row.future.result(0).output_ids for row in rows] == [wanted(row) for row in rows]


def test_the_row_that_came_last_gives_its_place_up_and_is_next() -> None:
    """Room for both prompts, and for one answer."""
    scheduler, device = Scheduler(4, 64, 100), TokenDevice(64)
    rows = [growing(10, 40, seed) for seed in range(3)]
    for row in rows:
        scheduler.add(row)
    order = []
    for place, row in enumerate(rows):
        row.future.add_done_callback(lambda _, place=place: order.append(place))
    run_out(scheduler, device)
    assert order == [0, 1, 2]
    assert [row.future.result(0).output_ids for row in rows] == [wanted(row) for row in rows]
    assert preemptions(scheduler) > 0


def test_a_row_that_gave_its_place_up_may_end_with_a_token_on_its_way() -> None:
    scheduler, device = Scheduler(4, 4 * 5, 100, block_tokens=4), TokenDevice(4 * 5, 4)
    first, second = growing(5, 12, 1), growing(5, 12, 2)
    second.end_id = following((*second.prompt, *wanted(second)[:4]))
    for row in (first, second):
        scheduler.add(row)
    run_out(scheduler, device, ahead=2)
    assert second.future.result(0).output_ids == wanted(second)[:5]
    assert first.future.result(0).output_ids == wanted(first)
    assert preemptions(scheduler) == 1
    assert scheduler.used_tokens == 0


def test_a_long_prompt_takes_blocks_that_lie_apart() -> None:
    """Every second row ends: half of the cache is free, and no two blocks of it are neighbours."""
    scheduler, device = Scheduler(16, 128, 1000), TokenDevice(128)
    rows = [growing(10, 2 if place % 2 else 6, place) for place in range(8)]
    for row in rows:
        scheduler.add(row)
    for _ in range(2):
        scheduler.apply(device.execute(scheduler.plan()))
    long = growing(60, 4, 9)
    scheduler.add(long)
    plan = scheduler.plan()
    assert [start.ids for start in plan.starts] == [long.prompt]
    numbers = sorted(block.number for block in long.blocks)
    assert min(after - before for before, after in itertools.pairwise(numbers)) == 2
    scheduler.apply(device.execute(plan))
    run_out(scheduler, device)
    for row in (*rows, long):
        assert row.future.result(0).output_ids == wanted(row)
    assert preemptions(scheduler) == 0


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), size=st.sampled_from((1, 4, 16)), caching=st.booleans())
def test_every_row_ends_with_its_own_text(seed: int, size: int, caching: bool) -> None:
    """In small caches, with neighbours that have all their room, are cancelled or share prompts:
    tokens depend neither on the size of blocks nor on hits, budgets and who waits again.
    """
    draw = random.Random(seed)
    capacity = draw.choice((80, 160, 400))
    scheduler = Scheduler(draw.choice((3, 12)), capacity, draw.choice((7, 64)), block_tokens=size)
    device, rows = TokenDevice(capacity, size), []
    stems = [text(draw.randrange(10, 40), each) for each in range(3)]
    for _ in range(30):
        prompt = (*draw.choice(stems), *text(draw.randrange(1, 20), draw.random()))
        row = Row(
            GenerateRequest(prompt, draw.randrange(1, 80 - len(prompt))),
            Future(),
            prompt,
            end_id=draw.choice((-1, 7)),
            grows=draw.random() < 0.8,
        )
        if caching:
            row.prefix = prefix_of(row.request, prompt, row.row_capacity, CONFIG, size)
        rows.append(row)
        scheduler.add(row)
        if draw.random() < 0.2:
            row.future.cancel()
    run_out(scheduler, device, ahead=draw.choice((0, 1, 2)))
    for row in rows:
        text_of_row = wanted(row)
        if row.end_id in text_of_row:
            text_of_row = text_of_row[: text_of_row.index(row.end_id) + 1]
        assert row.future.cancelled() or row.future.result(0).output_ids == text_of_row
    assert scheduler.used_tokens == 0
    allocator = scheduler._allocator
    blocks = (*allocator.cache._free, *allocator.cache._unused)
    assert not any(block.rows for block in blocks)
    assert sorted(block.number for block in blocks) == list(range(capacity // size))
    assert sorted(allocator.free_slots) == list(range(len(allocator.free_slots)))


SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(top_k=20, temperature=1.5, random_seed=3),
    SamplingParameters(top_p=0.9, temperature=1.2, random_seed=8),
    SamplingParameters(repetition_penalty=1.25, no_repeat_ngram_size=2),
    SamplingParameters(frequency_penalty=0.8, min_length=30),
    SamplingParameters(beam_width=2),
)


Answers = Sequence[Future[GenerateOutput]]


def same_answers(
    requested: Answers, futures: Answers
) -> Iterator[tuple[GenerateOutput, GenerateOutput]]:
    """Pairs of the answers, whose tokens and log-probabilities are the same."""
    for one, other in zip(requested, futures, strict=True):
        want, got = one.result(60), other.result(60)
        assert got.output_ids == want.output_ids
        assert got.output_log_probs == pytest.approx(want.output_log_probs, abs=1e-3)
        yield want, got


def check_answers(large: Engine, small: Engine, seed: int, count: int = 16) -> None:
    """Long answers to short prompts, some of which begin alike; some rows are cancelled."""
    draw = random.Random(seed)
    stems = [text(20, each) for each in range(3)]
    requests = [
        GenerateRequest(
            (*draw.choice(stems), *text(draw.randrange(1, 20), draw.random())),
            draw.randrange(1, 70),
            draw.choice(SAMPLINGS),
            return_log_probs=True,
        )
        for _ in range(count)
    ]
    wanted = [large.submit(request) for request in requests]
    futures = [small.submit(request) for request in requests]
    for request in requests[::5]:
        small.submit(request).cancel()
    for _ in same_answers(wanted, futures):
        pass
    assert small.cache_tokens_used == 0
    assert preemptions(small) > 3
    large.close()
    small.close()


@pytest.mark.parametrize(
    ("model", "tokens", "budget", "caching"),
    [
        ("gpt", 240, 50, True),
        ("window", 260, 80, False),
        ("latent", 280, 50, True),
        pytest.param("rope", 260, 100, False, marks=pytest.mark.slow),
        pytest.param("agm", 240, 64, False, marks=pytest.mark.slow),
        pytest.param("gpt", 260, 2048, False, marks=pytest.mark.slow),
        pytest.param("longrope", 280, 300, True, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_a_large_cache(
    monkeypatch: pytest.MonkeyPatch, model: str, tokens: int, budget: int, caching: bool
) -> None:
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", budget)
    large = engine_for(*MODELS[model])
    small = engine_for(
        *MODELS[model], max_tokens=tokens, max_batch_size=12, enable_prefix_caching=caching
    )
    check_answers(large, small, tokens)


def test_answers_are_the_same_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prompts and steps are graphs, and a step is launched before the last one's tokens."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    large = engine_for(CONFIG, TENSORS)
    small = engine_for(CONFIG, TENSORS, graphs=EagerGraphs(), max_tokens=260, max_batch_size=12)
    check_answers(large, small, 1)


def test_ranks_move_alike(tmp_path: Path) -> None:
    large = engine_for(CONFIG, TENSORS)
    small = load_engine(tmp_path, CONFIG, TENSORS, 2, 1, max_tokens=260, max_batch_size=12)
    check_answers(large, small, 2, count=10)


PENALTIES = SamplingParameters(
    top_k=30, temperature=1.3, random_seed=4, frequency_penalty=0.8, min_length=30
)


@pytest.mark.parametrize(
    "sampling",
    [PENALTIES, SamplingParameters(top_p=0.9, top_p_decay=0.9, temperature=1.2, random_seed=8)],
    ids=["counts what it had generated", "a top_p that changes"],
)
def test_a_row_goes_on_as_it_would_have(sampling: SamplingParameters) -> None:
    """Random numbers, counts and minimum lengths go by the tokens that a row has generated."""
    requests = [GenerateRequest(text(20, seed), 60, sampling) for seed in range(6)]
    answers = []
    for tokens in (4000, 150):
        engine = engine_for(CONFIG, TENSORS, max_tokens=tokens)
        futures = [engine.submit(request) for request in requests]
        answers.append([future.result(60).output_ids for future in futures])
        assert bool(preemptions(engine)) == (tokens == 150 and sampling is PENALTIES)
        engine.close()
    assert answers[0] == answers[1]


def test_lengths_turn_the_keys_of_a_model_with_dynamic_positions() -> None:
    """Such rows keep their places."""
    config = small_config(
        end_id=67, max_positions=200, position_embedding="rope", rotary_scaling="dynamic",
        rotary_scaling_factor=4.0, rotary_original_positions=60,
    )  # fmt: skip
    tensors = random_tensors(config)
    answers = []
    for tokens in (2000, 150):
        engine = engine_for(config, tensors, max_tokens=tokens)
        futures = [engine.submit(GenerateRequest(text(20, seed), 70)) for seed in range(5)]
        answers.append([future.result(60).output_ids for future in futures])
        assert preemptions(engine) == 0
        engine.close()
    assert answers[0] == answers[1]


def test_sessions_keep_their_places_beside_rows_that_move() -> None:
    large, small = engine_for(CONFIG, TENSORS), engine_for(CONFIG, TENSORS, max_tokens=250)
    answers = []
    for engine in (large, small):
        session, said = Session(120, 120), []
        for turn in range(3):
            futures = [engine.submit(GenerateRequest(text(20, turn), 10), session=session)]
            futures += [engine.submit(GenerateRequest(text(20, seed), 60)) for seed in range(3)]
            said += [future.result(60).output_ids for future in futures]
        engine.close_session(session)
        said.append(generate(engine, text(200), 40))
        answers.append(said)
    assert answers[0] == answers[1]
    assert preemptions(small) > 0
    large.close()
    small.close()
