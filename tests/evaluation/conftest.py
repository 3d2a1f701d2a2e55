"""What the tests of an evaluation's steps share."""

import string

import pytest

from tests.evaluation.fake_server import VOCAB
from tests.evaluation.text_tasks import write_letters


@pytest.fixture
def job(tmp_path):
    """A folder with items, a tokenizer of the letters a to k, and settings to measure both."""
    write_letters(tmp_path, string.ascii_lowercase[:VOCAB])
    texts = ["ab cd", "b f", "k a"]
    (tmp_path / "items.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return tmp_path
