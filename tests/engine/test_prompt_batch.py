"""Prompts of a step as one array: exactly as large, or filled up to a recorded size."""

from __future__ import annotations

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Choice, Plan, PrefillPart, RowStart
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from launcher_scripts.engine.runner.prompt_batch import (
    TOKEN_BUCKETS,
    Nowhere,
    PackedPrompts,
    Sizes,
    bucket_sizes,
    unpacked,
)
from tests.engine.small_models import EagerGraphs, random_tensors, runner_for, small_config

CONFIG = small_config(end_id=67, max_positions=200)
TENSORS = random_tensors(CONFIG)
NOWHERE = Nowhere(token=400, slot=8)


def started(slot: int, start: int, length: int, **more: int) -> RowStart:
    ids = tuple(range(100 * slot, 100 * slot + length))
    return RowStart(slot, start, ids, -1, **more)


SPECIAL = (
    GenerateRequest((9, 8, 7), 3, return_context_logits=True),
    GenerateRequest((5, 6), 5, sampling=SamplingParameters(beam_width=3)),
)


def requests() -> list[GenerateRequest]:
    sampled = SamplingParameters(top_k=8, random_seed=3)
    return [
        GenerateRequest((1, 2, 3), 9),
        GenerateRequest(tuple(range(60)), 5),
        GenerateRequest((7,) * 70, 6, sampling=sampled),
        GenerateRequest((), 4),
        GenerateRequest(tuple(range(5)), 6, return_log_probs=True),
    ]


@pytest.mark.parametrize("at_once", [2048, 48])
def test_prompts_that_fill_a_bucket_give_the_same_tokens(monkeypatch, at_once):
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", at_once)
    answers = []
    for graphs in (None, EagerGraphs()):
        settings, runner = runner_for(CONFIG, TENSORS, max_batch_size=8, graphs=graphs)
        engine = Engine.from_runner(settings, lambda runner=runner: runner)
        futures = [engine.submit(request) for request in requests()]
        answers.append([future.result(60) for future in futures])
        engine.close()
    for plain, filled in zip(*answers, strict=True):
        assert filled.output_ids == plain.output_ids
        assert filled.cum_log_probs == pytest.approx(plain.cum_log_probs, abs=1e-4)
    assert prompts_of(graphs.asked)


def prompts_of(keys):
    """Those that are passes over prompts, as (sizes, longest, choice)."""
    return [rest for kind, *rest in keys if kind == "prompts"]


def test_what_more_is_asked_than_tokens_is_launched():
    graphs = EagerGraphs()
    settings, runner = runner_for(CONFIG, TENSORS, max_batch_size=8, graphs=graphs)
    engine = Engine.from_runner(settings, lambda: runner)
    for request in SPECIAL:
        engine.submit(request).result(60)
    engine.close()
    assert prompts_of(graphs.asked) == []


def test_parts_come_apart_as_they_were_packed():
    """A row that began before, one that ends, and one that has lost tokens of its session."""
    rows = [
        started(0, 10, 5),
        started(1, 100, 3, past=20, dropped=7),
        started(2, 200, 130),
    ]
    parts = [PrefillPart(0, 0, 5), PrefillPart(1, 20, 3), PrefillPart(2, 64, 60)]
    prompts = PackedPrompts(rows, parts)
    exact = prompts.sizes
    assert exact == Sizes(tokens=68, tiles=3, rows=3)
    batch = unpacked(prompts.to_device(torch.device("cpu"), NOWHERE, None), exact, prompts.spans)
    assert batch.ids.tolist() == [*range(5), *range(100, 103), *range(264, 324)]
    assert batch.positions.tolist() == [*range(5), 27, 28, 29, *range(64, 124)]
    assert batch.addresses.tolist() == [*range(10, 15), 120, 121, 122, *range(264, 324)]
    assert batch.spans.tiles.tolist() == [[0, 5, 10, 0], [5, 3, 100, 20], [8, 60, 200, 64]]
    assert (batch.row_slots.tolist(), batch.lengths.tolist()) == ([0, 1, 2], [5, 23, 124])
    assert batch.last.tolist() == [4, 7, 0]
    assert batch.finished.tolist() == [0, 1, NOWHERE.slot]


def test_what_fills_up_goes_nowhere():
    rows = [started(0, 10, 65), started(1, 80, 2)]
    prompts = PackedPrompts(rows, [PrefillPart(0, 0, 65), PrefillPart(1, 0, 2)])
    sizes = prompts.bucket(8)
    assert sizes == Sizes(tokens=128, tiles=18, rows=16)
    batch = unpacked(prompts.to_device(torch.device("cpu"), NOWHERE, sizes), sizes, prompts.spans)
    assert set(batch.addresses[67:].tolist()) == {NOWHERE.token}
    assert set(batch.row_slots[2:].tolist()) == set(batch.finished[2:].tolist()) == {NOWHERE.slot}
    assert batch.spans.tiles[2].tolist() == [67, -61, 0, 0]
    assert not batch.spans.tiles[3:].any()
    assert not batch.lengths[2:].any()


def test_a_shape_is_recorded_on_nobodys_tokens():
    """What it runs on, and what it leaves, is of the padding alone."""
    graphs = EagerGraphs()
    _, runner = runner_for(CONFIG, TENSORS, max_batch_size=8, graphs=graphs)
    found = [shape for shape in runner.shapes_to_record() if shape.prompt]
    shapes = tuple(shape for shape in found if not shape.decoding)
    mixed = tuple(shape for shape in found if shape.decoding)
    assert [shape.decoding for shape in mixed] == [1, 2, 4, 8]
    assert len(set(shapes)) == 4 * 2 * len(TOKEN_BUCKETS)
    before = [runner.states.length.clone(), runner.decoder.cache.ids.clone()]
    runner.execute(Plan(record=(shapes[0], mixed[2])))
    first, second = prompts_of(graphs.recorded)
    assert first == [Sizes(64, 2, 1), 0, Choice.GREEDY]
    assert second == [Sizes(60, 2, 1, 4), 256, Choice.GREEDY]
    tokens = runner.decoder.cache.capacity
    assert torch.equal(runner.states.length, before[0])
    assert torch.equal(runner.decoder.cache.ids[:tokens], before[1][:tokens])


@pytest.mark.parametrize(
    ("lengths", "tokens", "places"),
    [
        ([2048], 2048, 1),
        ([1] * 16, 64, 16),
        ([2] * 17, 64, 24),
        ([5] * 32, 192, 32),
        ([1] * 60, 64, 64),
        ([20] * 50, 1024, 64),
    ],
)
def test_buckets_have_places_for_all_rows(lengths, tokens, places):
    sizes = bucket_of(lengths)
    assert sizes == bucket_sizes(tokens, places)


def test_larger_steps_fit_no_bucket():
    assert bucket_of([2049]) is None


def bucket_of(lengths: list[int]) -> Sizes | None:
    """Of a pass over whole prompts of these lengths."""
    rows = [started(slot, 3000 * slot, length) for slot, length in enumerate(lengths)]
    parts = [PrefillPart(row.slot, 0, len(row.ids)) for row in rows]
    return PackedPrompts(rows, parts).bucket(8)
