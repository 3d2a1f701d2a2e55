"""LoRA adapters that are added to a running engine: their rows answer as if they were exported."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.common.errors import ConfigError, RequestError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.ranks import operations
from launcher_scripts.engine.ranks.operations import OperationError
from launcher_scripts.engine.runner.weight_exchange import LoRALoad
from launcher_scripts.engine.swap import WeightSwaps
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import with_lora_slots
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.test_lora_stack import CASES, peft, prompt_logits
from tests.checkpoint.test_peft import LINEAR, MODELS
from tests.checkpoint.tiny_models import LATER_DECODERS
from tests.engine.small_t5 import t5_config

IDS = (3, 1, 4, 1, 5, 9, 2, 6)


@contextmanager
def running(folder: Path, tp: int = 1, pp: int = 1, **more: Any) -> Iterator[Engine]:
    """An engine with room for two adapters of rank 4."""
    options = {"max_batch_size": 4, "max_loras": 2, "max_lora_rank": 4, **more}
    settings = EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu", **options)
    engine = Engine.load(settings)
    try:
        yield engine
    finally:
        engine.close()


def logits(engine: Engine, adapter: int | None) -> Any:
    request = GenerateRequest(IDS, 0, lora_adapter=adapter, return_context_logits=True)
    return engine.submit(request).result(60).context_logits


@pytest.mark.parametrize(
    ("kind", "tp", "pp"), [("llama", 1, 1), ("llama", 2, 1), ("gpt2", 1, 1), ("qwen2", 1, 2)]
)
def test_it_answers_as_adapters_that_were_exported(
    tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    """The first of the files, the second added, smaller than the slot and of other projections."""
    model = MODELS[kind].save(tmp_path / "base")
    more = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    sql, law = (
        peft(tmp_path / name, model, endings, rank, **more)
        for name, endings, rank in zip(("sql", "law"), CASES[kind], (3, 2), strict=True)
    )
    both = export_folder(tmp_path / "base", tmp_path / "both", tp, lora_checkpoints=(sql, law))
    expected = prompt_logits(both, (None, 0, 1), tp)
    one = export_folder(tmp_path / "base", tmp_path / "one", tp, lora_checkpoints=(sql,))
    with running(one, tp, pp) as engine:
        number = engine.loras.load("law", Path(law))
        assert engine.loras.numbers == {"sql": 0, "law": number}
        for adapter, values in zip((None, 0, number), expected, strict=True):
            np.testing.assert_allclose(logits(engine, adapter), values, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("deepseek_v2", ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("deepseek_v3", ("q_b_proj", "kv_b_proj")),
        ("qwen2_moe", ("q_proj", "v_proj", "o_proj")),
    ],
)
def test_latent_attention_and_models_with_experts(
    tmp_path: Path, kind: str, modules: tuple[str, ...]
) -> None:
    """Their slots have no place for LoRA of an MLP, and one for zeros beside a projection."""
    model = LATER_DECODERS[kind].save(tmp_path / "base")
    law = peft(tmp_path / "law", model, modules, 2)
    stored = export_folder(tmp_path / "base", tmp_path / "stored", lora_checkpoints=(law,))
    (expected,) = prompt_logits(stored, (0,))
    with running(export_folder(tmp_path / "base", tmp_path / "plain")) as engine:
        values = logits(engine, engine.loras.load("law", Path(law)))
        np.testing.assert_allclose(values, expected, rtol=0, atol=5e-5)
        assert not np.allclose(values, logits(engine, None))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, its export `out`, and adapters sql, law, big (rank 8), dora."""
    folder = tmp_path_factory.mktemp("added")
    model = MODELS["llama"].save(folder / "base")
    for name, rank in (("sql", 4), ("law", 2), ("big", 8)):
        peft(folder / name, model, CASES["llama"][0], rank)
    peft(folder / "dora", model, ("q_proj",), 2, use_dora=True)
    gpt2 = MODELS["gpt2"].save(folder / "gpt2")
    peft(folder / "other", gpt2, ("c_attn",), 2, fan_in_fan_out=True)
    export_folder(folder / "base", folder / "out")
    return folder


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Engine]:
    with running(base / "out" / "m" / "1" / "1-gpu", enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared engine as it was."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        for name in engine.loras.numbers:
            engine.loras.unload(name)


def test_rows_in_flight_are_not_disturbed(engine: Engine, base: Path) -> None:
    """Also those of another adapter, beside which one comes and goes."""
    first = engine.loras.load("sql", base / "sql")
    rows = [GenerateRequest(IDS, 40, lora_adapter=adapter) for adapter in (None, first)]
    alone = [engine.submit(row).result(60).output_ids for row in rows]
    started: list[Future[GenerateOutput]] = [engine.submit(row) for row in rows]
    second = engine.loras.load("law", base / "law")
    engine.loras.unload("sql")
    assert [row.result(60).output_ids for row in started] == alone
    assert len({*alone, engine.submit(replace(rows[0], lora_adapter=second)).result(60).output_ids})
    assert second != first


def test_a_slot_is_used_again_and_a_number_never(engine: Engine, base: Path) -> None:
    """What a prefix cache has of the first adapter is not the second one's."""
    first = engine.loras.load("sql", base / "sql")
    long = GenerateRequest(IDS * 6, 2, lora_adapter=first)
    engine.submit(long).result(60)
    engine.loras.unload("sql")
    with pytest.raises(RequestError, match=f"names no LoRA adapter of the model; got {first}"):
        engine.submit(long).result(60)
    numbers = [engine.loras.load(name, base / "law") for name in ("law", "law2")]
    answers = [
        engine.submit(replace(long, lora_adapter=number)).result(60).output_ids
        for number in numbers
    ]
    assert answers[0] == answers[1]
    assert first not in numbers
    with pytest.raises(ConfigError, match=r"all 2 slots .* choices: unload law, unload law2"):
        engine.loras.load("sql", base / "sql")


@pytest.mark.parametrize(
    ("name", "adapter", "words"),
    [
        ("big", "big", r"rank is larger than the slots'; got 8; choices: at most 4"),
        ("dora", "dora", "can only be merged"),
        ("none", "none", "the adapter is not there; got"),
        ("base", "base", "holds no adapter that is known"),
        ("other", "other", "belongs? to no module|no module"),
        ("a/b", "sql", "a name may have letters"),
    ],
)
def test_one_that_does_not_fit_leaves_everything_as_it_was(
    engine: Engine, base: Path, name: str, adapter: str, words: str
) -> None:
    before = logits(engine, None)
    with pytest.raises((ConfigError, OperationError), match=words):
        engine.loras.load(name, base / adapter)
    assert engine.loras.numbers == {}
    np.testing.assert_array_equal(logits(engine, None), before)
    assert [engine.loras.load(good, base / "sql") for good in ("a", "b")]


def test_an_adapter_comes_to_all_ranks_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 finds other files than rank 0 has."""
    model = MODELS["llama"].save(tmp_path / "base")
    law = Path(peft(tmp_path / "law", model, CASES["llama"][0], 2))
    folder = export_folder(tmp_path / "base", tmp_path / "out", 2)
    with running(folder, 2) as engine:
        before = logits(engine, None)
        with monkeypatch.context() as patch:
            patch.setattr(LoRALoad, "prepare", lambda *_: None)  # of rank 0
            patch.setattr(operations, "source_digest", lambda _: "blake3:00")
            with pytest.raises(OperationError, match=r"^rank 1[^,]*: .*law has other files"):
                engine.loras.load("law", law)
        assert engine.loras.numbers == {}
        np.testing.assert_array_equal(logits(engine, None), before)
        number = engine.loras.load("law", law)
        assert not np.allclose(logits(engine, number), before)


def test_an_exchange_of_weights_keeps_added_adapters(tmp_path: Path) -> None:
    """Those of the files are exchanged with the weights."""
    model = MODELS["llama"].save(tmp_path / "a")
    first, law = (
        peft(tmp_path / name, model, CASES["llama"][0], rank)
        for name, rank in (("first/sql", 3), ("law", 2))
    )
    second = peft(tmp_path / "second/sql", model, ("q_proj", *LINEAR[1:]), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "b")
    fresh = export_folder(tmp_path / "b", tmp_path / "both", lora_checkpoints=(second, law))
    expected = prompt_logits(fresh, (None, 0, 1))
    served, other = (
        export_folder(tmp_path / base, tmp_path / f"out_{base}", lora_checkpoints=(sql,))
        for base, sql in (("a", first), ("b", second))
    )
    with running(served) as engine:
        number = engine.loras.load("law", Path(law))
        WeightSwaps(engine).swap(other)
        for adapter, values in zip((None, 0, number), expected, strict=True):
            np.testing.assert_allclose(logits(engine, adapter), values, rtol=0, atol=2e-5)


def test_names_are_of_one_adapter(engine: Engine, base: Path) -> None:
    engine.loras.load("sql", base / "sql")
    with pytest.raises(ConfigError, match="there is an adapter of this name: unload it first"):
        engine.loras.load("sql", base / "law")
    with pytest.raises(ConfigError, match=r"there is no such adapter .* got 'law'; choices: sql"):
        engine.loras.unload("law")


def test_a_model_without_room_says_how_to_make_it(base: Path) -> None:
    with (
        running(base / "out" / "m" / "1" / "1-gpu", max_loras=0) as engine,
        pytest.raises(ConfigError, match=r"change export\.triton_deployment\.max_loras=N"),
    ):
        engine.loras.load("sql", base / "sql")


def test_a_model_whose_lora_can_only_be_merged_has_no_slots() -> None:
    config = t5_config()
    with pytest.raises(ConfigError, match="can only be merged into its weights: none can be added"):
        with_lora_slots(config, family_of(config).weights(config), 1, 4)
