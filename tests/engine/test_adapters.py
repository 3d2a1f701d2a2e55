"""Prompt tables, prompts of requests, IA3 and adapters, mixed in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Bounds
from launcher_scripts.models.adapters import Adapters, PromptTask
from tests.checkpoint import reference_forward_gpt, reference_forward_t5
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    load_engine,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import DECODER, NEMO, as_encoder, t5_config, t5_tensors

PARTS = Adapters(
    prompt_tasks=(PromptTask("squad", 3), PromptTask("boolq", 5)),
    prompt_start_id=67,
    ia3_num_tasks=2,
    adapter_size=8,
)
POST = replace(PARTS, adapter_norm_position="post")
IA3 = replace(PARTS, adapter_size=0)
TEXT = (5, 60, 11, 2, 33)
SQUAD, BOOLQ = (67, 68, 69, *TEXT), (67, 68, 5, 69, 70, 71, 9)
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    """A request and what the plain forward needs to know of it."""

    request: GenerateRequest
    prompt: str | None = None
    ia3: int | None = None


def request(ids: tuple[int, ...], **more: Any) -> GenerateRequest:
    return GenerateRequest(ids, output_len=0, return_context_logits=True, **more)


CASES = (
    Case(request(TEXT)),
    Case(request(SQUAD, prompt_task=0), prompt="squad"),
    Case(request(BOOLQ, prompt_task=1, ia3_task=1), prompt="boolq", ia3=1),
    Case(request(TEXT, ia3_task=0), ia3=0),
    Case(request(TEXT, prompt_task=1)),
)


@dataclass(frozen=True)
class Model:
    """A small model with adapters: engines over it, and its plain forward."""

    config: Any
    tensors: dict[str, Any]
    decoder: tuple[int, ...] = ()

    def expected(self, case: Case) -> torch.Tensor:
        weights = {name: torch.from_numpy(values) for name, values in self.tensors.items()}
        options = {"prompt": case.prompt, "ia3": case.ia3}
        ids = torch.tensor([case.request.input_ids])
        if not self.decoder:
            return reference_forward_gpt.logits(weights, self.config, ids, **options)[0]
        targets = torch.tensor([self.decoder])
        return reference_forward_t5.logits(weights, self.config, ids, targets, **options)[0]

    def served(self, engine: Engine, cases: tuple[Case, ...] = CASES) -> list[torch.Tensor]:
        rows = [replace(case.request, decoder_input_ids=self.decoder) for case in cases]
        return [future.result(60).context_logits for future in [engine.submit(r) for r in rows]]


def gpt(**changes: Any) -> Model:
    config = small_config(**{"parts": PARTS, **changes})
    return Model(config, random_tensors(config))


def t5(**changes: Any) -> Model:
    config = t5_config(**{**NEMO, "parts": PARTS, **changes})
    return Model(config, t5_tensors(config), DECODER)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": gpt,
    "gpt_rope_grouped": lambda: gpt(
        position_embedding="rope", num_kv_heads=2, gated=True, activation="silu", parts=POST
    ),
    "gpt_ia3": lambda: gpt(parts=IA3),
    "t5": t5,
    "t5_ia3": lambda: t5(parts=IA3),
    "t5_gated": lambda: t5(gated=True, position_embedding="learned", max_positions=40, parts=POST),
}


def check(model: Model, engine: Engine) -> None:
    for case, got in zip(CASES, model.served(engine), strict=True):
        torch.testing.assert_close(got, model.expected(case), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_mixed_rows(name: str) -> None:
    model = MODELS[name]()
    engine = engine_for(model.config, model.tensors)
    try:
        check(model, engine)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("gpt", 2, 1),
        ("gpt_ia3", 2, 1),
        ("t5", 1, 2),
        pytest.param("gpt", 1, 2, marks=pytest.mark.slow),
        pytest.param("gpt_rope_grouped", 4, 1, marks=pytest.mark.slow),
        pytest.param("t5", 2, 1, marks=pytest.mark.slow),
        pytest.param("t5_gated", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_mixed_rows_on_several_ranks(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    model = MODELS[name]()
    engine = load_engine(tmp_path, model.config, model.tensors, tp, pp)
    try:
        check(model, engine)
        check_own_prompts(model, engine)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=[PARTS, IA3], ids=["adapters", "ia3"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Engine]]:
    model = gpt(parts=request.param)
    engine = engine_for(model.config, model.tensors)
    yield model, engine
    engine.close()


def check_own_prompts(model: Model, engine: Engine) -> None:
    """A table that comes with the request does what the same table does when it is loaded."""
    table = torch.from_numpy(model.tensors["prompt_table.squad.weight"])
    own = Case(request(SQUAD, prompt_embedding=table, prompt_task=1), prompt="squad")
    (got,) = model.served(engine, (own,))
    torch.testing.assert_close(got, model.expected(own), rtol=0, atol=TOLERANCE)


def test_the_requests_own_table(served: tuple[Model, Engine]) -> None:
    check_own_prompts(*served)


def test_a_soft_prompt_comes_in_front(served: tuple[Model, Engine]) -> None:
    model, engine = served
    table = torch.from_numpy(model.tensors["prompt_table.squad.weight"])
    soft = Case(request(TEXT, prompt_embedding=table, soft_prompt=True))
    (got,) = model.served(engine, (soft,))
    expected = model.expected(Case(request(SQUAD), prompt="squad"))
    assert got.shape[0] == len(TEXT)
    torch.testing.assert_close(got, expected[len(table) :], rtol=0, atol=TOLERANCE)


def test_generation_with_every_kind_of_row_is_as_alone(served: tuple[Model, Engine]) -> None:
    """Decode steps of mixed rows; penalties see the prompt's ids, and no virtual token."""
    _, engine = served
    sampling = SamplingParameters(repetition_penalty=1.5)
    rows = [
        replace(case.request, output_len=6, return_context_logits=False, sampling=sampling)
        for case in CASES
    ]
    alone = [engine.submit(row).result(60).output_ids for row in rows]
    together = [future.result(60).output_ids for future in [engine.submit(r) for r in rows]]
    assert together == alone
    assert len(set(alone)) == 4  # the last row has no virtual token, so its task changes nothing
    assert alone[0] == alone[4]


def test_greedy_decoding_goes_on_with_the_rows_task(served: tuple[Model, Engine]) -> None:
    model, engine = served
    case = CASES[2]
    ids = list(case.request.input_ids)
    for _ in range(4):
        step = Case(replace(case.request, input_ids=tuple(ids)), case.prompt, case.ia3)
        ids.append(int(model.expected(step)[-1].argmax()))
    row = replace(case.request, output_len=4, return_context_logits=False)
    assert list(engine.submit(row).result(60).output_ids) == ids[len(case.request.input_ids) :]


def test_rows_without_a_task_take_fused_steps() -> None:
    model, graphs = gpt(parts=IA3), EagerGraphs()
    _, runner = runner_for(model.config, model.tensors)
    assert runner.decoder.step is not None
    engine = engine_for(model.config, model.tensors, graphs=graphs)
    rows = [GenerateRequest(TEXT, 9, ia3_task=task) for task in (None, None, 0)]
    for future in [engine.submit(row) for row in rows]:
        future.result(60)
    engine.close()
    steps = {(key[0], key[1].general) for key in graphs.asked if isinstance(key[1], Bounds)}
    assert (2, False) in steps
    assert {rows for rows, general in steps if general} == {1}


def test_beams_keep_their_rows_task(served: tuple[Model, Engine]) -> None:
    """Searches with and without a task side by side find what each finds alone."""
    _, engine = served
    sampling = SamplingParameters(beam_width=3)
    rows = [GenerateRequest(TEXT, 5, sampling, ia3_task=task) for task in (None, 0, 1)]
    rows.append(GenerateRequest(SQUAD, 5, sampling, prompt_task=0, ia3_task=1))
    alone = [engine.submit(row).result(60).output_ids for row in rows]
    together = [future.result(60).output_ids for future in [engine.submit(r) for r in rows]]
    assert together == alone
    assert len(set(alone)) == len(rows)


def test_an_encoder_alone() -> None:
    """The encoder of a T5 with prompts, IA3 and adapters, served by itself."""
    model = t5()
    config = as_encoder(model.config)
    weights = {name: torch.from_numpy(values) for name, values in model.tensors.items()}
    engine = engine_for(config, model.tensors)
    try:
        for case in CASES:
            row = replace(case.request, return_context_logits=False, return_hidden_state=True)
            ids = torch.tensor([row.input_ids])
            expected = reference_forward_t5.encode(
                weights, model.config, ids, prompt=case.prompt, ia3=case.ia3
            )
            got = engine.submit(row).result(60).hidden_state
            torch.testing.assert_close(got, expected[0], rtol=0, atol=TOLERANCE)
        with pytest.raises(RequestError, match="has no effect: input_ids has no virtual tokens"):
            engine.submit(replace(row, prompt_embedding=torch.zeros(3, 32))).result(60)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            request(SQUAD, prompt_task=2),
            r"names no loaded prompt table; got 2; choices: 0 \(squad\)",
        ),
        (request((*SQUAD, 70), prompt_task=0), "virtual tokens beyond the 3 of the row's prompt"),
        (request(SQUAD), "input_ids has ids outside of the vocabulary"),
        (request(TEXT, ia3_task=2), "Requested IA3 tasks aren't in the range"),
        (request(TEXT, prompt_embedding=torch.zeros(3, 8)), r"virtual tokens, hidden size"),
        (request(TEXT, prompt_embedding=torch.full((3, 32), torch.nan)), "are no numbers"),
        (request(TEXT, prompt_embedding=torch.zeros(3, 32)), "has no effect.*; choices: ids 67-69"),
    ],
)
def test_a_wrong_request_is_told(
    served: tuple[Model, Engine], row: GenerateRequest, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        served[1].submit(row).result(60)


def test_a_model_without_parts() -> None:
    config = small_config()
    engine = engine_for(config, random_tensors(config))
    try:
        with pytest.raises(RequestError, match="model has no IA3 adapters"):
            engine.submit(request(TEXT, ia3_task=0)).result(60)
        with pytest.raises(RequestError, match="names no loaded prompt table"):
            engine.submit(request(TEXT, prompt_task=0)).result(60)
        own = request((67, 68, *TEXT), prompt_embedding=torch.ones(2, 32))
        assert engine.submit(own).result(60).context_logits.shape == (7, 67)
    finally:
        engine.close()
