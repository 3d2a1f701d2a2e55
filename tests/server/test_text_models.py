"""The text models' own rules, without a server: padding, words lists, and broken arrays."""

from __future__ import annotations

import csv
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from launcher_scripts import backends
from launcher_scripts.common.tokenizer import load_tokenizer
from tests.backend.fakes import TritonError
from tests.server.repositories import TOKENIZERS
from tests.tokenizer.panics import PANIC_TEXT, fragile_tokenizer

ROOM = Path(backends.__file__).parent
LONE_MODULES = (
    "text_tensors",
    "tokenizer",
    "triton_requests",
    "triton_python_backend_utils",
)


class FakeTensor:
    """What the text models use of pb_utils.Tensor; `broken` misreads as numpy 2's arrays are."""

    broken = False

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self.values = name, values

    def to_dlpack(self) -> np.ndarray:
        return self.values

    @classmethod
    def from_dlpack(cls, name: str, values: np.ndarray) -> FakeTensor:
        return cls(name, np.full_like(values, values.flat[0]) if cls.broken else values)

    def as_numpy(self) -> np.ndarray:
        return self.values


@pytest.fixture
def text_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a text model as the server would: from a folder that holds its helpers."""
    utils = types.ModuleType("triton_python_backend_utils")
    utils.Tensor = type("Tensor", (FakeTensor,), {})
    utils.TritonModelException = RuntimeError
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    rooms = (ROOM, ROOM.parent / "common", ROOM.parent / "contract")
    monkeypatch.setattr(sys, "path", [*map(str, rooms), *sys.path])

    def load(role: str) -> Any:
        return importlib.import_module(f"launcher_scripts.backends.{role}")

    yield load
    for name in list(sys.modules):
        if name in LONE_MODULES or name.startswith("launcher_scripts.backends.p"):
            del sys.modules[name]


class TorchTensor:
    """An output of a token model, which may be BF16."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def name(self) -> str:
        return "output_hidden_state"

    def to_dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(self._values)

    def as_numpy(self) -> np.ndarray:
        return self._values.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1,), (2, 0, 3)])
def test_an_encoders_outputs_become_fp32(
    text_module: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    text_module("preprocessing")
    values = torch.randn(2, *shape).to(dtype)[1]  # with an offset in its memory
    converted = sys.modules["text_tensors"].as_float32(TorchTensor(values))
    assert (converted.name, converted.values.dtype) == ("output_hidden_state", np.float32)
    np.testing.assert_array_equal(converted.values, values.float().numpy())


class WordTokenizer:
    """Ids as in the format's own example: "a b" is two tokens, "c" is one."""

    ids: ClassVar = {"a b": [5, 6], "c": [7], " c": [8], "a,b": [9], "\n": [2], "c\r\n\n": [7, 3]}

    def encode(self, text: str) -> list[int]:
        return self.ids[text]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b,c", [[5, 6, 7], [2, 3, -1]]),
        ("", [[0], [-1]]),
        ("c", [[7], [1]]),
        ("c, c", [[7, 8], [1, 2]]),
        ('"a,b",c', [[9, 7], [1, 2]]),
        (",,c,", [[7], [1]]),
        ("\n", [[2], [1]]),
        ('c\r\n\n,"\n",c', [[7, 3, 2, 7], [2, 3, 4, -1]]),
    ],
)
def test_words_lists(text_module: Any, line: str, expected: list[list[int]]) -> None:
    model = text_module("preprocessing")
    table = model.to_word_lists([line], WordTokenizer())
    assert table.dtype == np.int32
    assert table.tolist() == [expected]


def test_a_word_has_the_ids_it_has_within_a_text(text_module: Any) -> None:
    """SentencePiece would put a blank before a full stop, and nothing would ever match."""
    text_module("preprocessing")
    word_ids = sys.modules["text_tensors"].word_ids
    pieces = load_tokenizer(TOKENIZERS / "sentencepiece")
    full_stop = pieces.encode("month.")[-1]
    assert pieces.encode(".") != [full_stop]
    assert word_ids(".", pieces) == [full_stop]
    assert word_ids("...", pieces) == [full_stop] * 3
    for apart in (" .", "month", "Hawks", " Hawks"):
        assert word_ids(apart, pieces) == pieces.encode(apart)
    bytes_ = load_tokenizer(TOKENIZERS / "gpt2bpe")
    for word in (".", " .", "...", "\n\n", "Hawks", "<|endoftext|>.", "\U0001f600"):
        assert word_ids(word, bytes_) == bytes_.encode(word)


def test_words_that_no_csv_can_be(text_module: Any) -> None:
    model = text_module("preprocessing")
    with pytest.raises(model.BadRequestError, match="not comma separated text: field larger"):
        model.to_word_lists(["x" * (csv.field_size_limit() + 1)], WordTokenizer())


def test_words_lists_of_several_rows_have_one_width(text_module: Any) -> None:
    table = text_module("preprocessing").to_word_lists(["c", "", "a b,c"], WordTokenizer())
    assert table.tolist() == [
        [[7, 0, 0], [1, -1, -1]],
        [[0, 0, 0], [-1, -1, -1]],
        [[5, 6, 7], [2, 3, -1]],
    ]


def test_prompts_are_padded_on_the_right(text_module: Any) -> None:
    padded = text_module("preprocessing").pad_right([[1, 2], [], [3, 4, 5]], 9)
    assert padded.dtype == np.uint32
    assert padded.tolist() == [[1, 2, 9], [9, 9, 9], [3, 4, 5]]
    assert text_module("preprocessing").pad_right([[]], 9).tolist() == [[9]]


@pytest.mark.parametrize(
    ("parameters", "prompt", "ends"),
    [
        ({}, [5, 6], ()),
        ({"closing_id": "2"}, [5, 6, 2], ()),
        ({"opening_id": "1"}, [1, 5, 6], ()),
        ({"end_ids": "3 12"}, [5, 6], (3, 12)),
    ],
)
def test_parameters_say_what_goes_with_a_prompt(
    text_module: Any, parameters: dict[str, str], prompt: list[int], ends: tuple[int, ...]
) -> None:
    special = text_module("preprocessing").SpecialIds.of(parameters)
    assert special.surround([5, 6]) == prompt
    assert special.ends == ends


def test_further_end_tokens_are_words_of_every_row(text_module: Any) -> None:
    table = text_module("preprocessing").to_word_lists(["c", ""], WordTokenizer(), [3, 12])
    assert table.tolist() == [[[7, 3, 12], [1, 2, 3]], [[3, 12, 0], [1, 2, -1]]]


@pytest.mark.parametrize("role", ["preprocessing", "postprocessing"])
def test_a_python_backend_that_misreads_arrays_is_refused(text_module: Any, role: str) -> None:
    text_module(role).require_working_arrays()
    sys.modules["triton_python_backend_utils"].Tensor.broken = True
    with pytest.raises(
        RuntimeError, match=r"built for numpy 1 .*deploy.server.numpy_dir.*install 'numpy<2'"
    ):
        text_module(role).require_working_arrays()


def test_a_panic_of_the_tokenizer_is_one_requests_error(text_module: Any, tmp_path: Path) -> None:
    """Of all requests that the server hands over together."""
    text_module("preprocessing")
    utils = sys.modules["triton_python_backend_utils"]
    utils.InferenceResponse = lambda tensors=(), error=None: (tensors, error)
    utils.TritonError = TritonError
    fragile_tokenizer(tmp_path)
    tokenizer = sys.modules["tokenizer"].load_tokenizer(tmp_path)
    answers = sys.modules["text_tensors"].answer_each(["the", PANIC_TEXT, "a"], tokenizer.encode)
    assert [error and (str(error), error.code()) for _, error in answers] == [
        None,
        ("the tokenizer refuses this text", TritonError.INVALID_ARG),
        None,
    ]
