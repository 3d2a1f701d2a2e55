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
    save_pieces,
)

MULTILINGUAL = {"mbart": mbart, "mbart50": mbart50}


pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


@pytest.fixture(scope="module")
def model() -> bytes:
    return pieces()


def check(folder: Path, expected: Any, texts: list[str]) -> None:
    tokenizer = load_tokenizer(folder)
    opening, closing = tokenizer.around()
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


def test_a_barts_vocabulary_and_merges(tmp_path: Path) -> None:
    expected = bart()
    (tmp_path / "vocab.json").write_text(json.dumps(expected.get_vocab()))
    merges = json.loads(expected.backend_tokenizer.to_str())["model"]["merges"]
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges))
    check(tmp_path, expected, [*TEXTS, "a <mask> b"])


@pytest.mark.parametrize("make", MULTILINGUAL.values(), ids=MULTILINGUAL)
@pytest.mark.parametrize("language", [None, "fr_XX"])
def test_an_mbart(tmp_path: Path, model: bytes, make: Callable[..., Any], language: str) -> None:
    expected = make(model, src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS)


@pytest.mark.parametrize("make", MULTILINGUAL.values(), ids=MULTILINGUAL)
def test_pieces_are_numbered_as_the_model_was_trained(
    tmp_path: Path, model: bytes, make: Callable[..., Any]
) -> None:
    expected = make(model, src_lang="fr_XX")
    save_pieces(tmp_path, model, expected)
    check(tmp_path, expected, TEXTS[:3])
    tokenizer = load_tokenizer(tmp_path)
    for token in ("<s>", "<mask>", "ar_AR", "zh_CN", "sl_SI"):
        known = token in expected.get_vocab()
        assert tokenizer.special_id(token) == (
            expected.convert_tokens_to_ids(token) if known else None
        )
    assert tokenizer.special_id("the") is None
    assert 0 not in tokenizer.encode("<s>")  # what looks like a special token is text


def test_a_language_that_there_is_not(tmp_path: Path, model: bytes) -> None:
    mbart(model).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "src_lang": "xx_XX"}))
    with pytest.raises(TokenizerError, match=r"src_lang of .* got 'xx_XX'"):
        load_tokenizer(tmp_path).around()


@pytest.mark.parametrize("make", [mbart, mbart50])
def test_what_each_token_of_an_mbart_stands_for(
    tmp_path: Path, model: bytes, make: Callable[..., Any]
) -> None:
    expected = make(model)
    save_pieces(tmp_path, model, expected)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXTS[0])
    found = b"".join(map(tokenizer.token_bytes, ids))
    assert found.decode().strip() == tokenizer.decode(ids)
    assert tokenizer.token_bytes(tokenizer.special_id("<mask>")) == b"<mask>"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(("language", "code"), [(None, "en"), ("fr", "fr")])
def test_an_m2m_100(tmp_path: Path, model: bytes, language: str | None, code: str) -> None:
    expected = m2m_100(tmp_path, model, src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS[:3])
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.around() == ([expected.get_lang_id(code)], [expected.eos_token_id])
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


@pytest.mark.parametrize("fast", [True, False])
def test_a_pegasus(tmp_path: Path, fast: bool) -> None:
    """tokenizer.json, or SentencePiece's model, as an export names it."""
    expected, model = pegasus()
    expected.save_pretrained(tmp_path)
    if not fast:
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.model").write_bytes(model)
    check(tmp_path, expected, TEXTS[:3])


@pytest.mark.parametrize(("language", "code"), [(None, "eng_Latn"), ("deu_Latn", "deu_Latn")])
def test_an_nllb(tmp_path: Path, language: str | None, code: str) -> None:
    expected = nllb(src_lang=language)
    expected.save_pretrained(tmp_path)
    check(tmp_path, expected, TEXTS[:2])
    before, _ = load_tokenizer(tmp_path).around()
    assert before == [expected.convert_tokens_to_ids(code)]


def test_an_nllb_that_puts_its_language_last_is_refused(tmp_path: Path) -> None:
    nllb(legacy_behaviour=True).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="legacy_behaviour"):
        load_tokenizer(tmp_path).around()


@pytest.mark.parametrize("make", [m2m_100, marian])
def test_the_pieces_of_every_id(tmp_path: Path, model: bytes, make: Callable[..., Any]) -> None:
    make(tmp_path, model)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXTS[0])
    pieces = tokenizer.pieces()
    assert b"".join(pieces[i] for i in ids).decode().strip() == tokenizer.decode(ids)
    assert len(pieces) == tokenizer.vocab_size
    assert pieces[tokenizer.end_id] == b""
