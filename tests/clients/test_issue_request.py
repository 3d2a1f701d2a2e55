"""Request files: what they may say, and what is sent and printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher_scripts import clients
from launcher_scripts.clients import connection, issue_request
from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.contract.contracts import CONTRACTS
from tests.evaluation.fake_server import FakeServer

SAMPLES = sorted((Path(clients.__file__).parent / "requests").glob("*.json"))
COUNT = {
    "config": {"model_name": "counting"},
    "request": [
        {"name": "input_ids", "data": [[1, 2], [5, 6]], "dtype": "uint32"},
        {"name": "input_lengths", "data": [[2], [2]], "dtype": "uint32"},
        {"name": "request_output_len", "data": [[3], [3]], "dtype": "uint32"},
    ],
}


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_whole_requests_with_the_contracts_names(path: Path) -> None:
    whole = issue_request.merge_mappings(
        {"config": issue_request.DEFAULT_CONFIG}, issue_request.read_request(path)
    )
    config, tensors = issue_request.check_request_file(whole, str(path))
    rows = {len(array) for array in tensors.values()}
    assert len(rows) == 1
    known = {tensor.name for contract in CONTRACTS.values() for tensor in contract.inputs}
    known |= {t.name for contract in CONTRACTS.values() for t in contract.text.ensemble_inputs}
    known |= {"session_len", "memory_len", "no_repeat_ngram_size"}
    assert set(tensors) <= known
    assert config["stream_api"] == ("stream" in path.stem)


def test_every_sample_is_sent_to_a_served_model() -> None:
    served = [Path(__file__).with_name(name) for name in ("test_served.py", "test_families.py")]
    texts = "".join(path.read_text(encoding="utf-8") for path in served)
    sent = {path.stem for path in SAMPLES if f'"{path.stem}"' in texts or path.name in texts}
    assert sent == {path.stem for path in SAMPLES}


def test_every_output_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        params = json.dumps({"config": {"url": server.address}})
        file = write(tmp_path / "count.json", COUNT)
        assert issue_request.main([file, "--params", params]) == 0, capsys.readouterr().err
    (sent,) = server.received
    assert sent["input_ids"].tolist() == [[1, 2], [5, 6]]
    printed = capsys.readouterr().out
    assert printed.startswith("output_ids:\n[[[1 2 3 4 5]]\n\n [[5 6 7 8 9]]]\n\n")
    assert "\n\nsequence_length:\n[[5]\n [5]]\n\n" in printed


def test_a_file_alone_asks_the_only_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "count.json", {"request": COUNT["request"]})
    with FakeServer() as server:
        assert issue_request.main([file, "-u", server.address]) == 0, capsys.readouterr().err
    assert len(server.received) == 1
    assert capsys.readouterr().out.startswith("output_ids:\n")


def test_flags_go_over_params_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "count.json", {**COUNT, "config": {"protocol": "grpc"}})
    params = json.dumps({"config": {"url": "127.0.0.1:1", "model_name": "other"}})
    with FakeServer() as server:
        flags = ["--params", params, "-u", server.address, "-i", "http", "-m", "counting"]
        assert issue_request.main([file, *flags]) == 0, capsys.readouterr().err
    assert len(server.received) == 1


def test_samples_fit_a_model_that_takes_one_row() -> None:
    for path in SAMPLES:
        for tensor in issue_request.read_request(path)["request"]:
            assert len(tensor["data"]) == 1, f"{path.name}: {tensor['name']}"


def test_numbers_get_the_types_that_the_model_declares() -> None:
    """The original's sample_request_single.json names int32 for random_seed, which is UINT64."""
    declared = {
        "random_seed": "TYPE_UINT64",
        "request_prompt_embedding": "TYPE_FP16",
        "temperature": "TYPE_FP32",
        "is_return_log_probs": "TYPE_BOOL",
        "input_ids": "TYPE_UINT32",
    }
    config = {"input": [{"name": name, "data_type": kind} for name, kind in declared.items()]}
    sent = {
        "random_seed": np.array([[2**31 - 1]], np.int32),
        "request_prompt_embedding": np.array([[[0.5]]], np.float32),
        "temperature": np.array([[1]], np.int32),
        "is_return_log_probs": np.array([[1]], np.int32),
        "input_ids": np.array([[1.5]], np.float32),
        "unknown": np.array([[1]], np.int32),
    }
    types = {name: each.dtype for name, each in issue_request.as_declared(config, sent).items()}
    assert types == {
        "random_seed": np.uint64,
        "request_prompt_embedding": np.float16,
        "temperature": np.float32,
        "is_return_log_probs": np.int32,  # for the server to refuse
        "input_ids": np.float32,
        "unknown": np.int32,
    }
    with pytest.raises(ConfigError, match=r"random_seed: values outside of uint64; got \[\[-1\]\]"):
        issue_request.as_declared(config, {"random_seed": np.array([[-1]], np.int32)})


def test_bfloat16_is_sent_as_its_bytes() -> None:
    pytest.importorskip("ml_dtypes", reason="tritonclient needs it for BF16")
    http = pytest.importorskip("tritonclient.http")
    array = issue_request.tensor([[1.0, -2.0, 0.1]], "bfloat16")
    tensors = {"request_prompt_embedding": array}
    (sent,) = connection.infer_arguments(http, "gpt", tensors, None)["inputs"]
    assert (sent.datatype(), sent.shape()) == ("BF16", [1, 3])
    assert sent._get_binary_data() == bytes.fromhex("803f00c0cd3d")


def test_params_go_over_the_file_key_by_key() -> None:
    below = {"config": {"url": None, "verbose": False}, "request": [1, 2]}
    above = {"config": {"verbose": True}, "request": [3]}
    assert issue_request.merge_mappings(below, above) == {
        "config": {"url": None, "verbose": True},
        "request": [3],
    }
    assert below["config"] == {"url": None, "verbose": False}


def test_text_is_sent_as_utf_8_and_shown_as_text() -> None:
    array = issue_request.tensor([["Grüße"], [""]], "object")
    assert array.tolist() == [["Grüße".encode()], [b""]]
    assert issue_request.with_text(array).tolist() == [["Grüße"], [""]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "must hold one JSON object; got 'list'"),
        ({"config": {}}, "request is missing or empty"),
        ({"config": {"protocl": 1}, "request": []}, "unknown key of config; got 'protocl'"),
        ({"config": {"protocol": "ftp"}}, "unknown protocol; got 'ftp'; choices: http, grpc"),
        ({"request": [{"name": "a", "data": [1]}]}, "tensor 0 of request: KeyError: 'dtype'"),
        (
            {"request": [{"name": "a", "data": [[-1]], "dtype": "uint32"}]},
            "values outside of uint32",
        ),
        ({"request": [{"name": "a", "data": [[1], [2, 3]], "dtype": "uint32"}]}, "tensor 0"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    assert issue_request.main([write(tmp_path / "file.json", content)]) == 1
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


def test_all_problems_of_a_request_are_named_at_once() -> None:
    whole = {
        "config": {**issue_request.DEFAULT_CONFIG, "protocol": "ftp"},
        "request": [{"name": "a"}, {"data": 1}],
    }
    with pytest.raises(ConfigError, match="3 problems in file"):
        issue_request.check_request_file(whole, "file")


def test_a_stream_adds_one_token_at_a_time() -> None:
    before = np.array([1, 2])
    issue_request.check_one_more(None, before)
    issue_request.check_one_more(before, np.array([1, 2, 3]))
    for wrong in ([1, 2], [1, 2, 3, 4], [1, 9, 3]):
        with pytest.raises(ServerError, match="does not add one token"):
            issue_request.check_one_more(before, np.array(wrong))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"protocol": "http", "ca": "SELF"}, "HTTP is not encrypted; choices: grpc"),
        ({"protocol": "grpc", "key": "SELF", "certificate": "SELF"}, "whom to trust is not said"),
        ({"protocol": "grpc", "ca": "/nowhere/ca.pem"}, "no such file; got '/nowhere/ca.pem'"),
        ({"protocol": "grpc", "ca": "SELF", "key": "SELF"}, "a certificate needs its key"),
    ],
)
def test_files_for_tls_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, str], says: str
) -> None:
    path = tmp_path / "file.json"
    config = {key: str(path) if value == "SELF" else value for key, value in config.items()}
    assert issue_request.main([write(path, {**COUNT, "config": config})]) == 1
    assert says in capsys.readouterr().err
