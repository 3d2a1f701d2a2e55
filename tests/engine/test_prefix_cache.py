"""Prompts that begin alike are computed once: what is found, what waits, what is kept and given up.

The decisions are seen in plans, without tensors; test_prefix_sharing has the answers of engines.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.prefix_cache import CachedPrefix, Prefix, PrefixCache, prefix_of
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.row_allocator import TOKENS_WORTH_A_STEP
from launcher_scripts.engine.core.scheduler import Scheduler
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.engine.model.kv_cache import Block
from launcher_scripts.models.adapters import Adapters, PromptTask
from launcher_scripts.models.family import ModelConfig
from tests.engine.small_models import (
    small_config,
)
from tests.engine.small_t5 import GOOGLE, t5_config
from tests.engine.test_statistics import values

CONFIG = small_config(end_id=67, max_positions=400)
END = 1000
Ids = tuple[int, ...]


def text(length: int, seed: int = 0) -> Ids:
    source = random.Random(seed)
    return tuple(source.randrange(67) for _ in range(length))


def prefix(ids: Sequence[int], salt: bytes = b"") -> Prefix:
    made = Prefix(salt, 16)
    made.set_text(ids)
    return made


def kept(cache: PrefixCache, ids: Ids, length: int) -> list[Block]:
    """What stays of a row with these ids that has come, run and ended."""
    blocks = cache.allocate(cache.blocks(length))
    assert blocks is not None
    digests = prefix(ids).digests
    cache.publish(blocks, digests)
    for block in blocks[: len(digests)]:
        block.computed = True
    cache.free(blocks)
    return blocks


def found(cache: PrefixCache, ids: Ids) -> int:
    return cache.find(prefix(ids).digests).tokens


def test_a_digest_says_all_that_stands_before() -> None:
    whole = prefix(text(64))
    assert len(prefix(text(47)).digests) == 2
    assert whole.digests[:2] == prefix(text(47)).digests
    assert (
        len({*whole.digests, *prefix((1, *text(63))).digests, *prefix(text(64), b"x").digests})
        == 12
    )
    grown = prefix(text(40))
    grown.set_text(text(64))
    assert grown.digests == whole.digests
    grown.set_text(text(33))
    assert grown.digests == whole.digests[:2]
    assert prefix((-1, -2, *text(14))).digests != prefix((-1, -3, *text(14))).digests


def test_full_blocks_of_a_row_that_ended_are_found_and_count_as_free() -> None:
    cache = PrefixCache(96, 16)
    first = kept(cache, text(40), 60)
    assert cache.free_blocks == 6
    assert cache.find(prefix(text(80)).digests) == CachedPrefix(tuple(first[:2]), 32, 32)
    beside = cache.allocate(4)
    assert not {*first[:2]} & {*beside}
    assert found(cache, text(40)) == 32
    cache.free(beside)
    assert len(cache.allocate(6)) == 6  # and in their place
    assert found(cache, text(40)) == 0


def test_the_least_recently_used_is_given_up_from_its_end() -> None:
    cache = PrefixCache(96, 16)
    texts = [text(32, seed) for seed in range(3)]
    for ids in texts:
        kept(cache, ids, 32)
    used = cache.find(prefix(texts[0]).digests).blocks
    cache.share(used)
    cache.free(used)
    cache.allocate(1)
    assert [found(cache, ids) for ids in texts] == [32, 16, 32]
    cache.allocate(1)
    assert [found(cache, ids) for ids in texts] == [32, 0, 32]


def test_what_others_have_is_not_kept_twice() -> None:
    cache = PrefixCache(96, 16)
    first = cache.allocate(2)
    second = kept(cache, text(32), 32)
    cache.publish(first, prefix(text(32)).digests)
    cache.free(first)
    assert cache.find(prefix(text(32)).digests).blocks == tuple(second)
    assert len(cache._unused) == 2


def test_nothing_is_given_up_for_a_row_that_must_wait_anyway() -> None:
    cache = PrefixCache(96, 16)
    kept(cache, text(32), 32)
    cache.allocate(1)
    assert cache.allocate(6) is None
    assert found(cache, text(32)) == 32
    assert len(cache.allocate(5)) == 5


def test_a_block_that_was_not_computed_is_not_found_again() -> None:
    cache = PrefixCache(96, 16)
    blocks = cache.allocate(2)
    cache.publish(blocks, prefix(text(32)).digests)
    blocks[0].computed = True
    assert cache.find(prefix(text(32)).digests)[1:3] == (16, 32)
    cache.free(blocks)
    assert cache.find(prefix(text(32)).digests)[1:3] == (16, 16)


@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 90))))
def test_every_block_is_free_or_used_as_often_as_it_is_counted(
    steps: list[tuple[int, int, int]],
) -> None:
    """Whatever comes, shares, ends and is forgotten; what is found holds what is sought."""
    cache, rows, holds = PrefixCache(160, 16), [], {}
    for action, number, length in steps:
        if action < 3:
            ids = text(length, number % 3)
            digests = prefix(ids).digests
            shared = cache.find(digests).blocks
            assert [holds[block] for block in shared] == digests[: len(shared)]
            cache.share(shared)
            blocks = cache.allocate(cache.blocks(length) - len(shared))
            if blocks is None:
                cache.free(shared)
                continue
            row = [*shared, *blocks]
            cache.publish(row, digests)
            holds |= dict(zip(row, digests, strict=False))
            rows.append(row)
        elif action < 5 and rows:
            row = rows[number % len(rows)]
            for block in row[: length // 16]:
                block.computed = True
            if action == 4:
                cache.free(rows.pop(number % len(rows)))
        elif action == 5 and number == 0:
            cache.clear()
            assert not any(found(cache, text(90, seed)) for seed in range(3))
        counts = Counter(block for row in rows for block in row)
        idle = [*cache._free, *cache._unused]
        assert len({*idle, *counts}) == len(idle) + len(counts) == 10
        assert all(block.rows == count for block, count in counts.items())
        assert not any(block.rows for block in idle)
        assert all(vars(block) == vars(Block(block.number)) for block in cache._free)


def row(prompt: Ids, output_len: int = 4, config: ModelConfig = CONFIG, **more: Any) -> Row:
    request = GenerateRequest(prompt, output_len, **more)
    made = Row(request, Future(), prompt, end_id=END)
    made.prefix = prefix_of(request, prompt, made.row_capacity, config, 16)
    return made


def scheduler_with(
    *rows: Row, slots: int = 100, tokens: int = 100_000, budget: int = 8192
) -> Scheduler:
    scheduler = Scheduler(slots, tokens, budget)
    for each in rows:
        scheduler.add(each)
    return scheduler


def step(scheduler: Scheduler, token: int = 5) -> Plan:
    """Plan a step and take its tokens."""
    plan = scheduler.plan()
    assert plan is not None
    complete = {row.slot for row in scheduler.rows if row.slots and row.launched}
    slots = [part.slot for part in plan.prefill if part.slot in complete]
    slots += [*plan.decode, *plan.apart]

    class Known(StepResult):
        def read(self):
            yield [TokenResult(slot, token, None) for slot in slots]

    scheduler.apply(Known())
    return plan


def parts(plan: Plan) -> list[tuple[int, int, int]]:
    """Slot, past and count of the parts of prompts."""
    return [(part.slot, part.past, part.count) for part in plan.prefill]


def run_out(scheduler: Scheduler) -> None:
    while scheduler.rows:
        step(scheduler)


def test_a_prompt_begins_after_what_a_row_in_flight_has_computed() -> None:
    first, second = row(text(50)), row((*text(40), 1, 2, 3))
    scheduler = scheduler_with(first)
    step(scheduler)
    scheduler.add(second)
    plan = step(scheduler)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    assert scheduler.used_tokens == 16 * (4 + 1)
    assert parts(plan) == [(second.slot, 32, 11)]
    assert plan.starts[0].ids == second.prompt


def test_the_last_token_of_a_prompt_is_computed() -> None:
    scheduler = scheduler_with(row(text(32)))
    step(scheduler)
    scheduler.add(row(text(32)))
    assert parts(step(scheduler)) == [(1, 16, 16)]


def test_rows_that_come_together_compute_their_common_prefix_once() -> None:
    """64 clients with 1,000 tokens in common: one computes them, 63 share them a step later."""
    system = text(1008)
    rows = [row((*system, *text(20, seed))) for seed in range(1, 65)]
    scheduler = scheduler_with(*rows)
    one, two = step(scheduler), step(scheduler)
    assert (len(one.starts), len(one.prefill)) == (64, 1)
    assert {part.past for part in two.prefill} == {1008}
    assert scheduler.used_tokens == 1008 + 64 * 32
    assert sum(part.count for plan in (one, two) for part in plan.prefill) == 1008 + 64 * 20
    assert all(each.tokens for each in rows)


def test_a_row_does_not_wait_for_little_or_for_what_it_does_not_share() -> None:
    shared = text(TOKENS_WORTH_A_STEP - 16)
    rows = [row((*shared, *text(30, seed))) for seed in (1, 2)]
    rows.append(row(text(200, seed=3)))
    plan = step(scheduler_with(*rows))
    assert [part.count for part in plan.prefill] == [78, 78, 200]


def test_a_row_that_waits_has_its_place_already() -> None:
    """So nobody who came later takes it."""
    first, second, late = row(text(200)), row(text(200)), row(text(50, seed=1))
    scheduler = scheduler_with(first, second, slots=2)
    scheduler.add(late)
    step(scheduler)
    assert (second.started, second.slots, late.slots) == (False, (1,), ())
    step(scheduler)
    assert second.started


def test_a_row_waits_only_for_those_that_came_before() -> None:
    """Whatever comes later with the same beginning."""
    rows = [row((*text(200), *text(100, seed=number // 2))) for number in range(40)]
    scheduler = scheduler_with(rows[0], rows[1], budget=128)
    for number, late in enumerate(rows[2:]):
        scheduler.add(late)
        step(scheduler)
        if number == 5:
            assert rows[0].tokens and rows[1].tokens
    run_out(scheduler)
    assert all(len(each.tokens) == 4 for each in rows)


def test_a_long_prompt_is_shared_as_far_as_it_has_come() -> None:
    first, second = row(text(1000)), row((*text(600), 1))
    scheduler = scheduler_with(first, second, budget=300)
    counts = [parts(step(scheduler)) for _ in range(4)]
    assert counts == [
        [(0, 0, 300)],
        [(0, 300, 300)],
        [(0, 600, 291), (1, 592, 9)],  # half of a step at most is for others than the first
        [(0, 891, 109)],
    ]


def test_the_next_turn_of_a_chat_finds_what_was_generated() -> None:
    first = row(text(30), output_len=50)
    scheduler = scheduler_with(first)
    run_out(scheduler)
    history = (*text(30), *(5,) * 50)
    scheduler.add(row((*history, 1, 2)))
    plan = step(scheduler)
    assert parts(plan) == [(0, 64, 18)]  # of 79: the last token was not fed back


def test_a_row_that_is_cancelled_leaves_what_was_computed() -> None:
    first, waits = row(text(400)), row(text(400))
    scheduler = scheduler_with(first, waits, budget=100)
    step(scheduler)
    step(scheduler)
    assert first.future.cancel()
    plan = step(scheduler)
    assert parts(plan) == [(1, 192, 100)]
    assert waits.future.cancel()
    assert scheduler.plan() is None
    assert scheduler.used_tokens == 0


def test_a_row_that_waits_may_be_cancelled() -> None:
    rows = [row(text(200)), row(text(200))]
    scheduler = scheduler_with(*rows)
    step(scheduler)
    assert rows[1].future.cancel()
    run_out(scheduler)
    assert scheduler.used_tokens == 0


def test_a_row_may_take_the_place_where_its_prefix_is() -> None:
    """The cache has room for one row, and that goes on with the last one's text."""
    scheduler = scheduler_with(row(text(10), 8), row(text(64), 33), tokens=128)
    run_out(scheduler)
    scheduler.add(row((*text(64), *(5,) * 32, 1, 1), 20))
    assert parts(step(scheduler)) == [(1, 96, 2)]


def test_only_the_prompt_of_a_beam_search_is_kept() -> None:
    sampling = SamplingParameters(beam_width=2)
    beams = row(text(40), 60, sampling=sampling)
    scheduler = scheduler_with(beams)
    scheduler.plan()
    assert beams.future.cancel()
    scheduler.add(row((*text(40), 1), sampling=sampling))
    plan = scheduler.plan()
    assert [(part.past, part.count) for part in plan.prefill] == [(32, 9)]
    (beams,) = scheduler.rows
    assert beams.blocks[:2] == beams.copies[0][:2]
    assert scheduler.used_tokens == 32 + 2 * 16


@pytest.mark.parametrize(
    "asks",
    [
        {"return_context_logits": True},
        {"return_context_embeddings": True},
        {"num_prompt_log_probs": 0},
    ],
)
def test_what_is_asked_of_all_tokens_is_computed(asks: dict[str, Any]) -> None:
    scheduler = scheduler_with(row(text(100)))
    step(scheduler)
    scheduler.add(row(text(100), **asks))
    plan = step(scheduler)
    assert plan.prefill[0].count == 100
    assert values(scheduler._statistics, names.PREFIX_QUERIES) == {"": 100}


def test_cached_tokens_are_counted() -> None:
    scheduler = scheduler_with(*(row((*text(100), *text(10, seed))) for seed in range(3)))
    run_out(scheduler)
    assert values(scheduler._statistics, names.PREFIX_QUERIES) == {"": 330}
    assert values(scheduler._statistics, names.PREFIX_HITS) == {"": 2 * 96}


ADAPTED = small_config(
    end_id=67,
    parts=Adapters(
        prompt_tasks=(PromptTask("a", 3), PromptTask("b", 3)),
        ia3_num_tasks=2,
        lora_names=("sql", "law"),
        lora_rank=2,
    ),
)
SALTS = (
    {},
    {"cache_salt": 1},
    {"cache_salt": 2},
    {"ia3_task": 0},
    {"ia3_task": 1},
    {"lora_adapter": 0},
    {"lora_adapter": 1},
    {"prompt_task": 0},
    {"prompt_task": 1},
    {"prompt_embedding": torch.zeros(3, 32)},
    {"prompt_embedding": torch.ones(3, 32)},
    {"prompt_embedding": torch.ones(3, 32), "cache_salt": 1},
)


def test_what_else_decides_keys_and_values_is_a_salt() -> None:
    assert len({row(text(16), config=ADAPTED, **more).prefix.salt for more in SALTS}) == len(SALTS)
    for more in SALTS:
        scheduler = scheduler_with(row(text(40), config=ADAPTED, **more))
        run_out(scheduler)
        for other in SALTS:
            scheduler.add(row(text(40), config=ADAPTED, **other))
            assert bool(scheduler.plan().prefill[0].past) == (more is other)
            scheduler.rows[0].future.cancel()
            scheduler = scheduler_with(row(text(40), config=ADAPTED, **more))
            run_out(scheduler)


def test_rows_that_turn_at_other_speeds_share_nothing() -> None:
    """Of LongRoPE those that may become longer than the model was made for, of dynamic scaling each
    row that does."""
    scalings = {
        "longrope": {"rotary_factors": "1,1,1,1", "rotary_long_factors": "2,2,2,2"},
        "dynamic": {"rotary_scaling_factor": 2.0},
    }
    for name, more in scalings.items():
        config = small_config(
            position_embedding="rope", rotary_scaling=name, rotary_original_positions=40, **more
        )
        made = [row(text(20), length, config).prefix for length in (1, 21, 22, 40)]
        salts = [each and each.salt for each in made]
        assert salts[0] == salts[1] != salts[2] == salts[3]
        assert (salts[2] is None) == (name == "dynamic")


def test_an_encoder_decoder_shares_nothing() -> None:
    request = GenerateRequest(text(40), 4)
    assert prefix_of(request, text(40), 44, t5_config(**GOOGLE), 16) is None
