"""What the tests of an evaluation's steps share."""

import json

import pytest

from tests.evaluation.fake_server import VOCAB


@pytest.fixture
def job(tmp_path):
    """A folder with items, a tokenizer of the letters a to k, and settings to measure both."""
    vocab = {letter: index for index, letter in enumerate("abcdefghijk")}
    assert len(vocab) == VOCAB
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = ["ab cd", "b f", "k a"]
    (tmp_path / "items.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return tmp_path
