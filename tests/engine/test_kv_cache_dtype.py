"""Keys and values in e4m3: what is kept and read, how much memory it takes, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.common.errors import ConfigError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core import row_allocator
from launcher_scripts.engine.core.session import Session
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.model.kv_cache import LayerStates, TokenState, bytes_per_token
from launcher_scripts.engine.runner import loading
from launcher_scripts.engine.runner.loading import PREFILL_TOKENS, load_weights, open_checkpoint
from launcher_scripts.kernels import reference, reference_attention
from launcher_scripts.kernels.cuda.compiling import DeviceTraits
from launcher_scripts.kernels.operands import Heads, LayerCache
from launcher_scripts.kernels.quantization import FP8, saturated
from tests.engine.small_bart import bart_config
from tests.engine.small_models import (
    EagerGraphs,
    context_logits,
    engine_for,
    load_engine,
    random_tensors,
    runner_for,
    small_config,
    write_checkpoint,
)
from tests.engine.small_t5 import GATED, SOURCE, t5_config, t5_tensors
from tests.engine.test_growing_rows import preemptions, same_answers
from tests.engine.test_prefix_cache import text
from tests.engine.test_prefix_sharing import MODELS, hits
from tests.engine.test_session import TURNS, play

IDS = (5, 60, 11, 11, 2, 33, 47, 9, 28, 64, 3, 17)
BEAMS = SamplingParameters(beam_width=3)
SAMPLED = SamplingParameters(top_k=20, temperature=1.5, random_seed=3)
T5, BART = t5_config(**GATED), bart_config()
SEVERAL = {
    **MODELS,
    "T5": (T5, t5_tensors(T5)),
    "BART": (BART, random_tensors(BART)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_and_the_largest_is_the_most_there_is(dtype: torch.dtype) -> None:
    """448 is the largest, 2^-9 the smallest; three bits follow the first one."""
    values = [0.0, 1.0, 1.0625, 1.1875, 17.5, 430.0, 465.0, 6e4, -6e4, 2.0**-10, 3 * 2.0**-10]
    expected = [0.0, 1.0, 1.0, 1.25, 18.0, 416.0, 448.0, 448.0, -448.0, 0.0, 2.0**-8]
    found = saturated(torch.tensor(values, dtype=dtype), FP8)
    assert found.dtype == FP8
    assert found.float().tolist() == [
        torch.tensor(each).to(dtype).float().item() for each in expected
    ]
    assert saturated(torch.tensor([torch.inf, torch.nan]), FP8).float().nan_to_num(9).tolist() == [
        448.0,
        9.0,
    ]


def test_keys_are_rounded_once_behind_the_rotation() -> None:
    """From float32, as kernels do, whatever type the queries have."""
    heads = Heads(2, 1, 4)
    qkv = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotary = reference.rotary_table(torch.arange(5), torch.tensor([1.0, 0.1]))
    caches = [LayerCache(*torch.zeros(2, 1, 5, 4).to(dtype)) for dtype in (FP8, torch.float32)]
    queries = [reference.store_kv(qkv, heads, rotary, torch.arange(5), cache) for cache in caches]
    assert torch.equal(*queries) and queries[0].dtype == torch.bfloat16
    for kept, exact in zip(*((each.keys, each.values) for each in caches), strict=True):
        assert kept.float().tolist() == exact.to(FP8).float().tolist()


def two_kinds(monkeypatch: pytest.MonkeyPatch, *model: Any, **options: object) -> Iterator[Engine]:
    """Engines with a cache in e4m3, and with a wide one of the same numbers."""
    for kept in ("fp8", "auto"):
        if kept == "auto":
            for module in (reference, reference_attention):
                monkeypatch.setattr(
                    module, "saturated", lambda values, dtype: saturated(values, FP8).to(dtype)
                )
        engine = engine_for(*model, kv_cache_dtype=kept, **options)
        yield engine
        engine.close()


@pytest.mark.parametrize("name", SEVERAL)
def test_an_engine_attends_to_rounded_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The tokens of a cache in e4m3 are those of a wide one with the same numbers, not of another:
    own ones and the encoder's, of prompts and of steps, sampled and of beams."""
    requests = [
        GenerateRequest(SOURCE, 12, sampling, return_log_probs=True)
        for sampling in (SamplingParameters(), SAMPLED, BEAMS)
    ]
    exactly = engine_for(*SEVERAL[name])
    exact = exactly.submit(requests[0]).result(60)
    exactly.close()
    found = []
    for engine in two_kinds(monkeypatch, *SEVERAL[name]):
        found.append([engine.submit(request).result(60) for request in requests])
    for got, want in zip(*found, strict=True):
        assert got.output_ids == want.output_ids
        assert got.cum_log_probs == pytest.approx(want.cum_log_probs, abs=1e-4)
    assert found[0][0].cum_log_probs != pytest.approx(exact.cum_log_probs, abs=1e-3)


@pytest.mark.parametrize("data_type", ["fp32", "fp16", "bf16"])
def test_logits_stay_near(data_type: str) -> None:
    config = small_config()
    tensors = random_tensors(config)
    found = []
    for kept in ("auto", "fp8"):
        engine = engine_for(config, tensors, data_type=data_type, kv_cache_dtype=kept)
        found.append(context_logits(engine, IDS))
        engine.close()
    exact, got = found
    assert 0 < (got - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(("data_type", "times"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_the_same_memory_has_room_for_more_tokens(
    monkeypatch: pytest.MonkeyPatch, data_type: str, times: int
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda *_: 64 << 10)
    config = small_config()
    tensors = random_tensors(config)
    caches = [
        runner_for(config, tensors, data_type=data_type, kv_cache_dtype=kept)[1].decoder.cache
        for kept in ("auto", "fp8")
    ]
    states = [LayerStates(TokenState(2, config.num_kv_heads, config.head_size))] * config.num_layers
    for cache in caches:
        entries = -(-2 * 4 * (cache.slots + 1) // 16)  # bytes of the table, for each token
        size = bytes_per_token(states, cache.layers[0].keys.dtype) + entries
        assert cache.capacity + 16 == (64 << 10) // size // 16 * 16  # with a block for padding
    assert caches[1].capacity >= times * caches[0].capacity
    layer = caches[1].layers[0]
    assert layer.keys.dtype == layer.values.dtype == FP8
    assert layer.keys.untyped_storage().nbytes() <= 64 << 10


def answers_of(engine: Engine, requests: list[GenerateRequest]) -> list:
    futures = [engine.submit(request) for request in requests]
    for future in futures:
        future.result(60)
    return futures


REQUESTS = [
    GenerateRequest(
        (*text(70, seed % 2), *text(5 + seed, seed)),
        20,
        SamplingParameters() if seed % 2 else SAMPLED,
        return_log_probs=True,
    )
    for seed in range(6)
]


@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("rope", marks=pytest.mark.slow), "window", "latent"]
)
def test_a_row_has_its_tokens_however_it_runs(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Alone; among others; with a prompt in pieces; behind a shared prefix; computed again; in
    steps that are graphs. A prompt attends to its own tokens as they are kept."""
    monkeypatch.setattr(row_allocator, "SPARE_SHARE", 0.0)
    alone = engine_for(*MODELS[model], max_batch_size=1, kv_cache_dtype="fp8")
    wanted = answers_of(alone, REQUESTS)
    alone.close()
    pieces = {"max_tokens": 4000}
    moved = {"max_tokens": 260, "max_batch_size": 12}
    shared = {"enable_prefix_caching": True}
    for options in ({}, pieces, shared, moved, {"graphs": EagerGraphs()}):
        monkeypatch.setitem(PREFILL_TOKENS, "cpu", 23 if options is pieces else 2048)
        engine = engine_for(*MODELS[model], kv_cache_dtype="fp8", **options)
        for _ in same_answers(wanted, answers_of(engine, REQUESTS)):
            pass
        assert hits(engine) > 0 or options is not shared
        assert preemptions(engine) > 0 or options is not moved
        engine.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_get_the_same_tokens(tmp_path: Path, tp: int, pp: int) -> None:
    engines = [
        engine_for(*MODELS["rope"], kv_cache_dtype="fp8"),
        load_engine(tmp_path, *MODELS["rope"], tp, pp, kv_cache_dtype="fp8"),
    ]
    found = [answers_of(engine, REQUESTS) for engine in engines]
    for _ in same_answers(*found):
        pass
    for engine in engines:
        engine.close()


def test_weights_in_bytes_go_with_it() -> None:
    config = small_config()
    tensors = random_tensors(config)
    found = []
    for quantization in (None, "int8", "fp8"):
        engine = engine_for(config, tensors, quantization=quantization, kv_cache_dtype="fp8")
        found.append(context_logits(engine, IDS))
        engine.close()
    exact, *others = found
    for near, got in zip((0.05, 0.3), others, strict=True):
        assert 0 < (got - exact).norm() < near * exact.norm()


def test_a_session_moves_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the window has left come last."""
    said = []
    for engine in two_kinds(monkeypatch, *MODELS["rope"], max_tokens=48):
        said.append([each.output_ids for each in play(engine, Session(200, 16), TURNS)])
    assert said[0] == said[1]


def test_others_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown kv_cache_dtype .*got 'fp4'; choices: auto, fp8"
    ):
        EngineSettings(Path("unused"), kv_cache_dtype="fp4")


def test_a_gpu_that_cannot_read_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    folder = write_checkpoint(tmp_path / "1-gpu", config, random_tensors(config), 1)
    settings = EngineSettings(folder, kv_cache_dtype="fp8")
    checkpoint = open_checkpoint(settings, verify=False)
    monkeypatch.setattr(loading, "traits_of", lambda _: DeviceTraits((8, 6), 99 << 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A40")
    with pytest.raises(
        ConfigError,
        match=r"needs compute capability 8\.9; got 'A40'; choices: auto; change kv_cache_dtype",
    ):
        load_weights(settings, checkpoint, 0, torch.device("cuda"))
