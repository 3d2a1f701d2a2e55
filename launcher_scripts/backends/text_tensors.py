"""Code shared by the text models: tensors in and out of the Python backend, one response per
request, prompts and words to token ids.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import csv
import ctypes
import json
import math
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from tokenizer import SpecialIds, TokenizationError, Tokenizer
from triton_requests import ParameterError, failure, parameter_values

# DLTensor: data, device type and id, axes, type code, bits, lanes, shape, strides, byte offset
_DLPACK = struct.Struct("@PiiiBBHPPQ")
_BFLOAT = 4  # kDLBfloat
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class BadRequestError(Exception):
    """One request cannot be answered; the message is meant for its client."""


def require_working_arrays() -> None:
    """Refuse to load where the server's Python backend and numpy misread each other.

    Backends built against numpy 1 read numpy 2's array descriptions at the wrong offsets: every
    array arrives as copies of its first element, and strings end the process. Nothing reports
    it, so a known array makes the round trip through the backend once, when the model loads.
    """
    expected = np.array([1, 2], dtype=np.uint32)
    capsule = pb_utils.Tensor("known", expected).to_dlpack()
    returned = pb_utils.Tensor.from_dlpack("known", capsule).as_numpy()
    if returned.tolist() != expected.tolist():
        raise pb_utils.TritonModelException(
            "this server's Python backend was built for numpy 1 and cannot carry text with "
            f"numpy {np.__version__}; give the server a folder with numpy 1 "
            "(deploy.server.numpy_dir: python3 -m pip install --no-deps --target FOLDER "
            "numpy==1.26.4), install 'numpy<2' for its Python, or export with "
            "export.model.tokenizer=none to serve token ids only"
        )


def as_float32(tensor: Any) -> Any:
    """Return an output as FP32: Triton's HTTP does not write FP16 and BF16 as JSON.

    numpy has no BF16, so its bits are read from the tensor's DLPack structure:
    https://dmlc.github.io/dlpack/latest/c_api.html
    """
    capsule = tensor.to_dlpack()
    address = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
    fields = _DLPACK.unpack(ctypes.string_at(address, _DLPACK.size))
    data, _, _, num_axes, code, _, _, shape_address, _, offset = fields
    if code != _BFLOAT:
        return pb_utils.Tensor(tensor.name(), tensor.as_numpy().astype(np.float32))
    shape = (ctypes.c_int64 * num_axes).from_address(shape_address)[:]
    content = ctypes.string_at(data + offset, 2 * math.prod(shape))
    bits = np.frombuffer(content, np.uint16).astype(np.uint32) << 16
    return pb_utils.Tensor(tensor.name(), bits.view(np.float32).reshape(shape))


def answer_each(requests: Sequence[Any], answer: Callable[[Any], list[Any]]) -> list[Any]:
    """One response per request: the tensors that `answer` gives, or that request's own error."""
    responses = []
    for request in requests:
        try:
            responses.append(pb_utils.InferenceResponse(answer(request)))
        except Exception as error:
            responses.append(error_response(error))
    return responses


def error_response(error: Exception) -> Any:
    """Return the error response of a client; errors that are not the client's are logged with a
    traceback."""
    if isinstance(error, BadRequestError | ParameterError | TokenizationError):
        return failure(str(error), "INVALID_ARG")
    traceback.print_exception(error)
    return failure(f"{type(error).__name__}: {error}", "INTERNAL")


class CompletedRequest:
    """A request of Triton's with further inputs."""

    def __init__(self, request: Any, inputs: list[Any]) -> None:
        self._request = request
        self._inputs = inputs

    def inputs(self) -> list[Any]:
        return self._inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Tensors:
    """The tensors of a request, and what is made of them, without axes in front of the batch.

    The parameter leading_axes says how many there are, all of length one: models with sessions
    have one.

    config:     config.pbtxt
    parameters: its parameters
    """

    def __init__(self, model_config: str) -> None:
        self.config: dict[str, Any] = json.loads(model_config)
        entries = self.config["parameters"].items()
        self.parameters: dict[str, str] = {name: entry["string_value"] for name, entry in entries}
        self._leading_axes = int(self.parameters.get("leading_axes", "0"))
        self._kinds = {
            entry["name"]: entry["data_type"]
            for entry in self.config.get("input", ())
            if len(entry["dims"]) == 1 + self._leading_axes
        }

    def complete(self, request: Any) -> Any:
        """The request with the inputs that its parameters stand for. Raises ParameterError."""
        inputs = list(request.inputs())
        input_names = [tensor.name() for tensor in inputs]
        values = parameter_values(request.parameters(), self._kinds, input_names)
        if not values:
            return request
        rows = len(self.without_axes(inputs[0].as_numpy())) if inputs else 1
        responses = [
            self.tensor(name, np.full((rows, 1), _encoded(value), _dtype(self._kinds[name])))
            for name, value in values.items()
        ]
        return CompletedRequest(request, [*inputs, *responses])

    def array(self, request: Any, name: str) -> NDArray[Any] | None:
        """The input tensor `name` with its batch axis, or None where the request leaves it out."""
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        return self.without_axes(tensor.as_numpy())

    def given(self, request: Any, name: str) -> NDArray[Any]:
        """As `array`, of an input that the request has."""
        return self.without_axes(input_tensor(request, name).as_numpy())

    def without_axes(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values with the batch axis first."""
        return values.reshape(values.shape[self._leading_axes :])

    def texts(self, request: Any, name: str) -> list[str] | None:
        """One text per row of the STRING tensor `name` [B, 1], or None where it is left out."""
        rows = self.array(request, name)
        if rows is None:
            return None
        if rows.ndim != 2 or rows.shape[1] != 1:
            raise BadRequestError(
                f"{name} takes one text per row, shape [batch, 1]; got {rows.shape}"
            )
        return [_decode(row[0], name) for row in rows]

    def word_rows(self, request: Any, name: str) -> list[list[str]]:
        """The words of the STRING tensor `name` [B, words], row by row."""
        rows = self.array(request, name)
        if rows is None or rows.ndim != 2:
            shape = None if rows is None else rows.shape
            raise BadRequestError(f"{name} takes a list of words per row; got {shape}")
        return [[_decode(word, name) for word in row] for row in rows]

    def tensor(self, name: str, values: NDArray[Any]) -> Any:
        """An output tensor of values with a batch axis."""
        shape = (*[1] * self._leading_axes, *values.shape)
        return pb_utils.Tensor(name, np.ascontiguousarray(values.reshape(shape)))


def input_tensor(request: Any, name: str) -> pb_utils.Tensor:
    """An input that the request has."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise BadRequestError(f"{name} is missing")
    return tensor


def _decode(value: bytes | str, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{name} is not UTF-8: {error}") from error


def _encoded(value: Any) -> Any:
    return value.encode("utf-8") if isinstance(value, str) else value


def _dtype(kind: str) -> Any:
    """numpy's type of one of config.pbtxt."""
    return np.object_ if kind == "TYPE_STRING" else pb_utils.triton_string_to_numpy(kind)


# CSV ends its rows at these, which no word should; no text that was UTF-8 has the others.
HIDDEN = {ord("\n"): 0xD800, ord("\r"): 0xD801}
SHOWN = {hidden: character for character, hidden in HIDDEN.items()}


def language_ids(
    names: Sequence[str] | None, tensor: str, special: SpecialIds, tokenizer: Tokenizer
) -> list[int] | None:
    """The ids of the rows' languages; None where the request names none."""
    if names is None:
        return None
    if special.language is None:
        raise BadRequestError(f"{tensor}: this model knows no languages")
    ids = [special.language_id(name, tokenizer) for name in names]
    unknown = sorted(
        {name for name, language_id in zip(names, ids, strict=True) if language_id is None}
    )
    if unknown:
        raise BadRequestError(f"{tensor} must be a language of the tokenizer; got {unknown}")
    return [language_id for language_id in ids if language_id is not None]


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[Any]:
    """UINT32 [rows, longest]; at least one column, since Triton refuses empty axes."""
    width = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), width), pad_id, dtype=np.uint32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def to_word_lists(
    lines: Sequence[str], tokenizer: Tokenizer, more: Sequence[int] = ()
) -> NDArray[Any]:
    """The table of the words of each row's line, which are comma separated; `more` as below.

    CSV: a word in double quotes may hold commas.
    """
    return word_table([split_words(line) for line in lines], tokenizer, more)


def word_table(
    rows: Sequence[Sequence[str]], tokenizer: Tokenizer, more: Sequence[int] = ()
) -> NDArray[Any]:
    """INT32 [rows, 2, L]: the ids of a row's words, zero-padded; their end offsets, -1-padded.

    Words keep their leading blanks, which matter to byte-pair tokenizers; empty words are left out.

    more: token ids, each a word of every row
    """
    words = [[ids for word in row if word and (ids := word_ids(word, tokenizer))] for row in rows]
    for row in words:
        row.extend([token_id] for token_id in more)
    width = max(1, *(sum(map(len, row)) for row in words))
    table = np.zeros((len(rows), 2, width), dtype=np.int32)
    table[:, 1] = -1
    for target, row in zip(table, words, strict=True):
        ids = [token_id for word in row for token_id in word]
        target[0, : len(ids)] = ids
        target[1, : len(row)] = np.cumsum([len(word) for word in row])
    return table


def word_ids(word: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of `word` as it is met in the middle of a text.

    SentencePiece begins any text with a blank. Where no piece holds that and what follows, it is
    a piece of its own, which a full stop or a line break did not ask for: "." would only match
    " .". It stays before what stands apart in a text, too.
    """
    ids = tokenizer.encode(word)
    following = ids[1:]
    if not following or stands_apart(word):
        return ids
    blank = tokenizer.decode([*following, *ids]) != tokenizer.decode([*following, *following])
    return following if blank and tokenizer.decode(following) == tokenizer.decode(ids) else ids


def stands_apart(word: str) -> bool:
    """Return whether a blank comes before it: to a word of a script that has blanks, or as
    given."""
    first = word[0]
    return first == " " or (first.isalnum() and not "\u2e80" <= first <= "\u9fff")


def split_words(line: str) -> list[str]:
    """The words of a CSV line; line breaks are characters of words like any other."""
    try:
        rows = list(csv.reader([line.translate(HIDDEN)]))
    except csv.Error as error:
        raise BadRequestError(f"the words are not comma separated text: {error}") from error
    return [word.translate(SHOWN) for words in rows for word in words if word]
