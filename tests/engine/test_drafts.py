"""Drafts save steps and change no token: greedy or sampled, beside others, moved or stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.hypotheses import PromptLookup
from launcher_scripts.engine.core.requests import check_request
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine
from tests.engine.small_agm import agm_config, agm_tensors
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    load_engine,
    small_config,
)
from tests.engine.small_t5 import t5_config
from tests.engine.test_growing_rows import preemptions, same_answers
from tests.engine.test_prefix_cache import CONFIG, text
from tests.engine.test_prefix_sharing import MODELS, TENSORS
from tests.engine.test_statistics import values

SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(top_k=3, temperature=0.3, random_seed=3),
    SamplingParameters(top_p=0.5, temperature=0.4, random_seed=8),
    SamplingParameters(repetition_penalty=1.02),
    SamplingParameters(frequency_penalty=0.01, min_length=30),
    SamplingParameters(no_repeat_ngram_size=6),
)


def test_a_draft_is_what_followed_the_last_tokens() -> None:
    lookup = PromptLookup((1, 2, 3, 4, 5, 6, 9, 2, 3))
    assert lookup.draft(3) == (4, 5, 6)
    assert lookup.draft(2) == (4, 5)
    assert lookup.draft(0) == ()
    lookup.add((4,))
    assert lookup.draft(3) == (5, 6, 9)
    lookup.add((7,))
    assert lookup.draft(8) == ()


def test_the_longest_and_latest_text_counts() -> None:
    lookup = PromptLookup((1, 2, 3, 7, 8, 2, 3, 5, 2, 3))
    assert lookup.draft(1) == (5,)
    lookup = PromptLookup((1, 2, 3, 7, 8, 2, 3, 5, 1, 2, 3))
    assert lookup.draft(1) == (7,)


def test_virtual_tokens_are_not_foretold() -> None:
    assert PromptLookup((1, 2, 8, -1, 3, 1, 2)).draft(4) == (8,)


def requests_of(seed: int, count: int) -> list[GenerateRequest]:
    """Prompts that repeat themselves, or not; some end early, and some want log-probabilities."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        stem = text(draw.randrange(2, 12), draw.random())
        made.append(
            GenerateRequest(
                stem * draw.choice((1, 3)),
                draw.randrange(1, 60),
                draw.choice(SAMPLINGS),
                return_log_probs=True,
                num_log_probs=draw.choice((-1, 1)),
                stop_words=draw.choice(((), ((5,), (9, 10)))),
                bad_words=draw.choice(((), ((3,),))),
            )
        )
    return made


def check_same(
    plain: Engine, drafting: Engine, seed: int, count: int = 10, *, lower: int = 10
) -> None:
    """Every second row drafts, beside those that do not; more than `lower` tokens come so."""
    draw = random.Random(seed)
    requests = requests_of(seed, count)
    wanted = [plain.submit(request) for request in requests]
    asked = [
        replace(request, num_speculative_tokens=draw.choice((1, 4, 12)) * (at % 2))
        for at, request in enumerate(requests)
    ]
    futures = [drafting.submit(request) for request in asked]
    for request in asked[::5]:
        drafting.submit(request).cancel()
    for want, got in same_answers(wanted, futures):
        if want.token_log_probs is not None:
            assert got.token_log_probs.ranks.tolist() == want.token_log_probs.ranks.tolist()
    assert accepted(drafting) > lower
    assert tried(drafting) > accepted(drafting)
    assert drafting.cache_tokens_used == 0
    plain.close()
    drafting.close()


def tried(engine: Engine) -> float:
    return values(engine.statistics, names.DRAFT_TOKENS)[""]


def accepted(engine: Engine) -> float:
    return values(engine.statistics, names.ACCEPTED_TOKENS)[""]


@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("rope", marks=pytest.mark.slow), "longrope", "window", "latent"]
)
def test_answers_are_those_without_drafts(model: str) -> None:
    plain, drafting = (engine_for(*MODELS[model], max_batch_size=9) for _ in range(2))
    check_same(plain, drafting, seed=len(model))


def test_answers_are_the_same_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes are graphs, and a step is launched before the last one's tokens come."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    plain = engine_for(CONFIG, TENSORS)
    check_same(plain, engine_for(CONFIG, TENSORS, graphs=EagerGraphs(), max_batch_size=9), 1)


def test_rows_that_move_and_wait_again_take_their_drafts_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    plain = engine_for(CONFIG, TENSORS)
    small = engine_for(
        CONFIG, TENSORS, max_batch_size=12, max_tokens=150, enable_prefix_caching=True
    )
    check_same(plain, small, seed=5, count=20)
    assert preemptions(small) > 0


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_ranks_keep_the_same_tokens(tmp_path: Path, tp: int, pp: int) -> None:
    plain = engine_for(CONFIG, TENSORS)
    check_same(plain, load_engine(tmp_path, CONFIG, TENSORS, tp, pp), seed=2, count=8, lower=5)


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    engine = engine_for(CONFIG, TENSORS)
    request = GenerateRequest(text(8, 1), 120)
    steps = []
    for number in (0, 8):
        before = engine.statistics.steps
        answer = engine.submit(replace(request, num_speculative_tokens=number)).result(60)
        steps.append(engine.statistics.steps - before)
    assert len(answer.output_ids) == 120
    assert steps == [120, 120 - accepted(engine)]
    assert accepted(engine) > 30
    engine.close()


def test_an_agm_drafts_too() -> None:
    config = agm_config()
    plain, drafting = (engine_for(config, agm_tensors(config)) for _ in range(2))
    request = GenerateRequest(text(6, 3) * 3, 50)
    want = plain.submit(request).result(60).output_ids
    assert drafting.submit(replace(request, num_speculative_tokens=6)).result(60).output_ids == want
    assert accepted(drafting) > 5
    plain.close()
    drafting.close()


DYNAMIC = small_config(
    position_embedding="rope",
    rotary_scaling="dynamic",
    rotary_scaling_factor=4.0,
    rotary_original_positions=60,
)


@pytest.mark.parametrize(
    ("config", "changes", "session", "message"),
    [
        (CONFIG, {"num_speculative_tokens": 33}, None, r"num_speculative_tokens is out of range.*"),
        (CONFIG, {"sampling": SamplingParameters(beam_width=2)}, None, "not for beam searches"),
        (CONFIG, {"guided_grammar": '{"regex": "a"}'}, None, "not for guided_grammar"),
        (
            CONFIG,
            {"sampling": SamplingParameters(top_p=0.9, top_p_decay=0.5)},
            None,
            "not for a top_p that changes",
        ),
        (CONFIG, {}, Session(50, 50), "not for sessions"),
        (DYNAMIC, {}, None, "not for models with dynamic NTK"),
        (t5_config(), {}, None, "not for models with an encoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_draft_is_refused_by_name(
    config: object, changes: dict[str, object], session: Session | None, message: str
) -> None:
    asked = {"num_speculative_tokens": 4, **changes}
    request = GenerateRequest((1, 2, 3), 4, **asked)
    with pytest.raises(RequestError, match=message):
        check_request(request, config, 200, 8, session)
