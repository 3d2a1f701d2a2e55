"""What the tests of an evaluation's steps share."""

import string

import pytest

from tests.evaluation.fake_server import VOCAB
from tests.evaluation.text_tasks import write_letters


@pytest.fixture
def undrawn(monkeypatch):
    """Plots that are not drawn, where they are not what is looked at."""
    drawn = "launcher_scripts.evaluation.plots._svg"
    monkeypatch.setattr(drawn, lambda *_: '<svg role="img"></svg>')


@pytest.fixture
def job(tmp_path, undrawn):  # noqa: ARG001
    """A folder with items, a tokenizer of the letters a to k, and settings to measure both."""
    write_letters(tmp_path, string.ascii_lowercase[:VOCAB])
    texts = ["ab cd", "b f", "k a"]
    (tmp_path / "items.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return tmp_path
