"""What the token model knows of the requests that text models send on."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from launcher_scripts.backends.fastertransformer.forwarded import (
    Errand,
    Forwarded,
    errand_of,
    news,
)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("", Errand("", "", streams=True)),
        ('{"anything": 3}', Errand("", "", streams=True)),
        ('{"forwarded": "ab", "stream": false}', Errand("ab", "", streams=False)),
        ('{"cancel": "ab"}', Errand("", "ab", streams=True)),
    ],
)
def test_errands(parameters: str, expected: Errand) -> None:
    request: Any = types.SimpleNamespace(parameters=lambda: parameters)
    assert errand_of(request) == expected


def test_only_the_key_cancels_and_only_while_the_request_runs() -> None:
    cancelled = []
    open_ones = Forwarded()
    for key in ("a", "b"):
        answer: Any = types.SimpleNamespace(cancel=lambda key=key: cancelled.append(key))
        open_ones.add(key, answer)
    open_ones.cancel("c")
    open_ones.remove("a")
    open_ones.cancel("a")
    assert cancelled == []
    open_ones.cancel("b")
    assert cancelled == ["b"]


def test_news_are_the_tokens_that_earlier_responses_did_not_have() -> None:
    """A row's first news begin with its prompt; a beam search's rows are news as a whole."""
    tensors = {
        "output_ids": torch.tensor([[[7, 8, 9, 1, 0]], [[5, 4, 3, 0, 0]]]).to(torch.uint32),
        "sequence_length": torch.tensor([[4], [3]]).to(torch.uint32),
        "response_input_lengths": torch.tensor([[2], [1]], dtype=torch.int32),
    }
    progress = {
        "streamed_length": torch.tensor([[1], [0]], dtype=torch.int32),
        "is_finished": torch.tensor([[False], [True]]),
    }
    found = news(tensors, progress)
    assert found.dtype == torch.int32
    assert found.tolist() == [[[4, 2, 3, 0, 1, 0, 0]], [[3, 1, 0, 1, 5, 4, 3]]]


def test_news_of_a_model_whose_answers_have_no_prompts() -> None:
    tensors = {
        "output_ids": torch.tensor([[[7, 8, 0]]], dtype=torch.int32),
        "sequence_length": torch.tensor([[2]], dtype=torch.int32),
    }
    progress = {"streamed_length": torch.tensor([[2]]), "is_finished": torch.tensor([[True]])}
    assert news(tensors, progress).tolist() == [[[2, 0, 2, 1]]]
