"""T5Gemmas of transformers, exported and run: sources and texts longer than the windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.model_repository import encoding_parameters
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.tiny_models import T5GEMMA, T5GEMMA2, TinyModel
from tests.engine.small_models import generate
from tests.engine.small_t5 import decoder_logits, encode

SOURCE = tuple(range(3, 50))
TARGET = tuple(range(1, 40))
TOLERANCE = 2e-4


MODELS = {"t5gemma": T5GEMMA, "t5gemma2": T5GEMMA2}


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A folder and the model in it: an output table of its own makes its texts lively."""
    tiny = MODELS[request.param]
    values = {**tiny.values, "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp(request.param)
    model = TinyModel(tiny.model, tiny.config, values).make()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1.0 if "norm" in name else 0.05 if "embed" in name else 0.3)
    head, table = model.lm_head.out_proj.weight, model.get_input_embeddings().weight
    assert head is not table
    model.save_pretrained(folder / "hf")
    model.set_attn_implementation("eager")
    return folder, model


def load(folder: Path, tp: int = 1, pp: int = 1, **more: object) -> Engine:
    return Engine.load(
        EngineSettings(folder, parallelism=Parallelism(tp, pp), device="cpu", **more)
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_logits_and_greedy_tokens(saved: tuple[Path, Any], tp: int, pp: int) -> None:
    folder, model = saved
    exported = export_folder(folder / "hf", folder / f"{tp}-{pp}", tp)
    ids, targets = torch.tensor([SOURCE]), torch.tensor([TARGET])
    with torch.no_grad():
        want = model(input_ids=ids, decoder_input_ids=targets).logits[0]
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            decoder_start_token_id=2,
            max_new_tokens=64,
            eos_token_id=None,
            do_sample=False,
            use_cache=False,
        )
    engine = load(exported, tp, pp)
    got = decoder_logits(engine, SOURCE, TARGET)
    text = generate(engine, SOURCE, 64, end_id=want.shape[1])
    short = engine.submit(GenerateRequest(SOURCE[:5], 6, end_id=want.shape[1]))
    again = engine.submit(GenerateRequest(SOURCE, 64, end_id=want.shape[1]))
    assert list(again.result(60).output_ids) == text
    assert len(short.result(60).output_ids) == 6
    engine.close()
    assert (got - want).abs().max() <= TOLERANCE
    assert text == tokens[0, 1:].tolist()
    assert len(set(text)) > 4


def test_its_encoder_alone(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    exported = export_folder(folder / "hf", folder / "encoder", encoder_only=True)
    with torch.no_grad():
        encoder = getattr(model.model.encoder, "text_model", model.model.encoder)
        want = encoder(torch.tensor([SOURCE]), output_attentions=True)
    engine = load(exported, model_type="T5-Encoder")
    answer = encode(engine, SOURCE, attentions=True)
    engine.close()
    assert (answer.hidden_state - want.last_hidden_state[0]).abs().max() <= TOLERANCE
    attentions = torch.stack(want.attentions)[:, 0]
    assert (answer.attentions - attentions).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_an_output_table_that_is_the_decoders(name: str, tmp_path: Path) -> None:
    model = MODELS[name].save(tmp_path / "hf")
    engine = load(export_folder(tmp_path / "hf", tmp_path))
    got = decoder_logits(engine, SOURCE, TARGET)
    engine.close()
    with torch.no_grad():
        ids, targets = torch.tensor([SOURCE]), torch.tensor([TARGET])
        want = model(input_ids=ids, decoder_input_ids=targets).logits[0]
    assert (got - want).abs().max() <= TOLERANCE


def test_stacks_that_differ_are_refused(tmp_path: Path) -> None:
    T5GEMMA.make().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    raw["encoder"] |= {"hidden_size": 32, "layer_types": ["full_attention"] * 3}
    raw["decoder"]["rope_parameters"]["rope_type"] = "yarn"
    path.write_text(json.dumps(raw))
    message = refused_export(tmp_path / "hf", tmp_path, "hidden_size of encoder and decoder must")
    for part in ("layer_types of the encoder", "unknown rope_type; got 'yarn'", "rope_parameters"):
        assert part in message


def test_its_tokenizer_says_what_is_around_an_input(tmp_path: Path) -> None:
    T5GEMMA.make().save_pretrained(tmp_path / "hf")
    tokenizer = Tokenizer(
        WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "a": 4}, "<unk>")
    )
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    folder = export_folder(tmp_path / "hf", tmp_path, tokenizer=TokenizerSettings("auto"))
    parameters = encoding_parameters(FTCheckpoint.open(folder))
    assert parameters == {"pad_id": 0, "opening_id": "2"}
