"""Rows join and leave between steps; neighbours change nothing; what finds no room waits."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, wait

import pytest
import torch

from launcher_scripts.common.errors import ServerError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.model.kv_cache import (
    LayerStates,
    TokenState,
    bytes_per_token,
    plan_capacity,
)
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from tests.engine.small_models import (
    context_logits,
    engine_for,
    generate,
    random_tensors,
    run,
    small_config,
)

CONFIG = small_config(end_id=67, max_positions=200)
TENSORS = random_tensors(CONFIG)


@pytest.fixture(scope="module")
def engine():
    loaded = engine_for(CONFIG, TENSORS, max_batch_size=4)
    yield loaded
    loaded.close()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [
        tuple(source.randrange(67) for _ in range(source.randrange(1, 40))) for _ in range(count)
    ]


def test_a_long_request_does_not_hold_a_short_one(engine):
    order: list[str] = []
    long = engine.submit(GenerateRequest((1, 2, 3), 190))
    long.add_done_callback(lambda _: order.append("long"))
    short = engine.submit(GenerateRequest((4, 5), 2))
    short.add_done_callback(lambda _: order.append("short"))
    wait([long, short], 60)
    assert order == ["short", "long"]


def test_neighbours_do_not_change_results(engine):
    requests = [
        GenerateRequest(
            prompt,
            5 + 3 * index,
            SamplingParameters(top_k=8 * (index % 3), random_seed=index, temperature=1.5),
        )
        for index, prompt in enumerate(prompts(12))
    ]
    alone = [engine.submit(request).result(60).output_ids for request in requests]
    order = list(range(12))
    random.Random(1).shuffle(order)
    together = {index: engine.submit(requests[index]) for index in order}
    wait(together.values(), 60)
    assert [together[index].result().output_ids for index in range(12)] == alone


def test_requests_from_many_threads(engine):
    expected = [generate(engine, prompt, 10) for prompt in prompts(16, seed=3)]
    answers: dict[int, list[int]] = {}

    def ask(index: int, prompt: tuple[int, ...]) -> None:
        answers[index] = generate(engine, prompt, 10)

    threads = [
        threading.Thread(target=ask, args=(index, prompt))
        for index, prompt in enumerate(prompts(16, seed=3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[index] for index in range(16)] == expected


def test_rows_wait_for_room_in_the_cache():
    """A cache for two rows serves twelve, the longest of which needs all of it."""
    engine = engine_for(CONFIG, TENSORS, max_batch_size=8, max_tokens=60)
    wide = engine_for(CONFIG, TENSORS, max_batch_size=8)
    lengths = [20, 25, 31, 5, 1, 31, 9, 28, 3, 30, 16, 22]
    requests = [
        GenerateRequest(tuple(range(30 if index == 2 else 10)), length)
        for index, length in enumerate(lengths)
    ]
    futures = [engine.submit(request) for request in requests]
    for request, future in zip(requests, futures, strict=True):
        assert future.result(60) == wide.submit(request).result(60)
    engine.close()
    wide.close()


def test_a_long_prompt_runs_in_pieces(monkeypatch):
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 7)
    pieces = engine_for(CONFIG, TENSORS)
    prompt = tuple(range(60))
    got = context_logits(pieces, prompt)
    tokens = [generate(pieces, prompt[:length], 8) for length in (60, 7, 8, 1)]
    pieces.close()
    monkeypatch.undo()
    whole = engine_for(CONFIG, TENSORS)
    assert (context_logits(whole, prompt) - got).abs().max() < 1e-5
    assert [generate(whole, prompt[:length], 8) for length in (60, 7, 8, 1)] == tokens
    whole.close()


def test_the_end_token_ends_a_row_and_stays_in_it(engine):
    free = generate(engine, (1, 2, 3), 12)
    end = free[4]
    cut = generate(engine, (1, 2, 3), 12, end_id=end)
    assert cut == free[: free.index(end) + 1]


def test_stop_words_end_a_row_and_stay_in_it(engine):
    free = generate(engine, (1, 2, 3), 12)
    pair = (free[2], free[3])
    first = next(i for i in range(11) if (free[i], free[i + 1]) == pair)
    stopped = generate(engine, (1, 2, 3), 12, stop_words=((66, 66, 66), pair))
    assert stopped == free[: first + 2]


def test_a_stop_word_may_begin_in_the_prompt(engine):
    first = generate(engine, (1, 2, 3), 12)[0]
    assert generate(engine, (1, 2, 3), 12, stop_words=((2, 3, first),)) == [first]


def test_an_empty_prompt_is_the_start_token(engine):
    assert generate(engine, (), 5) == generate(engine, (CONFIG.start_id,), 5)
    assert generate(engine, (), 5, start_id=7) == generate(engine, (7,), 5)
    assert context_logits(engine, ()).shape == (0, CONFIG.vocab_size)


def test_nothing_to_generate_is_an_answer(engine):
    output = run(engine, (1, 2), 0, return_log_probs=True)
    assert (output.output_ids, output.cum_log_probs, output.output_log_probs) == ((), 0, ())


def test_cum_log_probs_is_the_sum_over_the_vocabulary(engine):
    sampling = SamplingParameters(top_p=0.9, random_seed=4)
    output = run(engine, (1, 2, 3), 6, sampling=sampling, return_log_probs=True)
    logits = context_logits(engine, (1, 2, 3, *output.output_ids))[2:-1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
    assert output.output_log_probs == pytest.approx(chosen.tolist(), abs=1e-4)
    assert output.cum_log_probs == pytest.approx(float(chosen.sum()), abs=1e-4)
    assert run(engine, (1, 2, 3), 6, sampling=sampling).cum_log_probs is None


def test_a_cancelled_row_leaves_its_place():
    engine = engine_for(CONFIG, TENSORS, max_batch_size=1)
    running = engine.submit(GenerateRequest((1, 2), 190))
    waiting = engine.submit(GenerateRequest((1, 2), 190))
    assert waiting.cancel()
    time.sleep(0.02)
    assert running.cancel()
    assert len(generate(engine, (5,), 3)) == 3
    assert running.cancelled() and waiting.cancelled()
    engine.close()


def test_a_closed_engine_says_so():
    engine = engine_for(CONFIG, TENSORS)
    engine.close()
    engine.close()
    with pytest.raises(ServerError, match="closed"):
        run(engine, (1,), 1)


def row(prompt_len: int, output_len: int) -> Row:
    prompt = tuple(range(prompt_len))
    return Row(GenerateRequest(prompt, output_len), Future(), prompt, end_id=1000)


def answer(plan: Plan, ends: Collection[int] = (), unfinished: Collection[int] = ()) -> StepResult:
    """A step result that gives every row of a plan token 5, or 1000 for slots in `ends`.

    unfinished: slots of prompts that go on, which get none
    """
    slots = [part.slot for part in plan.prefill if part.slot not in unfinished]
    slots += [*plan.decode, *plan.apart]
    tokens = [TokenResult(slot, 1000 if slot in ends else 5, None) for slot in slots]

    class Known(StepResult):
        def read(self):
            yield tokens

    return Known()


def test_a_step_may_be_launched_before_the_last_is_read():
    """A slot given to a new row keeps the tokens of the row whose step was launched."""
    scheduler = Scheduler(slots=1, cache_tokens=100, prefill_tokens=50)
    first, second = row(3, 10), row(2, 2)
    scheduler.add(first)
    scheduler.add(second)
    one = scheduler.plan()
    two = scheduler.plan()
    assert (one.prefill[0].count, two.decode) == (3, (0,))
    scheduler.apply(answer(one, ends={0}))
    assert first.future.result(0).output_ids == (1000,)
    three = scheduler.plan()
    assert three.starts[0].ids == second.prompt
    scheduler.apply(answer(two))
    scheduler.apply(answer(three))
    assert second.tokens == [5]
    scheduler.apply(answer(scheduler.plan()))
    assert second.future.result(0).output_ids == (5, 5)
    assert scheduler.plan() is None
    assert scheduler.rows == []


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_stages_work_on_different_rows(stages):
    """No row gets a token in a step before which its last one may still be under way."""
    scheduler = Scheduler(slots=8, cache_tokens=400, prefill_tokens=50, stages=stages)
    rows = [row(3, 20) for _ in range(7)]
    for each in rows:
        scheduler.add(each)
    launched: list[Plan] = []
    applied, most = 0, 0
    while scheduler.rows:
        plan = scheduler.plan()
        if plan is not None:
            launched.append(plan)
            assert plan.under_way == min(len(launched) - 1 - applied, stages - 1)
            before = launched[len(launched) - 1 - plan.under_way : -1]
            assert not {*plan.decode} & {slot for each in before for slot in given(each)}
            assert len(plan.decode) <= -(-7 // stages)
            most = max(most, plan.under_way)
        if plan is None or len(launched) - applied > stages - 1:
            scheduler.apply(answer(launched[applied]))
            applied += 1
    assert [len(each.tokens) for each in rows] == [20] * 7
    assert most == stages - 1
    assert len(launched) < 20 * stages + 2  # as many steps as if every stage had its share


def given(plan: Plan) -> list[int]:
    """Slots of the rows that get a token, where all prompts run whole."""
    return [*(part.slot for part in plan.prefill), *plan.decode]


def test_a_lone_row_waits_for_no_other_stages_rows():
    scheduler = Scheduler(slots=8, cache_tokens=400, prefill_tokens=50, stages=2)
    scheduler.add(row(3, 3))
    first = scheduler.plan()
    assert (given(first), first.under_way) == ([0], 0)
    assert scheduler.plan() is None
    scheduler.apply(answer(first))
    second = scheduler.plan()
    assert (given(second), second.under_way) == ([0], 0)


@pytest.mark.parametrize("plain", [0, 1])
def test_rows_that_wait_for_their_tokens_share_steps(plain):
    """They came one after the other, while a step was always under way."""
    scheduler = Scheduler(
        slots=8, cache_tokens=400, prefill_tokens=3, recorded_tokens=lambda _: [3]
    )
    waiting = [row(3, 20) for _ in range(4)]
    for each in waiting:
        each.waits_for_tokens = True
    for each in [*(row(3, 60) for _ in range(plain)), *waiting]:
        scheduler.add(each)
    launched: deque[Plan] = deque()
    decoded = []
    while not all(each.finished for each in waiting):
        plan = scheduler.plan()
        if plan is not None:
            launched.append(plan)
            decoded.append({*plan.decode} & {each.slot for each in waiting})
        if plan is None or len(launched) > 1:
            scheduler.apply(answer(launched.popleft()))
    steps = [slots for slots in decoded if slots]
    assert [len(each.tokens) for each in waiting] == [20] * 4
    assert len([slots for slots in steps if len(slots) == 4]) >= 14
    assert len(steps) <= 24


def test_no_row_is_launched_past_its_length():
    scheduler = Scheduler(slots=2, cache_tokens=100, prefill_tokens=50)
    scheduler.add(row(3, 3))
    plans = [scheduler.plan() for _ in range(4)]
    assert [len(plan.prefill) + len(plan.decode) for plan in plans[:3]] == [1, 1, 1]
    assert plans[3] is None
    assert [plan.longest for plan in plans[1:3]] == [4, 5]


def running(rows: int) -> Scheduler:
    """A scheduler with `rows` rows that decode, and places for as many more."""
    scheduler = Scheduler(slots=2 * rows + 1, cache_tokens=200 * rows, prefill_tokens=10 * rows)
    for _ in range(rows):
        scheduler.add(row(3, 50))
    scheduler.apply(answer(scheduler.plan()))
    return scheduler


def steps_until_start(scheduler: Scheduler) -> int:
    for steps in range(20):
        plan = scheduler.plan()
        scheduler.apply(answer(plan))
        if plan.starts:
            return steps
    raise AssertionError("nothing joined")


@pytest.mark.parametrize(("rows", "waits"), [(1, 0), (6, 0), (8, 1), (20, 2), (200, 2)])
def test_a_row_waits_for_others_where_many_decode(rows, waits):
    scheduler = running(rows)
    for _ in range(2):
        scheduler.add(row(3, 50))
        assert steps_until_start(scheduler) == waits


@pytest.mark.parametrize(("rows", "lengths"), [(8, (32,)), (128, (512,)), (128, (250, 262))])
def test_prompts_of_enough_tokens_do_not_wait(rows, lengths):
    scheduler = running(rows)
    for length in lengths:
        scheduler.add(row(length, 50))
    plan = scheduler.plan()
    assert len(plan.starts) == len(lengths)
    assert len(plan.decode) == rows


def test_a_first_token_does_not_wait_for_the_tokens_of_decoding_rows():
    """Prompts in a pass of their own run first: each part of a step is taken when it is there."""
    scheduler = running(1)
    (decoding,) = scheduler.rows
    late = row(10, 50)
    scheduler.add(late)
    plan = scheduler.plan()
    assert plan.prefill
    assert plan.decode
    seen = []

    class Parts(StepResult):
        def read(self):
            yield [TokenResult(late.slot, 5, None)]
            seen.append((len(late.tokens), len(decoding.tokens)))
            yield [TokenResult(decoding.slot, 5, None)]

    before = len(decoding.tokens)
    scheduler.apply(Parts())
    assert seen == [(1, before)]
    assert len(decoding.tokens) == before + 1


def test_a_row_that_finds_no_place_is_not_held_when_it_does():
    scheduler = Scheduler(slots=32, cache_tokens=10_000, prefill_tokens=1000)
    for _ in range(32):
        scheduler.add(row(3, 3))
    late = row(3, 3)
    scheduler.add(late)
    for _ in range(20):
        if not late.future.done():
            scheduler.apply(answer(scheduler.plan()))
    assert late.future.result(0).output_ids == (5, 5, 5)
    assert scheduler.plan() is None


def test_the_cache_is_planned_from_memory():
    states = [LayerStates(TokenState(2, 2, 16))] * 3
    assert bytes_per_token(states, torch.float16) == 3 * 2 * 2 * 16 * 2
    assert plan_capacity(1000, 8, 5000, 16, slots=3) == 480  # a block is for padding
    assert plan_capacity(100, 8, 5000, 16, slots=3) == 112
