"""LoRA adapters that rows choose: each row's answer is that of weights with its adapter merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine
from launcher_scripts.engine.messages.plan import Plan
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import Linear, LoRA, RowLoRA
from launcher_scripts.models.adapters import LORA_TARGETS, NO_ADAPTERS, Adapters
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_weights import weights
from tests.engine.small_models import (
    LATENT,
    EagerGraphs,
    engine_for,
    load_engine,
    random_tensors,
    runner_for,
    small_config,
)

NAMES = ("sql", "poems", "law")
GATED = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "num_kv_heads": 2,
    "gated": True,
    "activation": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
TEXT = (5, 60, 11, 2, 33)
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Model:
    """A small model with adapters."""

    config: GPTConfig
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, targets: tuple[str, ...] = (), **changes: object) -> Model:
        rows = {spec.name for spec in weights(small_config(**changes))}
        known = tuple(stem for stem in LORA_TARGETS if f"layers.*.{stem}.weight" in rows)
        parts = Adapters(lora_names=NAMES, lora_rank=3, lora_targets=targets or known)
        config = small_config(**{**changes, "parts": parts})
        return cls(config, random_tensors(config))

    def merged(self, adapter: int | None) -> Model:
        """The model with the adapter in its weights."""
        config, tensors = replace(self.config, parts=NO_ADAPTERS), dict(self.tensors)
        rank, count = self.config.parts.lora_rank, len(NAMES)
        for stem in self.config.parts.lora_targets:
            sizes = [getattr(config, block) for block in LORA_TARGETS[stem].blocks]
            for layer in range(config.num_layers):
                name = f"layers.{layer}.{stem}"
                down, up = (tensors.pop(f"{name}.lora_{side}.weight") for side in ("in", "out"))
                if adapter is None:
                    continue
                down = down.reshape(len(down), count, -1, rank)[:, adapter]
                ups = np.split(up.reshape(count, rank, -1)[adapter], np.cumsum(sizes)[:-1], axis=1)
                delta = [down[:, block] @ part for block, part in enumerate(ups)]
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + np.concatenate(delta, 1)
        return Model(config, tensors)


def rows(**more: object) -> list[GenerateRequest]:
    """One of every adapter and one of none, of several lengths."""
    return [
        GenerateRequest(TEXT + TEXT[:number], lora_adapter=adapter, **{"output_len": 6, **more})
        for number, adapter in enumerate((None, 0, 1, 2, None, 1))
    ]


def answers(engine: Engine, asked: list[GenerateRequest]) -> list[object]:
    return [future.result(60) for future in [engine.submit(row) for row in asked]]


def check(model: Model, engine: Engine) -> None:
    """Logits of prompts and greedy tokens of a mixed batch."""
    scored, generated = rows(output_len=0, return_context_logits=True), rows()
    logits = [answer.context_logits for answer in answers(engine, scored)]
    tokens = [answer.output_ids for answer in answers(engine, generated)]
    for adapter in (None, 0, 1, 2):
        merged = model.merged(adapter)
        alone = engine_for(merged.config, merged.tensors)
        try:
            for number, row in enumerate(generated):
                if row.lora_adapter != adapter:
                    continue
                (expected,) = answers(alone, [replace(scored[number], lora_adapter=None)])
                torch.testing.assert_close(
                    logits[number], expected.context_logits, rtol=0, atol=TOLERANCE
                )
                (expected,) = answers(alone, [replace(row, lora_adapter=None)])
                assert tokens[number] == expected.output_ids
        finally:
            alone.close()
    assert len({*tokens[:4]}) == 4


MODELS = {
    "gpt2": {},
    "gated": GATED,
    "some": {"targets": ("mlp.dense_h_to_4h",)},
    "attention": {**GATED, "targets": ("attention.query_key_value", "attention.dense")},
    "parallel": {**GATED, "parallel_residual": True},
    "experts": {
        **GATED,
        "num_experts": 4,
        "experts_per_token": 2,
        "targets": ("attention.query_key_value", "attention.dense"),
    },
    "post": {"norm_placement": "post"},
    "latent": LATENT,
    "some of latent": {**LATENT, "targets": ("attention.kv_down", "attention.kv_up")},
    "latent without ranks": {**LATENT, "q_lora_rank": None},
    "sandwich": {**GATED, "norm_placement": "sandwich"},
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_answer_as_merged_weights_do(name: str) -> None:
    model = Model.of(**MODELS[name])
    engine = engine_for(model.config, model.tensors)
    try:
        check(model, engine)
    finally:
        engine.close()


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_adapters_of_quantized_weights(quantization: str) -> None:
    """A and B stay as they are: with weights of zero, they alone make the logits."""
    model = Model.of(**GATED)
    zeros = {
        name: values * ("lora" in name or "layers" not in name or "norm" in name)
        for name, values in model.tensors.items()
    }
    logits = []
    for kind in (None, quantization):
        engine = engine_for(model.config, zeros, quantization=kind)
        try:
            asked = rows(output_len=0, return_context_logits=True)
            logits.append([answer.context_logits for answer in answers(engine, asked)])
        finally:
            engine.close()
    for got, expected in zip(*logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("gated", 2, 1),
        ("gpt2", 1, 2),
        ("latent", 2, 1),
        pytest.param("gated", 4, 1, marks=pytest.mark.slow),
        pytest.param("sandwich", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_several_ranks(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    model = Model.of(**MODELS[name])
    engine = load_engine(tmp_path, model.config, model.tensors, tp, pp)
    try:
        check(model, engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.of(**GATED)


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    engine = engine_for(model.config, model.tensors)
    yield engine
    engine.close()


def alike(first: Engine, second: Engine, asked: list[GenerateRequest]) -> list[object]:
    """The answers of both, which are the same."""
    try:
        wanted, got = answers(first, asked), answers(second, asked)
    finally:
        second.close()
    assert [answer.output_ids for answer in got] == [answer.output_ids for answer in wanted]
    return got


def test_prefixes_are_those_of_the_adapter(model: Model, engine: Engine) -> None:
    shared = tuple(range(3, 45))
    asked = [
        GenerateRequest((*shared, 7 + number), 6, lora_adapter=adapter)
        for number, adapter in enumerate((0, 1, None, 0, 1, None))
    ]
    caching = engine_for(model.config, model.tensors, enable_prefix_caching=True)
    for row in asked[:3]:
        caching.submit(row).result(60)
    alike(engine, caching, asked)


@pytest.mark.parametrize("tokens", [None, 40])
def test_steps_that_are_graphs(model: Model, engine: Engine, tokens: int | None) -> None:
    """Those of rows without adapters are other ones, without what the adapters take."""
    graphs = EagerGraphs()
    replaying = engine_for(model.config, model.tensors, graphs=graphs, max_tokens=tokens)
    answers(replaying, [row for row in rows() if row.lora_adapter is None])
    before = {*graphs.asked}
    alike(engine, replaying, [*rows(), *rows(sampling=SamplingParameters(top_k=3))])
    assert not any(uses_lora(key) for key in before)
    assert any(uses_lora(key) for key in graphs.asked)


def test_steps_are_recorded_with_adapters_and_without(model: Model) -> None:
    graphs = EagerGraphs()
    _, runner = runner_for(model.config, model.tensors, graphs=graphs)
    runner.execute(Plan(record=tuple(runner.shapes_to_record())))
    count = sum(map(uses_lora, graphs.recorded))
    assert 2 * count == len(graphs.recorded)


def uses_lora(key: object) -> bool:
    return getattr(key, "lora", False) or (isinstance(key, tuple) and any(map(uses_lora, key)))


def test_drafts_and_beams(model: Model, engine: Engine) -> None:
    again = engine_for(model.config, model.tensors)
    beams = rows(sampling=SamplingParameters(beam_width=2))
    repeated = [replace(row, input_ids=TEXT * 4, output_len=12) for row in rows()]
    alone = [engine.submit(row).result(60).output_ids for row in (*beams, *repeated)]
    drafted = [replace(row, num_speculative_tokens=4) for row in repeated]
    try:
        got = answers(again, [*beams, *drafted])
    finally:
        again.close()
    assert [answer.output_ids for answer in got] == alone


def test_a_session_keeps_its_adapter(engine: Engine) -> None:
    """It goes on as one long prompt of the adapter; what another one computes is not mixed in."""
    session, text = Session(60, 60), list(TEXT)

    def turn(ids: tuple[int, ...], adapter: int | None) -> tuple[int, ...]:
        request = GenerateRequest(ids, 4, lora_adapter=adapter)
        return engine.submit(request, session=session).result(60).output_ids

    text += turn(TEXT, 1)
    for other, said in ((None, "'none'"), (2, "2")):
        with pytest.raises(RequestError, match=f"another lora_task_id; .*; got {said}; choices: 1"):
            turn((7, 8), other)
    (expected,) = answers(engine, [GenerateRequest((*text, 7, 8), 4, lora_adapter=1)])
    assert turn((7, 8), 1) == expected.output_ids
    engine.close_session(session)


def test_an_unknown_adapter_is_refused(engine: Engine) -> None:
    row = GenerateRequest(TEXT, 3, lora_adapter=3)
    message = r"names no LoRA adapter .*; got 3; choices: 0 \(sql\), 1 \(poems\), 2 \(law\)"
    with pytest.raises(RequestError, match=message):
        engine.submit(row).result(60)


def test_the_delta_is_that_of_the_row_s_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(3, 4, 10, generator=generator), torch.randn(3, 2, 9, generator=generator)
    x, lora = torch.randn(5, 10, generator=generator), LoRA(down, up, (5, 4))
    adapters = torch.tensor([2, -1, 0, 1, 0])
    got = reference.lora_delta(x, RowLoRA(lora, adapters))
    for row, adapter in enumerate(adapters.tolist()):
        inner = down[adapter] @ x[row]
        parts = inner[:2] @ up[adapter, :, :5], inner[2:] @ up[adapter, :, 5:]
        expected = torch.zeros(9) if adapter < 0 else torch.cat(parts)
        torch.testing.assert_close(got[row], expected)


def test_rows_without_an_adapter_keep_their_numbers() -> None:
    lora = LoRA(torch.randn(3, 2, 10), torch.randn(3, 2, 9), (9,))
    linear, x = Linear(torch.randn(9, 10)), torch.randn(4, 10)
    with_lora = linear.with_lora(lora, torch.tensor([-1, 1, -1, -1]))
    same = reference.project(x, with_lora) == reference.project(x, linear)
    assert same.all(1).tolist() == [True, False, True, True]
