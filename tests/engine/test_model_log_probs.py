"""num_log_probs and num_prompt_log_probs: what the model's own logits say of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from launcher_scripts.contract.requests import (
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
    SamplingParameters,
)
from launcher_scripts.engine.core import step_outputs
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS
from launcher_scripts.models.adapters import Adapters, PromptTask
from tests.checkpoint import reference_forward_gpt
from tests.engine.small_bart import bart_config, plain_logits
from tests.engine.small_models import (
    engine_for,
    load_engine,
    random_tensors,
    small_config,
)
from tests.engine.small_t5 import NEMO, Plain, t5_config, t5_tensors

VOCAB = 67
SOURCE = (5, 60, 11, 2)
PROMPT = (5, 60, 11, 11, 2, 33)
DRAWN = {"temperature": 0.7, "top_k": 20, "random_seed": 5, "frequency_penalty": 1.5}
Logits = Callable[[Sequence[int]], torch.Tensor]


class Model(NamedTuple):
    """An engine, how a prompt is given to it, and the logits of a plain forward pass."""

    engine: Engine
    given: Callable[[tuple[int, ...]], dict[str, Any]]
    logits: Logits

    def submit(self, prompt: tuple[int, ...], count: int, **more: Any) -> Any:
        sampling = SamplingParameters(**more.pop("sampling", {}))
        given = self.given(prompt)
        return self.engine.submit(
            GenerateRequest(**given, output_len=count, end_id=VOCAB, sampling=sampling, **more)
        )

    def run(self, prompt: tuple[int, ...], count: int, **more: Any) -> GenerateOutput:
        return self.submit(prompt, count, **more).result(60)


def gpt_model() -> Model:
    config = small_config(end_id=VOCAB)
    tensors = random_tensors(config)
    weights = {name: torch.from_numpy(values) for name, values in tensors.items()}

    def logits(text: Sequence[int]) -> torch.Tensor:
        return reference_forward_gpt.logits(weights, config, torch.tensor([text]))[0]

    return Model(engine_for(config, tensors), lambda ids: {"input_ids": ids}, logits)


def with_source(ids: tuple[int, ...]) -> dict[str, Any]:
    return {"input_ids": SOURCE, "decoder_input_ids": ids}


def t5_model() -> Model:
    config = t5_config(**NEMO)
    tensors = t5_tensors(config)
    plain = Plain(config, tensors)
    return Model(engine_for(config, tensors), with_source, lambda text: plain.logits(SOURCE, text))


def bart_model() -> Model:
    config = bart_config()
    engine = engine_for(config, random_tensors(config))
    return Model(engine, with_source, lambda text: plain_logits(config, SOURCE, text))


@pytest.fixture(scope="module", params=[gpt_model, t5_model, bart_model])
def model(request) -> Iterator[Model]:
    made = request.param()
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def gpt() -> Iterator[Model]:
    made = gpt_model()
    yield made
    made.engine.close()


def check(got: ModelLogProbs, logits: torch.Tensor, tokens: Sequence[int], count: int) -> None:
    """By float32 logits [n, vocab] of a plain pass."""
    expected = logits.double().log_softmax(-1)
    own = expected[range(len(tokens)), tokens]
    ranks = 1 + (expected > own[:, None]).sum(-1)
    values, ids = expected.topk(count)
    assert got.log_probs.tolist() == pytest.approx(own.tolist(), abs=1e-4)
    assert got.ranks.tolist() == ranks.tolist()
    assert got.top_ids.tolist() == ids.tolist()
    assert torch.allclose(got.top_log_probs.double(), values, atol=1e-4)
    assert (got.log_probs.dtype, got.ranks.dtype) == (torch.float32, torch.int32)


def check_prompt(got: ModelLogProbs, logits: torch.Tensor, ids: Sequence[int], count: int) -> None:
    """`check`, but for the first token, which nothing foretells."""
    for each in (got.log_probs, got.ranks, got.top_ids, got.top_log_probs):
        assert each.shape[0] == len(ids)
        assert not each[0].any()
    rest = ModelLogProbs(got.log_probs[1:], got.ranks[1:], got.top_ids[1:], got.top_log_probs[1:])
    check(rest, logits[: len(ids) - 1], ids[1:], count)


@pytest.mark.parametrize("sampling", [{}, DRAWN, {"top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_generated_tokens_have_the_models_own(model, sampling, count):
    answer = model.run(PROMPT, 9, num_log_probs=count, sampling=sampling)
    assert len(answer.output_ids) == 9
    logits = model.logits((*PROMPT, *answer.output_ids))[len(PROMPT) - 1 : -1]
    check(answer.token_log_probs, logits, answer.output_ids, count)
    assert answer.prompt_log_probs is None
    if not sampling:
        assert answer.token_log_probs.ranks.tolist() == [1] * 9


def test_asking_changes_no_token(model):
    for sampling in ({}, DRAWN):
        plain = model.run(PROMPT, 9, sampling=sampling)
        asked = model.run(PROMPT, 9, sampling=sampling, num_log_probs=3, num_prompt_log_probs=3)
        assert asked.output_ids == plain.output_ids
        assert plain.token_log_probs is plain.prompt_log_probs is None


@pytest.mark.parametrize("output_len", [0, 1, 4])
@pytest.mark.parametrize("count", [0, 5])
def test_prompts_have_the_models_own(model, count, output_len):
    answer = model.run(PROMPT, output_len, num_prompt_log_probs=count)
    check_prompt(answer.prompt_log_probs, model.logits(PROMPT), PROMPT, count)


def test_prompts_have_those_of_context_logits(gpt):
    answer = gpt.run(PROMPT, 0, num_prompt_log_probs=4, return_context_logits=True)
    check_prompt(answer.prompt_log_probs, answer.context_logits, PROMPT, 4)
    again = gpt.run(PROMPT, 3, num_prompt_log_probs=4, sampling={"beam_width": 2})
    check_prompt(again.prompt_log_probs, answer.context_logits, PROMPT, 4)


def test_a_prompt_of_one_token_has_none(model):
    answer = model.run(PROMPT[:1], 2, num_prompt_log_probs=2, num_log_probs=2)
    found = answer.prompt_log_probs
    assert (found.log_probs.tolist(), found.ranks.tolist()) == ([0.0], [0])
    assert found.top_ids.tolist() == [[0, 0]]
    logits = model.logits((PROMPT[0], *answer.output_ids))[:-1]
    check(answer.token_log_probs, logits, answer.output_ids, 2)


def test_an_empty_prompt_has_no_tokens_of_its_own(gpt):
    answer = gpt.run((), 2, num_prompt_log_probs=2, start_id=3)
    assert answer.prompt_log_probs.log_probs.shape == (0,)
    assert answer.prompt_log_probs.top_ids.shape == (0, 2)


def test_rows_of_a_batch_get_what_each_asked_for(model):
    """Side by side, prompts of different lengths in one step included."""
    prompts = [PROMPT, PROMPT[:3], (9, 8, 7, 6, 5, 4, 3), (1, 2), PROMPT[1:]]
    asked: list[dict[str, Any]] = [
        {"num_log_probs": 5, "sampling": DRAWN},
        {"num_prompt_log_probs": 2},
        {"num_log_probs": 0, "num_prompt_log_probs": 7, "sampling": {"top_p": 0.8}},
        {},
        {"return_log_probs": True, "sampling": {"beam_width": 2}},
    ]
    futures = [model.submit(prompt, 6, **more) for prompt, more in zip(prompts, asked, strict=True)]
    for prompt, more, future in zip(prompts, asked, futures, strict=True):
        answer = future.result(60)
        assert answer.output_ids == model.run(prompt, 6, **more).output_ids
        logits = model.logits((*prompt, *answer.output_ids))
        assert (answer.token_log_probs is None) == ("num_log_probs" not in more)
        assert (answer.prompt_log_probs is None) == ("num_prompt_log_probs" not in more)
        if "num_log_probs" in more:
            generated = logits[len(prompt) - 1 : -1]
            check(answer.token_log_probs, generated, answer.output_ids, more["num_log_probs"])
        if "num_prompt_log_probs" in more:
            check_prompt(answer.prompt_log_probs, logits, prompt, more["num_prompt_log_probs"])


@pytest.mark.parametrize("make", [gpt_model, t5_model])
@pytest.mark.parametrize("step", [1, 4, 7])
def test_prompts_that_run_in_steps_of_a_few_tokens_have_the_same(make, step, monkeypatch):
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", step)
    model = make()
    prompts = [tuple(range(3, 24)), PROMPT]
    futures = [model.submit(prompt, 2, num_prompt_log_probs=3) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        check_prompt(future.result(60).prompt_log_probs, model.logits(prompt), prompt, 3)
    model.engine.close()


@pytest.mark.parametrize("soft", [False, True])
def test_virtual_tokens_have_none(soft):
    """Those among the ids count as places; a table in front of them does not."""
    table = PromptTask("squad", 3)
    config = small_config(parts=Adapters(prompt_tasks=(table,), prompt_start_id=VOCAB))
    tensors = random_tensors(config)
    weights = {name: torch.from_numpy(values) for name, values in tensors.items()}
    virtual = (67, 68, 69)
    ids = torch.tensor([(*virtual, *PROMPT)])
    logits = reference_forward_gpt.logits(weights, config, ids, prompt="squad")[0]
    engine = engine_for(config, tensors)
    given = PROMPT if soft else (*virtual, *PROMPT)
    request = GenerateRequest(given, 0, prompt_task=0, soft_prompt=soft, num_prompt_log_probs=2)
    found = engine.submit(request).result(60).prompt_log_probs
    engine.close()
    if not soft:
        assert not found.log_probs[:3].any() and not found.top_ids[:3].any()
        found = ModelLogProbs(
            found.log_probs[3:], found.ranks[3:], found.top_ids[3:], found.top_log_probs[3:]
        )
    check(found, logits[2:-1], PROMPT, 2)


def test_no_more_logits_than_a_few_positions_are_there_at_once(gpt, monkeypatch):
    """With pieces of 4 positions; the prompt's end alone asks for one more."""
    monkeypatch.setattr(step_outputs, "SCORED_ROWS", 4)
    network = gpt.engine._loaded.decoder
    sizes = []
    whole = network.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return whole(hidden)

    monkeypatch.setattr(network, "logits", logits)
    prompt = tuple(range(3, 24))
    answer = gpt.run(prompt, 0, num_prompt_log_probs=3)
    assert sizes == [4, 4, 4, 4, 4, 1]
    check_prompt(answer.prompt_log_probs, gpt.logits(prompt), prompt, 3)


def test_snapshots_hold_those_of_the_tokens_so_far(gpt):
    seen: list[GenerateOutput] = []
    request = GenerateRequest(PROMPT, 5, end_id=VOCAB, num_log_probs=2, num_prompt_log_probs=1)
    answer = gpt.engine.submit(request, lambda each: seen.append(each.output())).result(60)
    assert [len(each.token_log_probs.log_probs) for each in seen] == [1, 2, 3, 4]
    for each in (*seen, answer):
        count = len(each.output_ids)
        found, whole = each.token_log_probs, answer.token_log_probs
        assert torch.equal(found.top_ids, whole.top_ids[:count])
        assert torch.equal(found.log_probs, whole.log_probs[:count])
        check_prompt(each.prompt_log_probs, gpt.logits(PROMPT), PROMPT, 1)


def test_a_sessions_turn_has_those_of_its_own_tokens(gpt):
    """The first token of a later turn follows the turn before."""
    session = Session(40, 40)
    first = gpt.engine.submit(GenerateRequest(PROMPT, 3, end_id=VOCAB), None, session).result(60)
    later = (7, 8, 9)
    request = GenerateRequest(later, 2, end_id=VOCAB, num_prompt_log_probs=2, num_log_probs=2)
    answer = gpt.engine.submit(request, None, session).result(60)
    gpt.engine.close_session(session)
    before = (*PROMPT, *first.output_ids)
    logits = gpt.logits((*before, *later, *answer.output_ids))[len(before) - 1 : -1]
    check(answer.prompt_log_probs, logits[:3], later, 2)
    check(answer.token_log_probs, logits[3:], answer.output_ids, 2)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_ranks_agree_with_one(tmp_path, family, tp, pp):
    """A vocabulary that has to be padded for two ranks."""
    if family == "gpt":
        config = small_config(vocab_size=65, end_id=65, start_id=0)
        tensors = random_tensors(config)
        given = {"input_ids": PROMPT}
    else:
        config = t5_config(**NEMO, vocab_size=65)
        tensors = t5_tensors(config)
        given = with_source(PROMPT)
    sampling = SamplingParameters(
        min_p=0.05, top_p=1.0, random_seed=3, frequency_penalty=0.7, output_presence_penalty=0.2
    )
    requests = [
        GenerateRequest(
            **given,
            output_len=7,
            sampling=sampling,
            logit_bias=((3, 2.5), (64, 4.0)),
            num_log_probs=4,
            num_prompt_log_probs=2,
        ),
        GenerateRequest(**given, output_len=5, num_prompt_log_probs=0),
        GenerateRequest(**given, output_len=5),
    ]
    answers = []
    engines = [engine_for(config, tensors), load_engine(tmp_path, config, tensors, tp, pp)]
    for engine in engines:
        futures = [engine.submit(request) for request in requests]
        answers.append([future.result(60) for future in futures])
        engine.close()
    for one, many in zip(*answers, strict=True):
        assert one.output_ids == many.output_ids
    for name in ("token_log_probs", "prompt_log_probs"):
        one, many = (getattr(rows[0], name) for rows in answers)
        assert torch.equal(one.ranks, many.ranks)
        assert torch.equal(one.top_ids, many.top_ids)
        assert torch.allclose(one.log_probs, many.log_probs, atol=1e-4)
        assert torch.allclose(one.top_log_probs, many.top_log_probs, atol=1e-4)
