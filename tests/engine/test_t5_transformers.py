"""T5s of transformers, exported and run: its logits, its greedy tokens, its encoder's states."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.tiny_models import ENCODER_DECODERS, T5, TinyModel
from tests.engine.small_models import generate
from tests.engine.small_t5 import DECODER, SOURCE, decoder_logits, encode

NAMES = ("t5_v1_0", "t5_v1_1", "ul2", "mt5", "umt5")
MAX_PIECES = 62
MAX_TOKENS = 64


def load(folder: Path, tp: int = 1, pp: int = 1, **more: object) -> Engine:
    return Engine.load(
        EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu", **more)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model(tmp_path: Path, name):
    model = ENCODER_DECODERS[name].save(tmp_path / "hf")
    model.set_attn_implementation("eager")  # which gives attentions
    folder = export_folder(tmp_path / "hf", tmp_path)
    ids, targets = torch.tensor([SOURCE]), torch.tensor([DECODER])
    with torch.no_grad():
        want = model(input_ids=ids, decoder_input_ids=targets, output_attentions=True)
        tokens = model.generate(ids, max_new_tokens=15, do_sample=False, use_cache=False)
    engine = load(folder)
    got = decoder_logits(engine, SOURCE, DECODER)
    assert (got - want.logits[0]).abs().max() <= 1e-5
    assert generate(engine, SOURCE, 15) == tokens[0, 1:].tolist()
    engine.close()
    encoder = load(folder, model_type="T5-Encoder")
    answer = encode(encoder, SOURCE, attentions=True)
    encoder.close()
    hidden = want.encoder_last_hidden_state[0]
    assert (answer.hidden_state - hidden).abs().max() <= 1e-5
    attentions = torch.stack(want.encoder_attentions)[:, 0]
    assert answer.attentions.shape == attentions.shape
    assert (answer.attentions - attentions).abs().max() <= 1e-5


# Layers with and without experts in both stacks; no expert is full.
SWITCH = TinyModel(
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig",
    {
        **T5,
        "num_experts": 5,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_bias": True,
        "expert_capacity": 1000,
    },
)


LONG = TinyModel(
    "LongT5ForConditionalGeneration",
    "LongT5Config",
    {**T5, "encoder_attention_type": "local", "local_radius": 5, "feed_forward_proj": "gated-gelu"},
)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return lively(LONG, tmp_path_factory.mktemp("long"), 0.9)


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return lively(ENCODER_DECODERS["umt5"], tmp_path_factory.mktemp("umt5"))


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return lively(SWITCH, tmp_path_factory.mktemp("switch"))


def lively(tiny: TinyModel, folder: Path, size: float = 1.2) -> tuple[Path, Any]:
    """The folder and the model in it, whose weights are so large that its texts are lively."""
    model = tiny.make()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3 if name == "shared.weight" else size)
    model.save_pretrained(folder / "hf")
    return folder, model


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_bias_of_every_layer(umt5: tuple[Path, Any], tp: int, pp: int):
    compare(umt5, tp, pp)


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_an_encoder_of_near_tokens(long: tuple[Path, Any], tp: int, pp: int) -> None:
    compare(long, tp, pp)


def test_an_encoder_of_blocks_is_refused(tmp_path: Path) -> None:
    values = {**LONG.values, "encoder_attention_type": "transient-global"}
    TinyModel(LONG.model, LONG.config, values).make().save_pretrained(tmp_path / "hf")
    words = "encoder_attention_type is not supported; got 'transient-global'; choices: local"
    refused_export(tmp_path / "hf", tmp_path, words)


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_experts(switch: tuple[Path, Any], tp: int, pp: int) -> None:
    compare(switch, tp, pp)
    folder, _ = switch
    (ini,) = (folder / f"{tp}-{pp}").rglob("config.ini")
    config = read_config(ini.parent).config
    assert (config.encoder_expert_layers, config.decoder_expert_layers) == ("1", "1")


def compare(folder_and_model: tuple[Path, Any], tp: int, pp: int) -> None:
    """Sources and texts that reach beyond the largest distance."""
    folder, model = folder_and_model
    source = tuple(range(3, 60))
    target = tuple(range(40))
    exported = export_folder(folder / "hf", folder / f"{tp}-{pp}", tp)
    with torch.no_grad():
        ids, targets = torch.tensor([source]), torch.tensor([target])
        want = model(input_ids=ids, decoder_input_ids=targets).logits[0]
        tokens = model.generate(
            ids, max_new_tokens=64, eos_token_id=None, do_sample=False, use_cache=False
        )
    engine = load(exported, tp, pp)
    got = decoder_logits(engine, source, target)
    text = generate(engine, source, 64, end_id=want.shape[1])
    engine.close()
    assert (got - want).abs().max() <= 2e-4
    assert text == tokens[0, 1:].tolist()
    assert len(set(text)) > 4


@pytest.fixture(scope="module")
def trained(shared_dir: Path) -> Path:
    return shared_dir / "fixtures" / "hf" / "t5_multi30k"


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """tp_size -> folder of shards, the tokenizer beside them."""
    target = tmp_path_factory.mktemp("multi30k")
    settings = TokenizerSettings("auto")
    return {
        size: export_folder(trained, target / str(size), size, tokenizer=settings)
        for size in (1, 2)
    }


def items(shared_dir: Path, trained: Path, folder: Path) -> Iterator[tuple[tuple[int, ...], list]]:
    """Ids of an English line, and of transformers' translation."""
    name = "test_2016_flickr_greedy_token_ids_first_100"
    answers = json.loads((trained / "reference_greedy.json").read_text())[name]
    tokenizer = load_tokenizer(folder)
    lines = shared_dir / "data" / "multi30k_en-de" / "test_2016_flickr.en.gz"
    with gzip.open(lines, "rt", encoding="utf-8") as file:
        for answer, line in zip(answers, file, strict=False):
            yield (*tokenizer.encode(line.strip())[:MAX_PIECES], 1), answer


def check_translations(engine: Engine, pairs: list[tuple[tuple[int, ...], list]]) -> None:
    """All in flight at once, as rows join and leave."""
    futures = [engine.submit(GenerateRequest(source, MAX_TOKENS)) for source, _ in pairs]
    for (_, answer), future in zip(pairs, futures, strict=True):
        assert list(future.result(300).output_ids) == answer
    engine.close()


def test_first_translations_of_a_trained_model(shared_dir: Path, trained: Path, exported):
    pairs = list(items(shared_dir, trained, exported[1]))[:10]
    check_translations(load(exported[1], max_batch_size=4), pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_translations_of_a_trained_model(shared_dir: Path, trained: Path, exported, tp, pp):
    pairs = list(items(shared_dir, trained, exported[tp]))
    assert len(pairs) == 100
    check_translations(load(exported[tp], tp, pp, max_batch_size=16), pairs)
