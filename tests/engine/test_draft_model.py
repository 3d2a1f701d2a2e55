"""A draft model saves steps and changes no token, wherever its rows begin, move and wait."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.hypotheses import PromptLookup
from launcher_scripts.engine.core.row import Row
from launcher_scripts.engine.core.step_budget import plan_drafts
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine, EngineSettings
from launcher_scripts.engine.messages.plan import Draft, Plan, Proposal
from launcher_scripts.engine.runner.drafts import DraftModel
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS, open_checkpoints
from launcher_scripts.models.draft_heads import check_draft_model
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    load_engine,
    random_tensors,
    small_config,
    write_checkpoint,
)
from tests.engine.small_t5 import t5_config
from tests.engine.test_drafts import accepted, check_same, tried
from tests.engine.test_growing_rows import preemptions
from tests.engine.test_prefix_cache import CONFIG, text
from tests.engine.test_prefix_sharing import MODELS, TENSORS

Tensors = dict[str, np.ndarray]


def near(tensors: Tensors, noise: float = 0.001) -> Tensors:
    """Those of a model that often, but not always, agrees."""
    generator = np.random.default_rng(7)
    return {
        name: values + generator.normal(0, noise, values.shape).astype(np.float32)
        for name, values in tensors.items()
    }


SMALLER = small_config(
    end_id=67,
    max_positions=200,
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    position_embedding="alibi",
)


@pytest.fixture
def no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft model make every draft."""
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())


def row_of(prompt: int, answer: int, count: int, prefix: tuple[int, ...] = ()) -> Row:
    """A row that has its place and has seen all tokens launched."""
    request, ids = GenerateRequest((), 50, num_speculative_tokens=count), (*prefix, *range(prompt))
    row = Row(request, Future[GenerateOutput](), ids, 66, slots=(3,), start=0)
    row.tokens = list(range(100, 100 + answer))
    row.prefilled, row.launched = len(ids), answer
    row.reserve(row.row_capacity)
    return row


def test_a_draft_model_reads_the_row_and_proposes() -> None:
    row = row_of(5, 1, 4)
    drafts, proposals = plan_drafts([row], 100)
    assert proposals == (Proposal(3, 0, (0, 1, 2, 3, 4, 100), 4),)
    assert drafts == (Draft(3, 5, (100,), 4),)
    assert drafts[0].tokens == 5
    assert drafts[0].foretold == 4


@pytest.mark.parametrize(("right", "unread"), [(0, 1), (2, 1), (3, 1), (4, 2)])
def test_it_remembers_what_was_right(right: int, unread: int) -> None:
    """The last token that it proposes it has not read, nor the one behind those that came."""
    row = row_of(5, 1, 4)
    plan_drafts([row], 100)
    row.tokens += range(200, 201 + right)
    row.end_draft(right)
    (proposal,) = plan_drafts([row], 100).proposals
    assert proposal.ids == tuple(row.tokens[-unread:])
    assert proposal.past == 5 + len(row.tokens) - unread


def test_a_long_prompt_is_read_in_parts() -> None:
    row = row_of(25, 1, 4)
    other = row_of(4, 1, 4)
    for past in (0, 10):
        drafts, proposals = plan_drafts([row, other], 10)
        assert drafts == ()
        assert proposals == (Proposal(3, past, tuple(range(past, past + 10)), 0),)
        assert row.draft is None
    drafts, proposals = plan_drafts([row, other], 10)
    assert [each.ids for each in proposals] == [(20, 21, 22, 23, 24, 100), (0, 1, 2, 3)]
    assert [each.count for each in proposals] == [4, 0]
    assert drafts == (row.draft,)


@pytest.mark.parametrize(("copied", "tokens"), [(8, 100), (7, 100), (2, 0)])
def test_a_long_text_that_comes_again_is_copied(copied: int, tokens: int) -> None:
    """A short one only where there is no draft model."""
    row = row_of(20, 0, 4)
    row.tokens = list(range(10 - copied, 10))
    row.launched = copied
    assert row.lookup is not None
    row.lookup.add(row.tokens)
    drafts, proposals = plan_drafts([row], tokens)
    if copied == 7:
        assert proposals[0].count == 4
        assert drafts[0].ids == (9,)
        return
    assert drafts == (Draft(3, 19 + copied, (9, 10, 11, 12, 13)),)
    assert proposals == ()
    row.end_draft(1)
    assert row.read_by_draft == 0


def test_a_short_text_is_enough_while_the_draft_model_reads() -> None:
    row = row_of(20, 0, 4)
    row.tokens, row.launched = [7, 8], 2
    assert row.lookup is not None
    row.lookup.add(row.tokens)
    drafts, proposals = plan_drafts([row], 10)
    assert drafts == (Draft(3, 21, (8, 9, 10, 11, 12)),)
    assert proposals == (Proposal(3, 0, tuple(range(10)), 0),)


def test_nothing_is_proposed_beyond_the_last_token_or_without_a_draft_model() -> None:
    row = row_of(5, 48, 4)
    assert plan_drafts([row], 100).proposals[0].count == 1
    assert plan_drafts([row_of(5, 49, 4)], 100) == ((), ())
    assert plan_drafts([row_of(5, 1, 0)], 100) == ((), ())
    assert plan_drafts([row_of(5, 1, 4)], 0) == ((), ())


def test_virtual_tokens_are_not_read() -> None:
    row = row_of(5, 1, 4, prefix=(-1, -2))
    assert plan_drafts([row], 100) == ((), ())


def test_a_row_that_loses_its_place_is_read_anew() -> None:
    row = row_of(5, 1, 4)
    plan_drafts([row], 100)
    row.slots, row.read_by_draft = (), 0
    row.tokens += [7, 8]
    row.end_draft(1)
    assert row.read_by_draft == 0


@pytest.mark.parametrize(
    ("model", "agrees"),
    [
        ("gpt", True),
        pytest.param("rope", True, marks=pytest.mark.slow),
        pytest.param("longrope", False, marks=pytest.mark.slow),
        ("window", False),
        ("latent", True),
        pytest.param("gpt", False, marks=pytest.mark.slow),
        pytest.param("rope", False, marks=pytest.mark.slow),
        pytest.param("longrope", True, marks=pytest.mark.slow),
        pytest.param("window", True, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, model: str, agrees: bool
) -> None:
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 30)
    config, tensors = MODELS[model]
    draft = (config, near(tensors)) if agrees else (SMALLER, random_tensors(SMALLER))
    plain = engine_for(config, tensors)
    drafting = engine_for(config, tensors, max_batch_size=9, draft=draft)
    check_same(plain, drafting, seed=len(model), lower=10 if agrees else -1)


@pytest.mark.usefixtures("no_lookup")
def test_most_tokens_of_a_model_that_is_near_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes are graphs, and a step is launched before the last one's tokens come."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    plain, graphs = engine_for(CONFIG, TENSORS), EagerGraphs()
    drafting = engine_for(
        CONFIG, TENSORS, graphs=graphs, max_batch_size=9, draft=(CONFIG, near(TENSORS))
    )
    check_same(plain, drafting, 1)
    assert accepted(drafting) > 0.5 * tried(drafting)


def all_foretold(engine: Engine, requests: list[GenerateRequest]) -> None:
    """By a draft model that is the model itself, whatever happens to the rows meanwhile."""
    wanted = [engine.submit(replace(each, num_speculative_tokens=0)) for each in requests]
    answers = [future.result(60).output_ids for future in wanted]
    futures = [engine.submit(request) for request in requests]
    for request in requests[::4]:
        engine.submit(request).cancel()
    assert [future.result(60).output_ids for future in futures] == answers
    assert engine.cache_tokens_used == 0
    engine.close()


@pytest.mark.usefixtures("no_lookup")
@pytest.mark.parametrize(
    ("tokens", "caching", "budget", "ahead"),
    [(2000, False, 2048, 0), (2000, True, 20, 0), (170, False, 2048, 1), (170, True, 50, 1)],
    ids=["alone", "prefixes, parts", "moved", "moved, prefixes, parts"],
)
def test_the_model_itself_foretells_everything(
    monkeypatch: pytest.MonkeyPatch, tokens: int, caching: bool, budget: int, ahead: int
) -> None:
    """So its cache has the right keys wherever a row begins, moves to, or is computed again."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", ahead)
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", budget)
    draw, stem = random.Random(tokens), text(33, 5)
    engine = engine_for(
        CONFIG,
        TENSORS,
        max_tokens=tokens,
        max_batch_size=12,
        enable_prefix_caching=caching,
        draft=(CONFIG, TENSORS),
    )
    requests = [
        GenerateRequest(
            (*draw.choice(((), stem)), *text(draw.randrange(2, 20), draw.random())),
            draw.randrange(2, 60),
            num_speculative_tokens=draw.choice((1, 3, 8)),
        )
        for _ in range(12)
    ]
    all_foretold(engine, requests)
    assert tried(engine) == accepted(engine) > 100
    assert bool(preemptions(engine)) == (tokens == 170)


@pytest.mark.usefixtures("no_lookup")
def test_what_was_read_of_a_prefix_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further turn is read from the block on in which the one before has ended."""
    read: list[int] = []

    def noted(self: DraftModel, plan: Plan, rows: object) -> object:
        read.extend(each.past for each in plan.proposals)
        return propose(self, plan, rows)

    propose = DraftModel.propose
    monkeypatch.setattr(DraftModel, "propose", noted)
    engine = engine_for(CONFIG, TENSORS, draft=(CONFIG, TENSORS), enable_prefix_caching=True)
    first = GenerateRequest(text(60, 3), 31, num_speculative_tokens=4)
    said = engine.submit(first).result(60).output_ids
    assert read[0] == 0
    read.clear()
    turn = replace(first, input_ids=(*first.input_ids, *said, *text(10, 4)))
    engine.submit(turn).result(60)
    assert read[0] == 80  # of 91 tokens, the last of which is not in the cache
    read.clear()
    engine.submit(replace(first, input_ids=first.input_ids[:40])).result(60)
    assert read[0] == 32
    engine.close()
    assert tried(engine) == accepted(engine)


@pytest.mark.usefixtures("no_lookup")
def test_so_many_tokens_come_in_a_step() -> None:
    engine = engine_for(CONFIG, TENSORS, draft=(CONFIG, TENSORS))
    for sampling in (SamplingParameters(), SamplingParameters(top_k=5, random_seed=3)):
        before = engine.statistics.steps
        came = accepted(engine)
        request = GenerateRequest(text(9, 2), 51, sampling, num_speculative_tokens=4)
        engine.submit(request).result(60)
        steps = engine.statistics.steps - before
        assert steps == 51 - (accepted(engine) - came)
        assert sampling.top_k or steps == 1 + 50 / 5
    engine.close()


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
@pytest.mark.usefixtures("no_lookup")
def test_ranks_keep_the_same_tokens(tmp_path: Path, tp: int, pp: int) -> None:
    plain = engine_for(CONFIG, TENSORS)
    folder = write_checkpoint(tmp_path / "draft", CONFIG, near(TENSORS), tp)
    drafting = load_engine(tmp_path, CONFIG, TENSORS, tp, pp, draft_checkpoint_dir=folder)
    check_same(plain, drafting, seed=2, count=8, lower=5)
    assert accepted(drafting) > 0.5 * tried(drafting)


def test_a_row_of_virtual_tokens_does_without() -> None:
    table = torch.randn(3, CONFIG.hidden_size)
    request = GenerateRequest(text(6, 1), 20, soft_prompt=True, prompt_embedding=table)
    engine = engine_for(CONFIG, TENSORS, draft=(CONFIG, TENSORS))
    want = engine.submit(request).result(60).output_ids
    asked = replace(request, num_speculative_tokens=4)
    assert engine.submit(asked).result(60).output_ids == want
    engine.close()


def test_both_caches_are_planned() -> None:
    """As many tokens as there is memory for in both."""
    engine = engine_for(CONFIG, TENSORS, max_tokens=304, draft=(SMALLER, random_tensors(SMALLER)))
    runner = engine._loaded
    assert runner.draft is not None
    assert runner.draft.decoder.cache.capacity == runner.decoder.cache.capacity == 304
    assert runner.draft.decoder.cache.table is runner.decoder.cache.table
    engine.close()


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"vocab_size": 99}, 1, "another vocabulary than the model; got '99 ids'; .*67 ids"),
        ({"max_positions": 100}, 1, "fewer positions than the model; got 100; .*at least 400"),
        ({}, 2, "cut for another number of tensor-parallel ranks; got 2; .*1"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], tp: int, message: str
) -> None:
    model = write_checkpoint(tmp_path / "1-gpu", CONFIG, TENSORS, 1)
    config = replace(CONFIG, **changes)
    draft = write_checkpoint(tmp_path / "draft", config, random_tensors(config), tp)
    settings = EngineSettings(model, draft_checkpoint_dir=draft, device="cpu")
    with pytest.raises(ConfigError, match=f"(?s)draft model in .*draft.*{message}"):
        open_checkpoints(settings, verify=False)


@pytest.mark.parametrize(
    ("draft", "model", "fits"),
    [
        ("rope", "rope", True),
        ("alibi", "rope", True),
        ("rope", "learned", True),
        ("learned", "rope", False),  # whose rows may be longer than its max_positions
        ("learned", "alibi", False),
    ],
)
def test_a_table_of_positions_has_to_reach(draft: str, model: str, fits: bool) -> None:
    problems = Problems("it")
    both = (replace(CONFIG, position_embedding=kind) for kind in (draft, model))
    check_draft_model(problems, next(both), 1, next(both), Parallelism(), "here")
    assert fits != bool(problems.messages)


def test_a_model_with_an_encoder_neither_drafts_nor_gets_drafts() -> None:
    for draft, model in ((t5_config(), CONFIG), (CONFIG, t5_config())):
        problems = Problems("it")
        check_draft_model(problems, draft, 1, model, Parallelism(), "here")
        with pytest.raises(ConfigError, match="model has an encoder"):
            problems.raise_if_any(ConfigError)
