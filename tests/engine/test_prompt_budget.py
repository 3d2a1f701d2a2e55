"""How many prompt tokens a step computes, and of which rows."""

from __future__ import annotations

import random
from concurrent.futures import Future
from functools import partial

import pytest

from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.step_budget import MIN_MIXED_TOKENS, Limits, PromptBudget
from launcher_scripts.engine.runner.prompt_batch import TOKEN_BUCKETS, recorded_tokens
from tests.engine.small_models import engine_for
from tests.engine.test_mixed_steps import check_same
from tests.engine.test_prefix_sharing import MODELS

RECORDED = partial(recorded_tokens, max_rows=128)


def budget(target: float = 0.05, **more: bool) -> PromptBudget:
    return PromptBudget(8192, RECORDED, target, **more)


def after(steps: list[tuple[int, float]], target: float = 0.05) -> PromptBudget:
    """A budget that has seen steps of so many prompt tokens and seconds."""
    found = budget(target)
    for tokens, seconds in steps:
        found.observe(tokens, seconds)
    return found


def rows(*lengths: int) -> list[Row]:
    return [
        Row(GenerateRequest((1,) * length, 1), Future(), (1,) * length, 0, slots=(slot,))
        for slot, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("microseconds", "decoding", "tokens"),
    [
        (25, 0, 1792),  # 2,000 fit; the next smaller graph has 1,792
        (25, 30, 1792 - 32),
        (40, 30, 1280 - 32),
        (500, 1, 512 - 1),  # no time for more, but fewer gain nothing
        (10, 30, 5000),  # more than a graph has room for, by far
        (1, 30, 8192),
    ],
)
def test_a_step_has_as_many_tokens_as_its_time_allows(
    microseconds: int, decoding: int, tokens: int
) -> None:
    seen = after([(1000, 1000 * microseconds * 1e-6)] * 9)
    assert seen.limits(decoding, [8500, 500]).tokens == tokens


@pytest.mark.parametrize(
    ("decoding", "waiting", "limits"),
    [
        (30, [9000], (2400, 2500)),  # a fifth more; graphs of 2,048 tokens take long enough
        (30, [9000] * 3, (3200, 3200)),
        (30, [9000] * 10, (4000, 4000)),
        (7, [9000], (3714, 3714)),
        (6, [9000], (4000, 4000)),
        (1, [9000] * 8, (4000, 4000)),
        (0, [9000], (4000, 4000)),
        (6, [9000, 300], (2000, 2500)),  # a short prompt waits
    ],
)
def test_steps_are_longer_where_many_long_prompts_wait_for_few_rows(
    decoding: int, waiting: list[int], limits: tuple[int, int]
) -> None:
    seen = PromptBudget(8192, lambda _: [512, 2000], 0.05)
    for _ in range(9):
        seen.observe(1000, 0.025)
    assert seen.limits(decoding, waiting) == limits


def test_graphs_that_end_soon_are_not_left_for_a_little_more() -> None:
    fast, slow = after([(1000, 0.010)] * 9, target=0.025), after([(1000, 0.025)] * 9, target=0.06)
    assert fast.limits(30, [9000, 500]).tokens == 2048 - 32  # 2,500 fit
    assert slow.limits(30, [9000, 500]).tokens == 2400


def test_time_that_decoding_takes_is_not_the_prompts() -> None:
    decode, prompt = 0.010, 25e-6
    seen = after([(0, decode)] * 9 + [(1000, decode + 1000 * prompt)] * 9)
    assert seen.limits(8, [8500, 500]).tokens == 1536 - 8  # 40 ms of 50 are left: 1,600 tokens
    assert seen.limits(0, [8500, 500]).tokens == 1792


def test_few_tokens_that_wait_take_small_steps_beside_rows_that_decode() -> None:
    seen = after([(1000, 0.025)] * 9)
    assert seen.limits(8, [512, 512]).tokens == 512 - 8
    assert seen.limits(8, [513, 512]).tokens == 1792 - 8
    assert seen.limits(0, [500, 500]).tokens == 1792


def test_one_slow_step_changes_nothing() -> None:
    steps = [(1000, 0.025)] * 8
    assert after([*steps, (1000, 2.0)]).limits(4, [9000]) == after(steps).limits(4, [9000])


def test_without_a_target_or_one_by_one_time_means_nothing() -> None:
    for each in (after([(1000, 1.0)] * 9, target=0.0), budget(one_by_one=True)):
        each.observe(1000, 1.0)
        assert each.limits(5, [9000]) == Limits(8192, 8192)
        assert each.spare_seconds([1000], 0.0) == 0.0


def test_before_a_step_was_seen_rows_that_decode_wait_little() -> None:
    assert budget().limits(1, [9000]).tokens == MIN_MIXED_TOKENS - 1
    assert budget().limits(0, [9000]).tokens == 8192


@pytest.mark.parametrize(
    ("lengths", "limits", "counts"),
    [
        ((5000, 100), (1000, 1000), [900, 100]),
        ((5000, 100, 2000), (1000, 1000), [500, 100, 400]),
        ((5000, 5000, 5000), (1000, 1000), [1000]),  # of equal ones one ends after the other
        ((5000, 4000), (1000, 1000), [500, 500]),
        ((1100,), (1000, 1250), [1100]),  # it need not come back for its last tokens
        ((1300,), (1000, 1250), [1000]),
        ((200, 300), (1000, 1000), [200, 300]),
        ((), (1000, 1000), []),
    ],
)
def test_half_is_for_the_first_prompt_and_the_remainder_for_the_shortest(
    lengths: tuple[int, ...], limits: tuple[int, int], counts: list[int]
) -> None:
    shares = list(budget().shares(rows(*lengths), Limits(*limits)))
    assert [count for _, count in shares] == counts
    assert [row.slot for row, _ in shares] == sorted(row.slot for row, _ in shares)


def test_every_prompt_ends_however_many_short_ones_come() -> None:
    (long, *others), step = rows(20_000, *[50] * 400), 0
    waiting = [long]
    while long.prefilled < 20_000:
        waiting += others[4 * step : 4 * step + 4]  # more than half of each step
        for row, count in budget().shares(waiting, Limits(300, 300)):
            row.prefilled += count
        waiting = [row for row in waiting if row.prefilled < row.prefill_length]
        step += 1
    assert step == 134  # 150 tokens in each


def test_the_next_step_waits_for_requests_until_the_host_needs_its_time() -> None:
    seen = after([(1000, 0.050)] * 9)
    assert seen.spare_seconds([1000], 0.0) == pytest.approx(0.040)
    assert seen.spare_seconds([1000], 0.030) == pytest.approx(0.010)
    assert seen.spare_seconds([1000, 1000], 0.030) == pytest.approx(0.055)
    assert seen.spare_seconds([500], 0.0) == 0.0  # too short to wait in
    assert budget().spare_seconds([1000], 0.0) == 0.0


def test_tokens_do_not_depend_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)

    def limits(*_: object) -> Limits:
        tokens = draw.randrange(1, 60)
        return Limits(tokens, tokens + draw.randrange(20))

    monkeypatch.setattr(PromptBudget, "limits", limits)
    alone = engine_for(*MODELS["rope"], max_batch_size=1)
    check_same(alone, engine_for(*MODELS["rope"], max_batch_size=6), seed=11)


def test_recorded_sizes_leave_room_for_the_rows_that_decode() -> None:
    assert RECORDED(0) == list(TOKEN_BUCKETS)
    assert RECORDED(30)[0] == 64 - 32
    assert RECORDED(128)[0] == 192 - 128
