"""A deterministic model: what a row is answered is the same to the last bit, whatever runs beside.

Heads have 8 features: a CPU's product of batches of narrower matrices depends on where they lie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.contract import metric_names as names
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import STEPS_AHEAD, Engine
from launcher_scripts.engine.runner import graphs as recording
from launcher_scripts.engine.runner import loading
from launcher_scripts.models.adapters import Adapters
from tests.engine.small_models import (
    EagerGraphs,
    engine_for,
    load_engine,
    lora_targets,
    random_tensors,
    runner_for,
    small_config,
)
from tests.engine.small_t5 import GATED, NEMO, SOURCE, as_encoder, t5_config, t5_tensors
from tests.engine.test_drafts import accepted, tried
from tests.engine.test_lora import GATED as ROPE
from tests.engine.test_statistics import values

LORA = Adapters(
    lora_names=("sql", "law"), lora_rank=3, lora_targets=lora_targets(small_config(**ROPE))
)
MODELS = {
    "gpt": (small_config(position_embedding="alibi"), random_tensors),
    "rope": (small_config(**ROPE), random_tensors),
    "experts": (small_config(**ROPE, num_experts=5, experts_per_token=2), random_tensors),
    "lora": (small_config(**ROPE, parts=LORA), random_tensors),
    "ia3": (small_config(parts=Adapters(ia3_num_tasks=2)), random_tensors),
    "t5": (t5_config(**GATED, head_size=8), t5_tensors),
    "t5 of nemo": (t5_config(**NEMO, head_size=8), t5_tensors),
}
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(beam_width=3),
    SamplingParameters(top_k=20, temperature=1.5, random_seed=7),
    SamplingParameters(top_p=0.9, temperature=1.3, repetition_penalty=1.2, random_seed=11),
)
Answer = list[tuple[tuple[int, ...], float | None, tuple[float, ...] | None]]


def requests(draw: random.Random, model: str, count: int) -> list[GenerateRequest]:
    """Of all kinds, some with an adapter, some with log-probabilities that graphs do not give."""
    made = []
    for _ in range(count):
        request = GenerateRequest(
            tuple(draw.randrange(60) for _ in range(draw.choice((1, 5, 20, 70)))),
            draw.choice((1, 6, 12)),
            draw.choice(SAMPLINGS),
            return_log_probs=True,
        )
        if request.sampling.beam_width == 1:
            request = replace(request, num_log_probs=draw.choice((-1, -1, 2)))
        if model == "lora":
            request = replace(request, lora_adapter=draw.choice((None, 0, 1)))
        if model == "ia3":
            request = replace(request, ia3_task=draw.choice((None, 0, 1)))
        if not model.startswith("t5") and request.sampling.beam_width == 1:
            request = replace(request, num_speculative_tokens=draw.choice((0, 3)))
        made.append(request)
    return made


def answer(output: GenerateOutput) -> Answer:
    """Ids and log-probabilities of all hypotheses, as floats that have to be equal."""
    return [
        (each.output_ids, each.cum_log_probs, each.output_log_probs) for each in output.hypotheses
    ]


def check_company(engine: Engine, model: str, seed: int = 0, count: int = 7) -> None:
    """Rows alone, and then all of them together, some beside others that are given up."""
    draw = random.Random(seed)
    asked = requests(draw, model, count)
    alone = [answer(engine.submit(request).result(60)) for request in asked]
    futures = []
    for request in draw.sample(asked, len(asked)):
        futures.append((request, engine.submit(request)))
        if draw.random() < 0.4:
            engine.submit(draw.choice(asked)).cancel()
        if draw.random() < 0.2:
            futures[-1][1].result(60)
    wait([future for _, future in futures], 60)
    for request, future in futures:
        assert answer(future.result()) == alone[asked.index(request)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data_type", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_row_is_answered_as_alone(model: str, data_type: str) -> None:
    config, tensors = MODELS[model]
    engine = engine_for(
        config, tensors(config), data_type=data_type, max_batch_size=12, deterministic=True
    )
    check_company(engine, model)
    engine.close()


@pytest.mark.parametrize("model", [pytest.param("rope", marks=pytest.mark.slow), "lora", "t5"])
def test_graphs_have_one_shape(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Where steps are graphs, and a step is launched before the last one's tokens."""
    monkeypatch.setitem(STEPS_AHEAD, "cpu", 1)
    monkeypatch.setattr(recording, "LOAD_SECONDS", math.inf)
    config, tensors = MODELS[model]
    graphs = EagerGraphs()
    engine = engine_for(
        config, tensors(config), graphs=graphs, max_batch_size=12, deterministic=True
    )
    recorded = len(graphs.recorded)
    check_company(engine, model)
    engine.close()
    steps = [key for key in graphs.asked if isinstance(key, tuple) and isinstance(key[0], int)]
    assert {key[0] for key in steps} == {12}
    assert len({key[1] for key in steps}) == 1
    assert recorded == len({*graphs.recorded, *graphs.asked})


@pytest.mark.parametrize(
    ("model", "division"),
    [
        ("rope", (1, 2)),
        ("t5", (2, 1)),
        pytest.param("rope", (2, 1), marks=pytest.mark.slow),
        pytest.param("t5", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_ranks(tmp_path: Path, model: str, division: tuple[int, int]) -> None:
    config, tensors = MODELS[model]
    engine = load_engine(
        tmp_path, config, tensors(config), *division, max_batch_size=12, deterministic=True
    )
    check_company(engine, model, seed=1, count=5)
    engine.close()


def test_an_encoder_alone() -> None:
    config = as_encoder(MODELS["t5"][0])
    engine = engine_for(config, t5_tensors(config), graphs=EagerGraphs(), deterministic=True)
    sources = [SOURCE[:length] for length in (3, 12, 5)]
    asked = [GenerateRequest(each, output_len=0, return_hidden_state=True) for each in sources]
    alone = [engine.submit(request).result(60).hidden_state for request in asked]
    together = [future.result(60).hidden_state for future in map(engine.submit, asked)]
    assert all(map(torch.equal, alone, together))
    engine.close()


def test_a_pass_takes_one_prompt() -> None:
    config, tensors = MODELS["rope"]
    engine = engine_for(config, tensors(config), max_batch_size=12, deterministic=True)
    before = engine.statistics.steps
    rows = [engine.submit(GenerateRequest((1, 2, 3), 1)) for _ in range(5)]
    wait(rows, 60)
    assert engine.statistics.steps - before >= 5
    engine.close()


def prefixed(count: int) -> list[GenerateRequest]:
    """Prompts that begin alike, go on in their own ways, or repeat themselves; some draft."""
    draw = random.Random(count)
    stem = tuple(draw.randrange(60) for _ in range(50))
    return [
        replace(
            request,
            input_ids=(*stem[: draw.choice((20, 35, 50))], *request.input_ids[:15] * 2),
            output_len=12,
        )
        for request in requests(draw, "rope", count)
        if request.sampling.beam_width == 1
    ]


def check_prefixes(build: Callable[[], Engine], count: int = 12) -> tuple[float, float]:
    """Rows of a new server each, of one in order, and all together, found prefixes or not: the same
    bits. Returns the number of draft tokens, and of those that came.
    """
    made = prefixed(count)
    alone = []
    for request in made[:3]:
        engine = build()
        alone.append(answer(engine.submit(replace(request, num_speculative_tokens=0)).result(60)))
        engine.close()
    engine = build()
    alone += [answer(engine.submit(request).result(60)) for request in made[3:]]
    for turn in range(3):
        order = random.Random(turn).sample(range(len(made)), len(made))
        drafting = [replace(one, num_speculative_tokens=(0, 3, 8)[turn]) for one in made]
        futures = [engine.submit(drafting[index]) for index in order]
        wait(futures, 60)
        for index, future in zip(order, futures, strict=True):
            assert answer(future.result()) == alone[index]
    assert values(engine.statistics, names.PREFIX_HITS)[""] > 0
    engine.close()
    return tried(engine), accepted(engine)


@pytest.mark.parametrize("data_type", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("graphs", [None, EagerGraphs()], ids=["launched", "graphs"])
def test_found_prefixes_and_drafts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, data_type: str, graphs: EagerGraphs | None
) -> None:
    """A hit ends where a pass of the prompt ends, and drafts take the places of padding."""
    monkeypatch.setattr(loading, "FIXED_CHUNK", 32)
    config, tensors = MODELS["rope"]
    options = {"data_type": data_type, "max_batch_size": 12, "graphs": graphs}
    drafted, _ = check_prefixes(
        lambda: engine_for(
            config, tensors(config), deterministic=True, enable_prefix_caching=True, **options
        )
    )
    assert drafted > 5


def test_a_draft_model_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FIXED_CHUNK", 32)
    config, tensors = MODELS["rope"]
    model = tensors(config)
    options = {"deterministic": True, "enable_prefix_caching": True, "draft": (config, model)}
    drafted, came = check_prefixes(
        lambda: engine_for(config, model, max_batch_size=12, **options), 8
    )
    assert drafted >= came > 20


def test_what_decoding_left_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys come from other passes than those of a prompt."""
    monkeypatch.setattr(loading, "FIXED_CHUNK", 32)
    config, tensors = MODELS["rope"]
    engine = engine_for(config, tensors(config), deterministic=True, enable_prefix_caching=True)
    first = GenerateRequest(tuple(range(40)), 40)
    said = engine.submit(first).result(60).output_ids
    found = [
        engine.submit(GenerateRequest(ids, 1)).result(60).num_cached_tokens
        for ids in ((*first.input_ids, *said), first.input_ids[:33], first.input_ids[:32])
    ]
    assert found == [32, 32, 0]
    engine.close()


@pytest.mark.parametrize(
    ("model", "data_type"),
    [
        ("rope", "bf16"),
        pytest.param("rope", "fp32", marks=pytest.mark.slow),
        pytest.param("gpt", "bf16", marks=pytest.mark.slow),
    ],
)
def test_one_rank_has_the_bits_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, data_type: str
) -> None:
    """Whatever runs beside, found prefixes and drafts included."""
    monkeypatch.setattr(loading, "FIXED_CHUNK", 32)
    config, made = MODELS[model]
    options = {"max_batch_size": 12, "deterministic": True, "enable_prefix_caching": True}
    tensors = made(config)
    two = load_engine(tmp_path, config, tensors, 2, 1, data_type=data_type, **options)
    one = engine_for(config, tensors, data_type=data_type, deterministic_ranks=2, **options)
    plain = engine_for(config, tensors, data_type=data_type, **options)
    results = []
    for engine in (two, one, plain):
        futures = [engine.submit(request) for request in prefixed(10) * 2]
        results.append([answer(future.result(60)) for future in futures])
        engine.close()
    assert results[0] == results[1]
    assert results[0] != results[2]  # which adds in another order


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("rope", {}, "it needs deterministic"),
        ("rope", {"deterministic": True, "deterministic_ranks": 4}, "the bits of two"),
        ("experts", {"deterministic": True}, "more than attention and an MLP"),
        ("lora", {"deterministic": True}, "it has LoRA adapters"),
        ("rope", {"deterministic": True, "quantization": "int8"}, "its weights are quantized"),
    ],
)
def test_models_without_the_bits_of_several_ranks_are_refused(
    model: str, options: dict[str, Any], message: str
) -> None:
    config, made = MODELS[model]
    with pytest.raises(ConfigError, match=f"another number of ranks: .*{message}"):
        runner_for(config, made(config), **{"deterministic_ranks": 2, **options})
