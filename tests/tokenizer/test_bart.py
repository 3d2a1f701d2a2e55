"""The tokenizers of BART and its kin: the ids and the text of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer
from tests.tokenizer.bart_tokenizers import (
    TEXTS,
    bart,
    m2m_100,
    marian,
    mbart,
    mbart50,
    nllb,
    pegasus,
    pieces,
)

MULTILINGUAL = {"mbart": mbart, "mbart50": mbart50}


pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


@pytest.fixture(scope="module")
def model() -> bytes:
    return pieces()


def check(folder: Path, expected: Any, texts: list[str]) -> None:
    tokenizer = load_tokenizer(folder)
    opening, closing = tokenizer.surround()
    assert tokenizer.vocab_size == len(expected)
    assert (tokenizer.end_id, tokenizer.pad_id) == (expected.eos_token_id, expected.pad_token_id)
    for text in texts:
        ids = expected(text).input_ids
        assert [*opening, *tokenizer.encode(text), *closing] == ids
        assert tokenizer.decode(ids) == expected.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_bart(tmp_path: Path) -> None:
    expected = bart()
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, [*TEXTS, "a <mask> b"])


@pytest.mark.parametrize("make", MULTILINGUAL.values(), ids=MULTILINGUAL)
@pytest.mark.parametrize("language", [None, "fr_XX"])
def test_an_mbart(tmp_path: Path, model: bytes, make: Callable[..., Any], language: str) -> None:
    expected = make(model, src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS)


def test_a_language_that_there_is_not(tmp_path: Path, model: bytes) -> None:
    mbart(model).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "src_lang": "xx_XX"}))
    with pytest.raises(TokenizerError, match=r"src_lang of .* got 'xx_XX'"):
        load_tokenizer(tmp_path).surround()


@pytest.mark.parametrize(("language", "code"), [(None, "en"), ("fr", "fr")])
def test_an_m2m_100(tmp_path: Path, model: bytes, language: str | None, code: str) -> None:
    expected = m2m_100(tmp_path, model, src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.surround() == ([expected.get_lang_id(code)], [expected.eos_token_id])
    for name in ("zu", "__zu__"):
        assert tokenizer.special_id(name) == expected.get_lang_id("zu")
    assert tokenizer.token_bytes(expected.get_lang_id("zu")) == b"__zu__"
    assert tokenizer.decode([expected.get_lang_id("zu")]) == ""


def test_an_m2m_100_of_other_languages(tmp_path: Path, model: bytes) -> None:
    expected = m2m_100(tmp_path, model, language_codes="wmt21")
    expected.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).special_id("ha") == expected.get_lang_id("ha")
    assert load_tokenizer(tmp_path).special_id("fr") is None


def test_a_marian(tmp_path: Path, model: bytes) -> None:
    expected = marian(tmp_path, model)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, [*TEXTS[:3], ">>fra<< The quick fox", ">>xx<< fox", ">> fox"])
    tokenizer = load_tokenizer(tmp_path)
    word = expected.get_vocab()["▁bonjour"]
    assert tokenizer.encode("fox")[0] != tokenizer.encode(">>fra<< fox")[0]
    assert tokenizer.decode([word, word, tokenizer.end_id]) == "bonjour bonjour"
    assert tokenizer.start_id is None


def test_a_pegasus(tmp_path: Path) -> None:
    expected, _ = pegasus()
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS[:3])


@pytest.mark.parametrize(("language", "code"), [(None, "eng_Latn"), ("deu_Latn", "deu_Latn")])
def test_an_nllb(tmp_path: Path, language: str | None, code: str) -> None:
    expected = nllb(src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS[:2])
    before, _ = load_tokenizer(tmp_path).surround()
    assert before == [expected.convert_tokens_to_ids(code)]


def test_an_nllb_that_puts_its_language_last_is_refused(tmp_path: Path) -> None:
    nllb(legacy_behaviour=True).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="legacy_behaviour"):
        load_tokenizer(tmp_path).surround()


@pytest.mark.parametrize("make", [m2m_100, marian])
def test_the_pieces_of_every_id(tmp_path: Path, model: bytes, make: Callable[..., Any]) -> None:
    make(tmp_path, model)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXTS[0])
    pieces = tokenizer.pieces()
    assert b"".join(pieces[i] for i in ids).decode().strip() == tokenizer.decode(ids)
    assert len(pieces) == tokenizer.vocab_size
    assert pieces[tokenizer.end_id] == b""
