"""The client over real sockets, against a model whose answers are known."""

import json
import math
import socket
import threading
import time

import numpy as np
import pytest

from launcher_scripts.clients.model_client import Client, open_client
from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.common.tokenizer import SpecialIds
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.config.settings import EvaluateSettings
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from tests.evaluation.fake_server import FAVOUR, VOCAB, FakeServer, logits_after


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def evaluate_settings(tmp_path, **changes):
    values = {
        "ready_file": str(tmp_path / "ready.json"),
        "results_dir": str(tmp_path / "results"),
        "model_name": "counting",
        "tokenizer_dir": str(tmp_path),
        "benchmark": BenchmarkSettings(),
        "ready_timeout": 5.0,
    }
    return EvaluateSettings(**(values | changes))


def test_generate_sends_ragged_rows_as_one_request():
    rows = [
        GenerateRequest((3,), 2, SamplingParameters(min_length=2)),
        GenerateRequest((1, 2, 9), 3, return_log_probs=True),
    ]
    with FakeServer() as server, Client(server.address, "counting") as client:
        short, long = client.generate(rows)
    assert short.output_ids == (4, 5)
    assert short.cum_log_probs is None and short.output_log_probs == ()
    assert long.output_ids == (10, 0, 1)
    log_p = FAVOUR - math.log(math.exp(FAVOUR) + VOCAB - 1)
    assert long.cum_log_probs == pytest.approx(3 * log_p)
    assert long.output_log_probs == pytest.approx([log_p] * 3)
    (tensors,) = server.received
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[3, 0, 0], [1, 2, 9]],
        "input_lengths": [[1], [3]],
        "request_output_len": [[2], [3]],
        "min_length": [[2], [0]],
        "is_return_log_probs": [[False], [True]],
    }


def test_score_keeps_order_and_bounds_what_is_in_flight():
    rows = [[index, 5] + [7] * index for index in range(9)]
    with FakeServer(delay=0.02) as server, Client(server.address, "counting") as client:
        scores = list(client.score(iter(rows), in_flight=3))
    assert len(scores) == len(rows)
    for row, logits in zip(rows, scores, strict=True):
        np.testing.assert_array_equal(logits, logits_after(row))
    assert 2 <= server.most_in_flight <= 3


def test_replicas_are_one_server_to_an_evaluation():
    rows = [[index, 5] for index in range(8)]
    with FakeServer() as one, FakeServer() as two:
        with Client(f"{one.address},{two.address}", "counting") as client:
            assert client.is_ready()
            assert client.max_batch_size() == 4
            assert client.special_ids == SpecialIds()
            assert client.model_type == "GPT"
            scores = list(client.score(iter(rows), in_flight=4))
        for row, logits in zip(rows, scores, strict=True):
            np.testing.assert_array_equal(logits, logits_after(row))
        assert (len(one.received), len(two.received)) == (4, 4)


def test_a_refused_request_says_what_the_server_said(capfd):
    with (
        FakeServer(refuse="batch size 9 for 'counting', max allowed is 4") as server,
        Client(server.address, "counting") as client,
        pytest.raises(ServerError, match="refused a request to model counting: batch size 9"),
    ):
        client.generate([GenerateRequest((1,), 1)])
    assert capfd.readouterr().err == ""


def test_a_server_that_dies_is_gone(capfd):
    with FakeServer(hang_up=2) as server, Client(server.address, "counting") as client:
        scores = client.score([[1], [2], [3], [4]], in_flight=2)
        assert next(scores).shape == (1, VOCAB)
        with pytest.raises(ServerError, match=f"the server at {server.address} is gone: "):
            list(scores)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_is_not_there_is_gone(protocol):
    address = free_address()
    with Client(address, "counting", protocol=protocol, request_timeout=60) as client:
        assert not client.is_ready()
        with pytest.raises(ServerError, match=f"the server at {address} is gone: "):
            client.generate([GenerateRequest((1,), 1)])
        with pytest.raises(ServerError, match=f"the server at {address} is gone: "):
            client.max_batch_size()


def test_a_silent_server_is_given_up_after_the_request_timeout():
    with (
        FakeServer(delay=30) as server,
        Client(server.address, "counting", request_timeout=0.2) as client,
        pytest.raises(
            ServerError, match=r"no answer .* within 0\.2 s; change evaluate\.request_ti"
        ),
    ):
        client.generate([GenerateRequest((1,), 1)])


def test_max_batch_size_is_the_models():
    with FakeServer(max_batch_size=7) as server, Client(server.address, "counting") as client:
        assert client.max_batch_size() == 7


def test_unknown_protocol_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="got 'ftp'; choices: grpc, http"):
        Client("localhost:1", "counting", protocol="ftp")


def test_connect_waits_for_the_file_and_for_the_model(tmp_path):
    settings = evaluate_settings(tmp_path)
    with FakeServer(ready_after=3) as server:
        ready = {"http": server.address, "models": ["counting"], "ranks": []}

        def appear():
            time.sleep(0.3)
            (tmp_path / "ready.json").write_text('{"http": ')
            time.sleep(0.3)
            (tmp_path / "ready.json").write_text(json.dumps(ready))

        writer = threading.Thread(target=appear)
        writer.start()
        client, content = open_client(settings)
        with client:
            assert client.is_ready()
        writer.join()
    assert content == {**ready, "protocol": "http"}


@pytest.mark.parametrize(
    ("ready", "says"),
    [
        (None, "ready.json is not there"),
        ({"http": "127.0.0.1:9", "models": ["other"]}, r"names models \['other'\], not counting"),
        ({"grpc": "127.0.0.1:9"}, "gives no http address"),
        ({"http": "127.0.0.1:9", "models": ["counting"]}, "does not answer ready"),
    ],
)
def test_connect_gives_up_with_the_reason(tmp_path, ready, says):
    if ready is not None:
        (tmp_path / "ready.json").write_text(json.dumps(ready))
    with pytest.raises(ServerError, match=rf"within 0\.3 s: .*{says}.*change evaluate\.ready_time"):
        open_client(evaluate_settings(tmp_path, ready_timeout=0.3))


@pytest.mark.timeout(300)
def test_a_server_that_never_answers_does_not_hold_connect_up(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher_scripts.clients.model_client.PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "ready.json").write_text(json.dumps({"http": address, "models": ["counting"]}))
        with pytest.raises(ServerError, match="does not answer ready"):
            open_client(evaluate_settings(tmp_path, ready_timeout=0.3, request_timeout=3600))
