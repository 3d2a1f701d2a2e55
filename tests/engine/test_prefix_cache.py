"""Prompts that begin alike are computed once: what is found, what waits, what is kept and given up.

The decisions are seen in plans, without tensors; test_prefix_sharing has the answers of engines.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.prefix_cache import CachedPrefix, Prefix, PrefixCache, prefix_of
from launcher_scripts.engine.core.results import StepResult, TokenResult
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.scheduler import TOKENS_WORTH_A_STEP, Scheduler
from launcher_scripts.engine.messages.plan import Copy, Plan
from launcher_scripts.engine.model import kv_cache
from launcher_scripts.engine.model.kv_cache import ExtentAllocator, KVCache, LayerStates, TokenState
from launcher_scripts.kernels.quantization import FP8
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


def prefix(ids: Sequence[int], salt: bytes = b"", start: int = 0) -> Prefix:
    made = Prefix(salt, start=start)
    made.set_text(ids)
    return made


def kept(cache: PrefixCache, ids: Ids, length: int) -> Prefix:
    """What stays of a row with these ids that has come, run and ended."""
    start = cache.allocate(length)
    assert start is not None
    made = prefix(ids, start=start)
    cache.add(made)
    cache.keep(made, ids, length)
    return made


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


def test_a_kept_extent_is_cut_to_its_blocks_and_counts_as_free() -> None:
    cache = PrefixCache(100)
    first = kept(cache, text(40), 60)
    assert (first.tokens, cache.free_tokens) == (32, 100)
    assert cache.allocate(68) == 32  # beside it
    assert cache.find(prefix(text(80)).digests) == CachedPrefix(0, 32, 32)
    cache.free(32, 68)
    assert cache.allocate(100) == 0  # and in its place
    assert cache.find(first.digests).tokens == 0


def test_the_least_recently_used_is_given_up() -> None:
    cache = PrefixCache(96)
    texts = [kept(cache, text(32, seed), 32) for seed in range(3)]
    assert cache.find(texts[0].digests).tokens == 32
    assert cache.allocate(32) == texts[1].start
    assert [cache.find(each.digests).tokens for each in texts] == [32, 0, 32]


def test_what_others_have_is_not_kept_twice() -> None:
    cache = PrefixCache(200)
    long, short = kept(cache, text(64), 64), kept(cache, text(40), 40)
    assert (long.tokens, short.tokens) == (64, 0)
    assert cache.allocate(136) == 64


def test_nothing_is_given_up_for_a_row_that_must_wait_anyway() -> None:
    cache = PrefixCache(96)
    first = kept(cache, text(32), 32)
    assert cache.allocate(16) == 32
    assert cache.allocate(49) is None
    assert cache.find(first.digests).tokens == 32
    assert cache.allocate(48) == 48


def test_rows_get_a_gap_whenever_there_is_one_without_what_is_kept() -> None:
    draw, cache = random.Random(3), PrefixCache(300)
    held: list[Prefix] = []
    lengths: dict[Prefix, int] = {}
    refused = found = 0
    for number in range(3000):
        if held and draw.random() < 0.55:
            row = held.pop(draw.randrange(len(held)))
            ids = text(draw.randrange(lengths[row] + 1), seed=number % 4)
            found += cache.find(prefix(ids).digests).tokens > 0
            cache.keep(row, ids, lengths[row])
        else:
            length = draw.randrange(1, 120)
            plain = ExtentAllocator(300)
            plain._free = gaps((row.start, lengths[row]) for row in held)
            start = cache.allocate(length)
            assert (start is None) == (plain.allocate(length) is None)
            if start is None:
                refused += 1
                continue
            assert all(start + length <= r.start or r.start + lengths[r] <= start for r in held)
            held.append(Prefix(b"", start=start))
            lengths[held[-1]] = length
            cache.add(held[-1])
        assert cache.free_tokens == 300 - sum(lengths[row] for row in held)
        spans = [(row.start, lengths[row]) for row in held]
        spans += [(each.start, each.tokens) for each in cache._cached]
        assert sorted(cache._free) == gaps(spans)
    assert min(refused, found) > 50


def gaps(spans: Iterable[tuple[int, int]], capacity: int = 300) -> list[tuple[int, int]]:
    """What lies between spans (start, length), which never overlap."""
    found, end = [], 0
    for start, length in [*sorted(spans), (capacity, 0)]:
        assert start >= end
        if start > end:
            found.append((end, start - end))
        end = start + length
    return found


def row(prompt: Ids, output_len: int = 4, config: ModelConfig = CONFIG, **more: Any) -> Row:
    request = GenerateRequest(prompt, output_len, **more)
    made = Row(request, Future(), prompt, end_id=END)
    made.prefix = prefix_of(request, prompt, made.row_capacity, config)
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
    assert plan.copies == (Copy(first.start, second.start, 32),)
    assert parts(plan) == [(second.slot, 32, 11)]
    assert plan.starts[0].ids == second.prompt


def test_the_last_token_of_a_prompt_is_computed() -> None:
    scheduler = scheduler_with(row(text(32)))
    step(scheduler)
    scheduler.add(row(text(32)))
    assert parts(step(scheduler)) == [(1, 16, 16)]


def test_rows_that_come_together_compute_their_common_prefix_once() -> None:
    """64 clients with 1,000 tokens in common: one computes them, 63 copy them a step later."""
    system = text(1008)
    rows = [row((*system, *text(20, seed))) for seed in range(1, 65)]
    scheduler = scheduler_with(*rows)
    one, two = step(scheduler), step(scheduler)
    assert (len(one.starts), len(one.copies), len(one.prefill)) == (64, 0, 1)
    assert {copy.count for copy in two.copies} == {1008}
    assert len({copy.target for copy in two.copies}) == 63
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
    assert [copy.count for copy in plan.copies] == [64]  # of 79: the last token was not fed back


def test_a_row_that_is_cancelled_leaves_what_was_computed() -> None:
    first, waits = row(text(400)), row(text(400))
    scheduler = scheduler_with(first, waits, budget=100)
    step(scheduler)
    step(scheduler)
    assert first.future.cancel()
    plan = step(scheduler)
    assert [copy.count for copy in plan.copies] == [192]
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
    scheduler = scheduler_with(row(text(10), 8), row(text(64), 33), tokens=120)
    run_out(scheduler)
    scheduler.add(row((*text(64), *(5,) * 32, 1, 1), 20))
    plan = step(scheduler)
    ((copy, start),) = zip(plan.copies, plan.starts, strict=True)
    assert copy == Copy(17, start.start, 96)
    assert start.start == 0


def test_only_the_prompt_of_a_beam_search_is_kept() -> None:
    sampling = SamplingParameters(beam_width=2)
    beams = row(text(40), 60, sampling=sampling)
    scheduler = scheduler_with(beams)
    scheduler.plan()
    assert beams.future.cancel()
    scheduler.add(row((*text(40), 1), sampling=sampling))
    plan = scheduler.plan()
    assert [copy.count for copy in plan.copies] == [32]
    assert scheduler.used_tokens == 2 * 44


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
    assert (plan.copies, plan.prefill[0].count) == ((), 100)
    assert values(scheduler._statistics, names.PREFIX_QUERIES) == {"": 100}


def test_copied_tokens_are_counted() -> None:
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
            assert bool(scheduler.plan().copies) == (more is other)
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
    assert prefix_of(request, text(40), 44, t5_config(**GOOGLE)) is None


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_runs_are_copied_in_order_and_over_themselves(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", 8)
    states = {layer: LayerStates(TokenState(2, 2, 4)) for layer in range(2)}
    cache = KVCache(states, 100, dtype, torch.device("cpu"))
    (pool,) = cache.pools
    pool.copy_(torch.randn(pool.shape))
    cache.ids[:] = torch.arange(101)
    before = {layer: pools.keys.clone() for layer, pools in cache.layers.items()}
    cache.copy_runs([Copy(50, 45, 30), Copy(45, 10, 20), Copy(80, 45, 3), Copy(90, 90, 5)])
    expected = torch.arange(101)
    expected[45:75] = torch.arange(50, 80)
    expected[10:30] = torch.arange(50, 70)
    expected[45:48] = torch.arange(80, 83)
    assert torch.equal(cache.ids, expected)
    for layer, pools in cache.layers.items():
        assert torch.equal(pools.keys.float(), before[layer][:, expected].float())
