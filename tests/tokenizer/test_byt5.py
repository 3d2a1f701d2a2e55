"""ByT5's tokenizer: the ids and the text of transformers, from a folder without a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from launcher_scripts.checkpoint.formats.nemo_config import check_source_tokenizer
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer, tokenizer_files
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder

TEXTS = ("Grüße, 漢字 and 🙂", "a <extra_id_0> b <extra_id_12>.", " a  b ", "line\nbreak")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text(tmp_path: Path, text: str) -> None:
    expected = ByT5Tokenizer()
    expected.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    opening, closing = tokenizer.surround()
    assert [*opening, *ids, *closing] == expected(text).input_ids
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.vocab_size == len(expected)


def test_sizes_and_parts(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.start_id, tokenizer.pad_id, tokenizer.end_id) == (None, 0, 1)
    assert tokenizer.special_id("<extra_id_0>") == 259 and tokenizer.special_id("a") is None
    pieces = tokenizer.pieces()
    assert len(pieces) == 384 and pieces[3 + 0x41] == b"A" and pieces[259] == b""
    euro = tokenizer.encode("\u20ac")
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    assert tokenizer.token_bytes(384) == b""


def test_an_export_and_its_answer(tmp_path: Path) -> None:
    """The class stands in config.json alone, as where ByT5 was published."""
    torch.manual_seed(3)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(**sizes, vocab_size=384, decoder_start_token_id=0, tie_word_embeddings=False)
    ).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    folder, expected = tmp_path / "hf", ByT5Tokenizer()
    model.save_pretrained(folder)
    expected.save_pretrained(folder)
    for name, change in (
        ("config.json", {"tokenizer_class": "ByT5Tokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
    ):
        said = json.loads((folder / name).read_text()) | change
        kept = {key: value for key, value in said.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))
    check_source_tokenizer(folder)
    exported = export_folder(folder, tmp_path, tokenizer=TokenizerSettings())
    names = [path.name for path in tokenizer_files(exported)]
    assert names[0] == "tokenizer_config.json" and len(names) == len({*names})
    tokenizer = load_tokenizer(exported)
    ids = tokenizer.encode(TEXTS[0])
    engine = Engine.load(EngineSettings(exported, device="cpu"))
    try:
        answer = engine.submit(GenerateRequest((*ids, 1), 8)).result(60).output_ids
    finally:
        engine.close()
    with torch.no_grad():
        theirs = model.generate(**expected(TEXTS[0], return_tensors="pt"), max_new_tokens=8)
    assert list(answer) == theirs[0, 1 : 1 + len(answer)].tolist()


def test_a_folder_that_only_lost_its_tokenizer_is_none(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(TokenizerError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    assert tokenizer_files(tmp_path) == []
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        check_source_tokenizer(tmp_path)
