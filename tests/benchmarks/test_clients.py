"""The programs that try clients, without the clients."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from benchmarks.clients import run, serve
from benchmarks.clients.target import WrongAnswer, check, same
from launcher_scripts.steps.quickstart import MODEL_NAME
from tests.gateway.fakes import TOKENIZERS


def test_a_trial_that_fails_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    client = types.ModuleType("benchmarks.clients.with_openai")
    client.PACKAGES = ("pytest",)
    client.trials = lambda target: [
        ("one", lambda: same(target, "expected")),
        ("two", lambda: check(False, "a | b\nc")),
        ("three", lambda: 1 / 0),
    ]
    monkeypatch.setitem(sys.modules, client.__name__, client)
    lines = list(run.tried("openai", "expected"))
    version = pytest.__version__
    assert lines == [
        (f"| pytest | {version} | one | as plain HTTP: 'expected' |", True),
        (f"| pytest | {version} | two | FAILED: WrongAnswer: got 'a \\| b\\nc' |", False),
        (f"| pytest | {version} | three | FAILED: ZeroDivisionError: division by zero |", False),
    ]
    with pytest.raises(WrongAnswer, match="got 'other', expected 'expected'"):
        same("other", "expected")


def test_every_client_has_its_program() -> None:
    found = {
        file.stem.removeprefix("with_") for file in Path(run.__file__).parent.glob("with_*.py")
    }
    assert found == set(run.CLIENTS)


def test_what_is_served_is_what_the_documents_name() -> None:
    command = serve.export(Path("/a folder"), MODEL_NAME, TOKENIZERS, "more=1")
    assert (
        "export.triton_deployment.triton_model_dir='/a folder/repository/smollm2_135m'" in command
    )
    assert command[-1] == "more=1"
    assert "deploy.gateway.port=8080" in serve.deploy(Path("/a folder"), 8080)
