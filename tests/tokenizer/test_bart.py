"""The tokenizers of BART, mBART and mBART-50: the ids and the text of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.common.tokenizer import TokenizerError, load_tokenizer
from tests.tokenizer.bart_tokenizers import TEXTS, bart, mbart, mbart50, pieces, save_pieces

MULTILINGUAL = {"mbart": mbart, "mbart50": mbart50}


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
