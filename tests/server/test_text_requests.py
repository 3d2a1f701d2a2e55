"""Text requests: today's names for them, and what is freed when their clients leave."""

from __future__ import annotations

import json
import os
import pty
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.http_requests import receive, send
from tests.processes import wait_for
from tests.server.processes import CHECKOUT, RunningStep
from tests.server.requests import Client, Stream, infer_inputs, text_rows
from tests.server.shared import cache_tokens_used, given_up

pytestmark = pytest.mark.usefixtures("tritonserver")

PROMPT = "Hello the"
MANY = 16000
NEVER_ENDS = {"end_id": 1000}


@pytest.fixture
def served(shared_server: RunningStep) -> dict[str, Any]:
    return shared_server.ready


@pytest.fixture
def stream(served: dict[str, Any]) -> Iterator[Stream]:
    with Stream(served) as stream:
        yield stream


def original(output_len: int, *prompts: str, **more: Any) -> dict[str, np.ndarray]:
    """A text request with the original's names."""
    rows = len(prompts or (PROMPT,))
    tensors = {
        "INPUT_0": text_rows(*(prompts or (PROMPT,))),
        "INPUT_1": np.full((rows, 1), output_len, np.uint32),
    }
    return {**tensors, **{name: np.full((rows, 1), at, np.uint32) for name, at in more.items()}}


def post(served: dict[str, Any], path: str, body: dict[str, Any]) -> dict[str, Any]:
    return receive(f"{served['http']}/v2/models/{path}", body)


def events(served: dict[str, Any], path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Server-sent events of generate_stream."""
    lines = send(f"{served['http']}/v2/models/{path}", body).text.split("\n\n")
    assert all(line.startswith("data: ") for line in lines if line)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


# What is freed


def stream_over_grpc(served: dict[str, Any], _: str) -> Callable[[], None]:
    leaving = Stream(served)
    leaving.send("ensemble", **original(MANY, **NEVER_ENDS))
    leaving.next()
    return leaving.cancel


def unary_over_grpc(served: dict[str, Any], model: str) -> Callable[[], None]:
    import tritonclient.grpc as grpc

    client = grpc.InferenceServerClient(served["grpc"])
    inputs = infer_inputs(grpc, original(MANY, **NEVER_ENDS))
    return client.async_infer(f"{model}_ensemble", inputs, lambda **_: None).cancel


def stream_over_http(served: dict[str, Any], _: str) -> Callable[[], None]:
    host, port = served["http"].rsplit(":", 1)
    body = json.dumps({"INPUT_0": PROMPT, "INPUT_1": MANY, **NEVER_ENDS})
    head = "POST /v2/models/ensemble/generate_stream HTTP/1.1"
    connection = socket.create_connection((host, int(port)), 30)
    connection.sendall(
        f"{head}\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    assert b"200 OK" in connection.recv(100)
    return connection.close


def chat_in_a_terminal(served: dict[str, Any], _: str) -> Callable[[], None]:
    """Ctrl-C stops the answer and not the chat."""
    main, terminal = pty.openpty()
    arguments = ["chat", "-u", served["grpc"], "--model", "gpt", "-o", str(MANY)]
    chat = subprocess.Popen(
        [sys.executable, "-m", "launcher_scripts.clients", *arguments],
        cwd=CHECKOUT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    written = bytearray()

    def read() -> None:
        try:
            while piece := os.read(main, 1000):
                written.extend(piece)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: b"> " in written)
    os.write(main, b"Hello the\n")

    def leave() -> None:
        chat.send_signal(signal.SIGINT)
        wait_for(lambda: b"[stopped]" in written)
        wait_for(lambda: cache_tokens_used(served, "gpt") == 0)
        os.write(main, b"/quit\n")
        assert chat.wait(300) == 0
        reader.join()
        os.close(main)

    return leave


@pytest.mark.parametrize(
    ("ask", "model"),
    [
        (stream_over_grpc, "gpt"),
        (stream_over_http, "gpt"),
        (chat_in_a_terminal, "gpt"),
        (unary_over_grpc, "plain"),
    ],
)
def test_a_client_that_leaves_frees_its_rows(
    served: dict[str, Any], ask: Callable[..., Callable[[], None]], model: str
) -> None:
    with given_up(served, model):
        leave = ask(served, model)
        wait_for(lambda: cache_tokens_used(served, model) > 0)
        leave()


def test_requests_in_line_are_given_up_too(served: dict[str, Any]) -> None:
    """Far more than run at once: whatever has left is out of the way of what comes next."""
    with given_up(served, "gpt"):
        leaving = Stream(served)
        for _ in range(300):
            leaving.send("ensemble", **original(MANY, **NEVER_ENDS))
        leaving.next()
        leaving.cancel()
    with Stream(served) as stream:
        assert stream.ask("ensemble", **original(2))


@pytest.mark.parametrize("model", ["gpt", "plain"])
def test_a_text_request_is_given_up_at_its_timeout(served: dict[str, Any], model: str) -> None:
    name = {"gpt": "ensemble", "plain": "plain_ensemble"}[model]
    with (
        given_up(served, model),
        Stream(served) as stream,
        pytest.raises(InferenceServerException, match="the request's timeout is over"),
    ):
        stream.send(name, {"timeout": 300_000}, **original(MANY, **NEVER_ENDS))
        while True:
            stream.next()


# Today's names


def test_todays_names_mean_what_the_originals_do(served: dict[str, Any]) -> None:
    body = {"max_tokens": 12, "top_k": 40, "temperature": 1.7, "random_seed": 3, "bad_words": ["e"]}
    told = {
        name: post(served, f"{name}/generate", {"text_input": PROMPT, **body})
        for name in ("plain_ensemble", "plain_text", "ensemble", "text")
    }
    sampled = {"runtime_top_k": 40, "temperature": 1.7, "random_seed": 3, "INPUT_2": "e"}
    before = {"INPUT_0": PROMPT, "INPUT_1": 12, **sampled}
    answer = post(served, "plain_ensemble/generate", before)
    assert "text_output" not in answer
    assert answer["OUTPUT_0"] == answer["OUTPUT_DELTA"]
    for name, each in told.items():
        assert each == {
            "model_name": name,
            "model_version": "1",
            "text_output": answer["OUTPUT_0"],
        }


def test_words_end_a_text_or_never_come(served: dict[str, Any]) -> None:
    body = {"text_input": PROMPT, "max_tokens": 30, "top_k": 40, "random_seed": 5}
    same = {"INPUT_0": PROMPT, "INPUT_1": 30, "runtime_top_k": 40, "random_seed": 5}
    text = post(served, "plain_text/generate", body)["text_output"]
    words = [f" {word}" for word in text.split() if word.isalpha()]
    for todays, original_name in (("stop_words", "INPUT_3"), ("bad_words", "INPUT_2")):
        told = post(served, "plain_text/generate", {**body, todays: [*words, ""]})
        csv = {**same, original_name: ",".join(words)}
        assert told["text_output"] == post(served, "plain_ensemble/generate", csv)["OUTPUT_0"]
        assert told["text_output"] != text
        assert text.startswith(told["text_output"]) == (todays == "stop_words")


def test_a_text_may_begin_with_its_prompt(served: dict[str, Any]) -> None:
    body = {"text_input": PROMPT, "max_tokens": 6, "exclude_input_in_output": False}
    whole = post(served, "text/generate", body)["text_output"]
    pieces = events(served, "text/generate_stream", {**body, "stream": True})
    alone = post(served, "text/generate", {**body, "exclude_input_in_output": True})
    assert whole == PROMPT + alone["text_output"]
    assert "".join(each["text_output"] for each in pieces) == whole


def test_pieces_of_text_come_only_where_asked(served: dict[str, Any]) -> None:
    tokens = 200  # many, so that they do not all come while one response is sent
    body = {"text_input": PROMPT, "max_tokens": tokens, "min_length": tokens}
    (whole,) = events(served, "text/generate_stream", body)
    pieces = events(served, "text/generate_stream", {**body, "stream": True})
    assert pieces[-1]["text_output"] == ""
    assert 2 < len(pieces) <= tokens + 1
    assert "".join(each["text_output"] for each in pieces) == whole["text_output"]
    (one,) = events(served, "plain_text/generate_stream", {**body, "stream": True})
    assert one["text_output"] == whole["text_output"]
    before = {"INPUT_0": PROMPT, "INPUT_1": tokens, "min_length": tokens}
    assert len(events(served, "ensemble/generate_stream", before)) > 1
    told = post(served, "ensemble/generate", {**before, "stream": False})
    assert told["OUTPUT_0"] == whole["text_output"]


def test_log_probabilities_and_outputs_by_name(served: dict[str, Any], stream: Stream) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4, "return_log_probs": True}
    told = post(served, "text/generate", body)
    assert set(told) - {"model_name", "model_version"} == {
        "text_output",
        "cum_log_probs",
        "output_log_probs",
    }
    with Client(served, "grpc") as client:
        named = client.infer("plain_ensemble", ["text_output", "sequence_length"], **original(4))
    assert named["text_output"].tolist() == [told["text_output"].encode()]
    assert named["sequence_length"].shape == (1, 1)
    beams = stream.ask("ensemble", **original(4, "Hello", "The quick", beam_width=3))
    assert beams[-1]["OUTPUT_0"].shape == (2, 3, 1)
    text = {"text_input": text_rows("Hello", "The quick")}
    text["max_tokens"] = np.full((2, 1), 4, np.int32)
    text["beam_width"] = np.full((2, 1), 3, np.int32)
    (response,) = stream.ask("text", **text)
    assert response["text_output"].tolist() == beams[-1]["OUTPUT_0"].reshape(-1).tolist()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"max_tokens": 3}, "the prompt is missing: text_input or INPUT_0"),
        ({"text_input": "a"}, "how many tokens to generate is missing: max_tokens or INPUT_1"),
        ({"text_input": "a", "INPUT_0": "a", "max_tokens": 3}, "are the same; send one"),
        ({"text_input": "a", "max_tokens": 3, "top_p": 2.0}, "top_p"),
    ],
)
def test_wrong_requests_for_text(served: dict[str, Any], body: dict[str, Any], reason: str) -> None:
    response = send(f"{served['http']}/v2/models/plain_ensemble/generate", body)
    assert response.status_code == 400
    assert reason in response.json()["error"]


def test_a_number_below_zero_is_refused(served: dict[str, Any]) -> None:
    body = {"text_input": "a", "max_tokens": -1}
    response = send(f"{served['http']}/v2/models/plain_text/generate", body)
    assert response.status_code == 400
    assert "max_tokens must be at least 0; got -1" in response.json()["error"]


# Requests of other programs, as their code sends them


def connector(kind: type[np.generic], *, stream: bool) -> dict[str, np.ndarray]:
    """What LangChain's TritonTensorRTLLM and LlamaIndex's NvidiaTriton send.

    kind: of whole numbers: langchain-nvidia-trt 0.0.1rc0 has UINT32,
          llama-index-llms-nvidia-triton 0.6.0 INT32
    """
    return {
        "text_input": np.array([[PROMPT]]).astype(object),
        "max_tokens": np.array([[8]], kind),
        "top_k": np.array([[1]], kind),
        "top_p": np.array([[0]], np.float32),
        "temperature": np.array([[1.0]], np.float32),
        "length_penalty": np.array([[1.0]], np.float32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "random_seed": np.array([[42]], np.uint64),
        "beam_width": np.array([[1]], kind),
        "stream": np.array([[stream]], bool),
    }


@pytest.mark.parametrize("prefix", ["", "plain_"])
@pytest.mark.parametrize(
    ("model", "kind", "streams"),
    [("ensemble", np.uint32, False), ("ensemble", np.uint32, True), ("text", np.int32, True)],
)
def test_connectors_of_langchain_and_llamaindex(
    served: dict[str, Any], prefix: str, model: str, kind: type[np.generic], streams: bool
) -> None:
    """They ask over a gRPC stream for text_output, and read it as a list of texts."""
    import tritonclient.grpc as grpc

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(served["grpc"])
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(
        model_name=prefix + model,
        inputs=infer_inputs(grpc, connector(kind, stream=streams)),
        outputs=[grpc.InferRequestedOutput("text_output")],
        request_id="4242",
    )
    text, final = "", False
    while not final:
        result, error = answers.get(timeout=60)
        assert error is None
        raw = result.get_response(as_json=True)
        text += "".join(token.decode() for token in result.as_numpy("text_output"))
        final = raw["parameters"]["triton_final_response"]["bool_param"]
    client.stop_stream()
    client.close()
    assert (
        text
        == post(served, "text/generate", {"text_input": PROMPT, "max_tokens": 8})["text_output"]
    )


@pytest.mark.parametrize("model", ["ensemble", "text", "plain_text"])
def test_a_request_of_genai_perf(served: dict[str, Any], model: str) -> None:
    """`--service-kind triton --backend tensorrtllm`: types are the model's, over a gRPC stream."""
    values = {
        "text_input": PROMPT.encode(),
        "max_tokens": 8,
        "exclude_input_in_output": True,
        "stream": True,
        "min_length": 8,
    }
    metadata = receive(f"{served['http']}/v2/models/{model}")
    declared = {each["name"]: each["datatype"] for each in metadata["inputs"]}
    types = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "UINT32": np.uint32}
    tensors = {name: np.array([[at]], types[declared[name]]) for name, at in values.items()}
    with Stream(served) as stream:
        pieces = [each["text_output"][0] for each in stream.ask(model, **tensors)]
    body = {"text_input": PROMPT, "max_tokens": 8, "min_length": 8}
    assert b"".join(pieces).decode() == post(served, "text/generate", body)["text_output"]
