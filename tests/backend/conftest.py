"""The backend's model behind a stand-in of Triton's module."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from tests.backend import fakes


def stand_in_module() -> types.ModuleType:
    stand_in = types.ModuleType("triton_python_backend_utils")
    stand_in.MetricFamily = fakes.Gauges
    stand_in.Tensor = fakes.Tensor
    stand_in.TritonError = fakes.TritonError
    stand_in.InferenceResponse = fakes.Response
    stand_in.InferenceRequest = fakes.Request
    stand_in.TritonModelException = RuntimeError
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = "final"
    stand_in.using_decoupled_model_transaction_policy = lambda config: config.get(
        "model_transaction_policy", {"decoupled": False}
    )["decoupled"]
    return stand_in


# For modules of the backend that tests import by themselves.
sys.modules.setdefault("triton_python_backend_utils", stand_in_module())


@pytest.fixture
def backend(monkeypatch):
    """The module of the backend's model, imported anew beside the stand-in."""
    stand_in = stand_in_module()
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    room = "launcher_scripts.backends.fastertransformer"
    bound = [f"{room}.{name}" for name in ("model", "answer", "streams")]
    bound.append("launcher_scripts.backends.triton_requests")
    for name in bound:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(f"{room}.model")
    for name in bound:
        sys.modules.pop(name, None)
