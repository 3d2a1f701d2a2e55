"""Beam searches beside other rows: their settings, their places, their progress."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.hypotheses import Hypotheses
from launcher_scripts.engine.core.results import Candidate
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine
from launcher_scripts.kernels import reference
from tests.engine.reference_beams import Settings, Text, search
from tests.engine.small_agm import agm_config, agm_tensors
from tests.engine.small_models import (
    EagerGraphs,
    context_logits,
    engine_for,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import SOURCE, VARIANTS, decoder_logits, t5_config, t5_tensors

END = 3
GPT = small_config(end_id=END)
ALIBI = small_config(end_id=END, position_embedding="alibi", norm_placement="post")
AGM = agm_config(end_id=END)
PROMPT = (5, 60, 11, 11, 2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = engine_for(GPT, random_tensors(GPT), max_batch_size=8)
    yield loaded
    loaded.close()


def request(ids: Text, count: int, width: int, **more: object) -> GenerateRequest:
    sampling = SamplingParameters(beam_width=width, **more)
    return GenerateRequest(ids, count, sampling, return_log_probs=True)


def run(engine: Engine, *args: object, **more: object) -> GenerateOutput:
    return engine.submit(request(*args, **more)).result(60)


def check(output: GenerateOutput, requested: list[tuple[Text, float]]) -> None:
    assert [beam.output_ids for beam in output.beams] == [text for text, _ in requested]
    for beam, (_, total) in zip(output.beams, requested, strict=True):
        assert beam.cum_log_probs == pytest.approx(total, abs=1e-4)
        assert sum(beam.output_log_probs) == pytest.approx(total, abs=1e-4)


def penalized(text: Text, logits: torch.Tensor) -> torch.Tensor:
    """temperature 0.7, then repetition_penalty 1.5."""
    scaled = logits / (0.7 + 1e-6)
    seen = torch.tensor(sorted(set(text)))
    values = scaled[seen]
    return scaled.index_copy(0, seen, torch.where(values < 0, values * 1.5, values / 1.5))


def less_present(text: Text, logits: torch.Tensor) -> torch.Tensor:
    """presence_penalty 2."""
    seen = torch.tensor(sorted(set(text)))
    return logits.index_add(0, seen, torch.full((len(seen),), -2.0))


SETTINGS = {
    "plain": ({}, Settings(4, 9, END)),
    "length": ({"len_penalty": 1.5}, Settings(4, 9, END, 1.5)),
    "diverse": ({"beam_search_diversity_rate": 0.7}, Settings(4, 9, END, diversity=0.7)),
    "penalty_per_sibling": (
        {"beam_search_diversity_rate": -0.5, "len_penalty": 1.0},
        Settings(3, 9, END, 1.0, -0.5),
    ),
    "repetition": (
        {"temperature": 0.7, "repetition_penalty": 1.5},
        Settings(4, 9, END, change=penalized),
    ),
    "presence": ({"presence_penalty": 2.0}, Settings(5, 9, END, change=less_present)),
    "wide": ({}, Settings(8, 6, END)),
}


# Every setting with a decoder alone and behind an encoder, and every kind with two settings.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            marks=[]
            if kind in ("gpt", "t5") or name in ("length", "penalty_per_sibling")
            else [pytest.mark.slow],
        )
        for kind in ("gpt", "alibi", "agm", "t5")
        for name in SETTINGS
    ],
)
def test_a_search_is_the_plain_one(name, kind):
    if kind == "t5":
        config = t5_config(**VARIANTS["google"], end_id=END)
        engine = engine_for(config, t5_tensors(config))
        prompt, ids = (config.start_id,), SOURCE

        def logits_after(text: Text) -> torch.Tensor:
            return decoder_logits(engine, SOURCE, text)[-1]
    else:
        config = {"gpt": GPT, "alibi": ALIBI, "agm": AGM}[kind]
        tensors = agm_tensors(AGM) if config is AGM else random_tensors(config)
        engine = engine_for(config, tensors)
        prompt = ids = PROMPT

        def logits_after(text: Text) -> torch.Tensor:
            return context_logits(engine, text)[-1]

    parameters, settings = SETTINGS[name]
    got = run(engine, ids, settings.count, settings.width, **parameters)
    check(got, search(logits_after, prompt, settings))
    engine.close()


def mixed_requests() -> list[GenerateRequest]:
    source = random.Random(4)
    rows = []
    for index in range(24):
        prompt = tuple(source.randrange(67) for _ in range(source.randrange(1, 20)))
        width = (1, 4, 2, 1, 7, 3)[index % 6]
        plain = {"top_k": 8 * (index % 2), "random_seed": index} if width == 1 else {}
        more = {"no_repeat_ngram_size": index % 4, "len_penalty": 0.5, "min_length": index % 5}
        rows.append(request(prompt, source.randrange(1, 14), width, **plain, **more))
    return rows


def texts(output: GenerateOutput) -> list[Text]:
    return [beam.output_ids for beam in output.hypotheses]


@pytest.mark.parametrize("max_tokens", [None, 230])
def test_searches_of_all_widths_and_other_rows_run_together(engine, max_tokens):
    """Neighbours change nothing, also where rows wait for slots and for the cache."""
    rows = mixed_requests()
    alone = [texts(engine.submit(row).result(60)) for row in rows]
    assert [len(beams) for beams in alone] == [row.sampling.beam_width for row in rows]
    crowd = engine_for(GPT, random_tensors(GPT), max_batch_size=9, max_tokens=max_tokens)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    futures = {index: crowd.submit(rows[index]) for index in order}
    together = [texts(futures[index].result(60)) for index in range(len(rows))]
    crowd.close()
    assert together == alone


def on_a_device(
    rows: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch, max_batch_size: int
) -> tuple[list[list[Text]], EagerGraphs]:
    """What rows get that come together, and the graphs that were asked for."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    monkeypatch.setattr(
        "launcher_scripts.kernels.reference_sampling.looking_is_free", lambda _: False
    )
    graphs = EagerGraphs()
    settings, runner = runner_for(
        GPT, random_tensors(GPT), max_batch_size=max_batch_size, graphs=graphs
    )
    device = Engine.from_runner(settings, lambda: runner)
    futures = [device.submit(row) for row in rows]
    got = [texts(future.result(60)) for future in futures]
    device.close()
    return got, graphs


def test_as_on_a_device(engine, monkeypatch):
    """A step is launched before the last is read, rows are padded, nothing looks at the cache."""
    rows = mixed_requests()
    wanted = [texts(engine.submit(row).result(60)) for row in rows]
    got, _ = on_a_device(rows, monkeypatch, 16)
    assert got == wanted


def test_searches_of_one_kind_are_a_graph_with_their_ranking(engine, monkeypatch):
    """Whole searches fill it up; one that ends leaves the others in another graph."""
    rules = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "temperature": 0.7}
    prompts = (PROMPT, (9, 4), (1, 2, 3, 4, 60, 61))
    rows = [request(ids, 9 + 3 * len(ids), 4, **rules) for ids in prompts]
    wanted = [texts(engine.submit(row).result(60)) for row in rows]
    got, graphs = on_a_device(rows, monkeypatch, 17)
    assert got == wanted
    ranked = {key[0] for key in graphs.asked if len(key) == 4}
    assert {4, 16} <= ranked


def test_a_search_of_width_one_is_greedy(engine):
    greedy = engine.submit(GenerateRequest(PROMPT, 12)).result(60)
    assert run(engine, PROMPT, 12, 1).output_ids == greedy.output_ids
    assert greedy.beams == ()


def test_nothing_asked_for_needs_no_search(engine):
    output = run(engine, PROMPT, 0, 5)
    assert (output.output_ids, texts(output)) == ((), [()])


def test_a_search_waits_for_all_of_its_places(engine):
    """One slot is taken, so a search of all eight waits, and so does what came after it."""
    order: SimpleQueue[str] = SimpleQueue()

    def submit(name: str, row: GenerateRequest) -> None:
        engine.submit(row).add_done_callback(lambda _: order.put(name))

    submit("first", GenerateRequest(PROMPT, 40, end_id=1000))
    submit("search", request(PROMPT, 2, 8))
    submit("last", GenerateRequest(PROMPT, 1))
    assert [order.get(timeout=60) for _ in range(3)] == ["first", "search", "last"]


def test_a_cancelled_search_gives_back_all_of_its_places():
    engine = engine_for(GPT, random_tensors(GPT), max_batch_size=8, max_tokens=8 * 80)
    for _ in range(3):
        search = engine.submit(request(PROMPT, 70, 8, min_length=70))
        time.sleep(0.02)
        assert search.cancel()
    assert len(texts(run(engine, PROMPT, 70, 8))) == 8
    engine.close()


def test_clients_come_and_go():
    """Rows of all kinds from six threads, some cancelled; at the end every place is free."""
    crowd = engine_for(GPT, random_tensors(GPT), max_batch_size=20, max_tokens=960)
    rows = mixed_requests()
    wanted = [texts(crowd.submit(row).result(60)) for row in rows]
    wrong: list[int] = []

    def ask(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(25):
            index = source.randrange(len(rows))
            future = crowd.submit(rows[index])
            if source.random() < 0.25:
                time.sleep(source.random() * 0.01)
                future.cancel()
            with suppress(CancelledError):
                if texts(future.result(60)) != wanted[index]:
                    wrong.append(index)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    everything = request(PROMPT, 41, 20)  # 20 slots, 20 * 3 blocks
    assert len(texts(crowd.submit(everything).result(60))) == 20
    crowd.close()


def test_progress_holds_the_best_hypotheses_so_far(engine):
    seen: list[GenerateOutput] = []
    row = request(PROMPT, 6, 3, min_length=6)
    final = engine.submit(row, lambda snapshot: seen.append(snapshot.output())).result(60)
    assert [len(each.beams) for each in seen] == [3] * 5
    assert [{len(text) for text in texts(each)} for each in seen] == [{n} for n in range(1, 6)]
    for each in seen:
        totals = [beam.cum_log_probs for beam in each.beams]
        assert totals == sorted(totals, reverse=True)
        assert each.output_ids == each.beams[0].output_ids
    assert [len(text) for text in texts(final)] == [6] * 3


def test_prompts_longer_than_a_step_are_shared_by_all_hypotheses(monkeypatch):
    from launcher_scripts.engine.runner.loading import PREFILL_TOKENS

    whole = engine_for(GPT, random_tensors(GPT))
    prompt = tuple(range(60))
    wanted = texts(run(whole, prompt, 8, 5))
    whole.close()
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 7)
    monkeypatch.setattr("launcher_scripts.kernels.reference_sampling.COPIED_TOKENS", 16)
    pieces = engine_for(GPT, random_tensors(GPT))
    assert texts(run(pieces, prompt, 8, 5)) == wanted
    pieces.close()


def test_tokens_that_all_hypotheses_share_are_not_copied(monkeypatch):
    """Long searches copy few of their tokens, and find the same."""
    config = small_config(end_id=67)
    copied: list[int] = []
    original = reference.reorder_beams

    def counting(*arguments: Any) -> None:
        copied.append(arguments[-1])
        original(*arguments)

    monkeypatch.setattr(reference, "reorder_beams", counting)
    engine = engine_for(config, random_tensors(config))
    got = texts(run(engine, PROMPT, 80, 4))
    less, copied[:] = sum(copied), []
    monkeypatch.setattr("launcher_scripts.engine.core.hypotheses.LOOKUP_WINDOW", 0)
    assert texts(run(engine, PROMPT, 80, 4)) == got
    engine.close()
    assert sum(copied) == sum(range(1, 79))
    assert less < sum(copied) / 2


def candidate(parent: int, token: int, total: float, *, ends: bool = False) -> Candidate:
    return Candidate(parent, token, ends, total, total, total)


def test_only_the_best_of_a_step_may_end():
    """An end that is not among the W best is lost, and the next best goes on instead."""
    hypotheses = Hypotheses(2, 0.0, 5)
    hypotheses.take(
        [
            candidate(0, 7, -1.0),
            candidate(0, 8, -2.0),
            candidate(0, 0, -3.0, ends=True),
            candidate(0, 9, -4.0),
        ]
    )
    hypotheses.take(
        [
            candidate(1, 0, -2.5, ends=True),
            candidate(0, 5, -3.0),
            candidate(1, 6, -3.5),
            candidate(0, 0, -3.6, ends=True),
        ]
    )
    assert not hypotheses.finished
    best = [each.beam(log_probs=False).output_ids for each in hypotheses.best()]
    assert best == [(8, 0), (7, 5)]
    hypotheses.take(
        [
            candidate(1, 4, -3.6),
            candidate(0, 0, -3.7, ends=True),
            candidate(0, 2, -3.8),
            candidate(0, 1, -9.0),
        ]
    )
    best = [each.beam(log_probs=False).output_ids for each in hypotheses.best()]
    assert hypotheses.finished
    assert best == [(8, 0), (7, 5, 0)]


def test_shared_tokens_are_counted():
    source = random.Random(7)
    hypotheses = Hypotheses(3, 0.0, 100)
    running: list[Text] = [(), (), ()]
    for step in range(60):
        parents = [source.choice((0, 0, 0, 1, 2)) if step else 0 for _ in range(6)]
        candidates = [candidate(p, 10 + i, -step - i / 9) for i, p in enumerate(parents)]
        hypotheses.take(candidates)
        running = [(*running[each.parent], each.token) for each in candidates[:3]]
        same = [len(set(column)) == 1 for column in zip(*running, strict=True)]
        assert hypotheses.shared == (same.index(False) if False in same else len(same))
