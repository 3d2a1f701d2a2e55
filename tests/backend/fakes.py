"""A stand-in of Triton's module triton_python_backend_utils; tests/server has the real one."""

from __future__ import annotations

import enum
import threading
import types

import torch


class Tensor:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self.tensor = name, tensor

    def name(self):
        return self._name

    def to_dlpack(self):
        return torch.utils.dlpack.to_dlpack(self.tensor)

    @staticmethod
    def from_dlpack(name, capsule):
        return name, torch.utils.dlpack.from_dlpack(capsule)


Code = enum.Enum("Code", ["INVALID_ARG", "INTERNAL", "CANCELLED", "UNAVAILABLE"])


class TritonError(Exception):
    INVALID_ARG, INTERNAL = Code.INVALID_ARG, Code.INTERNAL
    CANCELLED, UNAVAILABLE = Code.CANCELLED, Code.UNAVAILABLE

    def __init__(self, message: str, code: Code) -> None:
        super().__init__(message)
        self._code = code

    def code(self) -> Code:
        return self._code

    def message(self) -> str:
        return str(self)


class Response:
    def __init__(self, tensors=(), error=None) -> None:
        self.tensors, self._error = dict(tensors), error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError:
        return self._error


class Request:
    """A request and its response sender in one."""

    def __init__(self, inputs: dict[str, torch.Tensor], requested: tuple[str, ...]) -> None:
        self.tensors, self.requested = inputs, requested
        self.answers: list[Response] = []
        self.answered = threading.Event()
        self.left = False
        self.microseconds = 0

    def inputs(self):
        return [Tensor(name, tensor) for name, tensor in self.tensors.items()]

    def requested_output_names(self):
        return list(self.requested)

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return self.left

    def timeout(self):
        return self.microseconds

    def parameters(self):
        return ""

    def request_id(self):
        return ""

    def send(self, response, flags=None):
        assert not self.answered.is_set()
        self.answers.append(response)
        if flags == "final":
            self.answered.set()


GAUGES: dict[tuple[str, ...], float] = {}


class Gauges:
    """Triton's metrics, in GAUGES by name and labels' values, the model's first."""

    GAUGE, COUNTER = "gauge", "counter"

    def __init__(self, name, description, kind):
        assert description and kind in (self.GAUGE, self.COUNTER)
        self.name = name

    def Metric(self, labels):
        assert "model" in (next(iter(labels)), next(iter(labels)).removesuffix("_name"))
        key = (self.name, *labels.values())
        return types.SimpleNamespace(
            set=lambda value: GAUGES.update({key: value}),
            increment=lambda value: GAUGES.update({key: GAUGES.get(key, 0) + value}),
        )
