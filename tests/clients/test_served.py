"""The clients as commands against a real server of a tiny GPT with its text models."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts import clients
from launcher_scripts.clients import CLIENTS
from launcher_scripts.clients.__main__ import main
from launcher_scripts.clients.end_to_end_test import SENTENCES
from launcher_scripts.clients.tensors import PROMPTS
from launcher_scripts.engine.engine import Engine
from launcher_scripts.protocol import GenerateRequest
from tests.engine.small_models import engine_for, random_tensors
from tests.server.processes import running
from tests.server.repositories import VOCAB_SIZE, export, text_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytriton") is None,
    reason="the pip-installable tritonserver is not there",
)
REQUESTS = Path(clients.__file__).parent / "requests"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("served")
    settings = export(folder)
    with running(folder / "job", settings.model_repository) as step:
        yield step.wait_until_ready()
        assert step.stop() == 0, step.err


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = text_config()
    engine = engine_for(config, random_tensors(config))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """identity_test writes into the working directory."""
    monkeypatch.chdir(tmp_path)


def run(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], name: str, *arguments: str
) -> str:
    """What the client prints; the server's address is put in for it."""
    protocol = "grpc" if "grpc" in arguments else "http"
    assert main([name, "-u", served[protocol], *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_sample_request(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], protocol: str, engine: Engine
) -> None:
    config = {"url": served[protocol], "protocol": protocol, "model_name": "tiny"}
    arguments = [str(REQUESTS / "gpt.json"), "--params", json.dumps({"config": config})]
    assert main(["issue_request", *arguments]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    first = engine.submit(GenerateRequest(PROMPTS[0], 24)).result(60)
    ids = printed.partition("output_ids:\n")[2].partition("]")[0].replace("[", "")
    assert [int(word) for word in ids.split()] == [*PROMPTS[0], *first.output_ids]
    for name in ("sequence_length", "response_input_lengths", "cum_log_probs"):
        assert f"{name}:\n[" in printed


def test_text_of_the_sample_for_the_ensemble(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    params = json.dumps({"config": {"url": served["http"]}})
    assert main(["issue_request", str(REQUESTS / "ensemble.json"), "--params", params]) == 0
    printed = capsys.readouterr().out
    assert "OUTPUT_0:\n[[['" in printed and "The harbour" not in printed


def test_identity(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any], engine: Engine
) -> None:
    printed = run(capsys, served, "identity_test", "-w", "-n", "2", "-o", "5")
    lines = printed.splitlines()
    assert lines[0] == "[INFO] sending requests to warm up"
    assert lines.count("set request") == lines.count("get request") == 2 + 2 * 10
    for line in (
        "wait result return 0000",
        "wait result return 1111",
        "get results",
        "get results as output_ids",
        "output_ids is received",
        "(8, 1, 13)",
    ):
        assert lines.count(line) == 2 * 10
    assert lines[-1].startswith("[INFO] execution time: ") and lines[-1].endswith(" ms")
    assert lines[-2].startswith("[") and lines[-2].count(",") == 1
    rows = np.loadtxt("triton_out", dtype=np.int64)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        wanted = engine.submit(GenerateRequest(prompt, 5)).result(60).output_ids
        assert row.tolist() == [*prompt, *wanted]


def test_identity_with_random_prompts_over_grpc(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    flags = ["-i", "grpc", "-r", "-b", "3", "-s", "6", "-o", "4", "-topk", "5", "-topp", "0.9"]
    flags += ["--vocab_size", str(VOCAB_SIZE)]
    printed = run(capsys, served, "identity_test", *flags)
    assert "(3, 1, 10)" in printed
    rows = np.loadtxt("triton_out", dtype=np.int64)
    assert rows.shape == (3, 10) and len(np.unique(rows[:, :6])) > 6
    assert run(capsys, served, "identity_test", *flags).count("set request") == 10
    np.testing.assert_array_equal(np.loadtxt("triton_out", dtype=np.int64), rows)


def test_end_to_end(capsys: pytest.CaptureFixture[str], served: dict[str, Any]) -> None:
    flags = ["--return_log_probs", "--output-len", "6", "--model-variant", "gpt"]
    printed = run(capsys, served, "end_to_end_test", *flags)
    heads = [line.strip("=") for line in printed.splitlines() if line.startswith("=====")]
    assert [head for head in heads if head] == [
        "After preprocessing",
        "After fastertransformer",
        "After postprocessing",
        "After ensemble",
    ]
    decoded = printed.partition("After postprocessing============\n")[2].partition("====")[0]
    assert decoded.count("['") == len(SENTENCES)
    assert decoded in printed.partition("After ensemble============\n")[2]


def test_a_model_that_is_not_there_is_answered_with_those_that_are(
    capsys: pytest.CaptureFixture[str], served: dict[str, Any]
) -> None:
    assert main(["identity_test", "-u", served["http"], "-m", "big"]) == 1
    message = "no such model; got 'big'; choices: ensemble, postprocessing, preprocessing, tiny"
    assert message in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity_test", "-u", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the server at 127.0.0.1:1 is gone") and "Traceback" not in error


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_of_the_table_says_its_flags(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out


def test_an_unknown_client_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["nobody"])
    assert "issue_request" in capsys.readouterr().err
