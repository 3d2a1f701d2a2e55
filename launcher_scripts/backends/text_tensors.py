"""Code shared by the text models: tensors in and out of the Python backend, one response per
request.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

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
from older_servers import failure
from text_parameters import ParameterError, parameter_values
from tokenizer import TokenizationError

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
