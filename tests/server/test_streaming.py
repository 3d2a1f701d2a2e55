"""Tokens and text as they come, through real decoupled models and their ensembles."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.tokenizer import load_tokenizer
from tests.processes import read, wait_for
from tests.server.processes import RunningStep
from tests.server.repositories import END_ID, TOKENIZERS
from tests.server.requests import (
    Client,
    Stream,
    generated,
    ids_request,
    infer_inputs,
    t5_request,
    text_rows,
)
from tests.server.shared import (
    cache_tokens_used,
    given_up,
    requests_given_up,
    tokens_generated,
)

pytestmark = pytest.mark.usefixtures("tritonserver")

PROMPT = (5, 6, 7)
SAMPLED = {"runtime_top_k": 40, "temperature": 1.7, "random_seed": 11}
ROWS_IN_FLIGHT = 64
BLOCK_TOKENS = 16  # of the cache, what each row has at least


@pytest.fixture
def served(shared_server: RunningStep) -> dict[str, Any]:
    return shared_server.ready


def test_text_models_have_a_numpy_of_their_own(shared_server: RunningStep) -> None:
    numpy_dir = shared_server.settings.numpy_dir
    models = [pid for pid, command in shared_server.survivors() if "start_server" not in command]
    loaded = [read(Path(f"/proc/{pid}/maps")).decode() for pid in models]
    assert any(f"{numpy_dir}/numpy/core/_multiarray_umath" in maps for maps in loaded)
    assert not any(f"{np.__file__.removesuffix('__init__.py')}core" in maps for maps in loaded)


@pytest.fixture
def stream(served: dict[str, Any]) -> Iterator[Stream]:
    with Stream(served) as stream:
        yield stream


def whole(served: dict[str, Any], **tensors: Any) -> dict[str, np.ndarray]:
    with Client(served, "grpc") as client:
        return client.infer("plain", **tensors)


def test_every_token_has_a_response(stream: Stream, served: dict[str, Any]) -> None:
    tensors = ids_request([PROMPT], 8, is_return_log_probs=True, **SAMPLED)
    responses = stream.ask("gpt", **tensors)
    answer = whole(served, **tensors)
    assert len(responses) == 8
    for name in answer.keys() - {"num_cached_tokens"}:  # a stream has it in its first response
        np.testing.assert_array_equal(responses[-1][name], answer[name])
    for count, response in enumerate(responses, 1):
        assert response["output_ids"].shape == (1, 1, 11)
        assert response["sequence_length"].tolist() == [[3 + count]]
        assert response["response_input_lengths"].tolist() == [[3]]
        assert generated(response) == generated(answer)[:count]
        assert set(response["output_ids"][0, 0, 3 + count :].tolist()) <= {END_ID}
        assert np.count_nonzero(response["output_log_probs"]) == count
    sums = [float(response["cum_log_probs"][0, 0]) for response in responses]
    assert sums == sorted(sums, reverse=True)


def test_a_client_may_ask_for_what_is_new_alone(stream: Stream, served: dict[str, Any]) -> None:
    """The tensor `news`, which grows with the response and not with the text."""
    tensors = ids_request([PROMPT], 8, **SAMPLED)
    whole_ids = generated(whole(served, **tensors))
    progress = {"is_return_progress": np.array([[True]])}
    found = [
        response["news"][0, 0].tolist() for response in stream.ask("gpt", **tensors, **progress)
    ]
    assert all("news" not in response for response in stream.ask("gpt", **tensors))
    ids: list[int] = []
    for total, prompt, place, last, *new in found:
        assert (prompt, place) == (3, 3 + len(ids) if ids else 0)
        ids += new[: total - place][0 if ids else prompt :]
        assert total == 3 + len(ids)
        assert last == (len(ids) == 8)
    assert ids == whole_ids
    assert len(found) == 8
    assert max(map(len, found[1:])) == 5


def test_an_early_end_comes_once(stream: Stream, served: dict[str, Any]) -> None:
    ids = generated(whole(served, **ids_request([PROMPT], 12, **SAMPLED)))
    end = ids[4]
    count = ids.index(end) + 1
    responses = stream.ask("gpt", **ids_request([PROMPT], 12, end_id=end, **SAMPLED))
    assert [generated(response) for response in responses] == [
        ids[: number + 1] for number in range(count)
    ]


def test_rows_of_one_request_stream_together(stream: Stream, served: dict[str, Any]) -> None:
    tensors = ids_request([PROMPT, (400,), (9, 8, 7, 6, 5)], 1)
    tensors["request_output_len"] = np.array([[2], [6], [4]], np.uint32)
    responses = stream.ask("gpt", **tensors)
    answer = whole(served, **tensors)
    assert len(responses) == 6
    for count, response in enumerate(responses, 1):
        for row in range(3):
            assert generated(response, row) == generated(answer, row)[:count]


def test_requests_of_one_stream_are_served_at_once(stream: Stream, served: dict[str, Any]) -> None:
    """Where tokens come faster than responses can be sent, a response brings several."""
    lengths = [1000, *range(60, 91)]
    for number, length in enumerate(lengths):
        stream.send("gpt", **ids_request([(number, 7)], length))
    seen: dict[int, list[list[int]]] = {}
    ended: list[int] = []
    while len(ended) < len(lengths):
        response, last = stream.next()
        number = int(response["output_ids"][0, 0, 0])
        assert number in seen or 0 not in ended, "a first token waited for another request's end"
        seen.setdefault(number, []).append(generated(response))
        ended += [number] if last else []
    for number in (1, len(lengths) - 1):
        ids = generated(whole(served, **ids_request([(number, 7)], lengths[number])))
        assert seen[number][-1] == ids
    for pieces in seen.values():
        counts = [len(piece) for piece in pieces]
        assert counts == sorted(set(counts))
        assert all(piece == pieces[-1][:count] for piece, count in zip(pieces, counts, strict=True))
    assert sum(map(len, seen.values())) < sum(lengths)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_ids": np.array([[491]], np.uint32)}, "outside of the vocabulary"),
        ({"input_lengths": np.array([[7]], np.uint32)}, "input_lengths"),
    ],
)
def test_a_wrong_request_ends_with_its_error(
    stream: Stream, changes: dict[str, np.ndarray], reason: str
) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        stream.ask("gpt", **{**ids_request([(1,)], 2), **changes})
    assert len(stream.ask("gpt", **ids_request([(1,)], 2))) == 2


def test_a_t5_streams_with_zeros_after_its_tokens(stream: Stream) -> None:
    request = t5_request([(5, 6, 7), (400, 2)], max_output_len=6, end_id=1000)
    responses = stream.ask("t5", **request)
    assert len(responses) == 6
    last = responses[-1]["output_ids"]
    for count, response in enumerate(responses, 1):
        ids = response["output_ids"]
        assert ids.shape == (2, 1, 6)
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids[..., :count], last[..., :count])
        assert not ids[..., count:].any()
        assert response["sequence_length"].tolist() == [[count], [count]]


def test_a_beam_search_streams_its_best_hypotheses(stream: Stream, served: dict[str, Any]) -> None:
    tensors = ids_request([PROMPT], 6, beam_width=3, min_length=6, is_return_log_probs=True)
    responses = stream.ask("gpt", **tensors)
    answer = whole(served, **tensors)
    for name in answer.keys() - {"num_cached_tokens"}:  # a stream has it in its first response
        np.testing.assert_array_equal(responses[-1][name], answer[name])
    lengths = [int(response["sequence_length"][0, 0]) for response in responses]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 9
    for length, response in zip(lengths, responses, strict=True):
        assert response["output_ids"].shape == (1, 3, 9)
        assert response["sequence_length"].tolist() == [[length] * 3]
        sums = response["cum_log_probs"][0].tolist()
        assert sums == sorted(sums, reverse=True)
        assert len({tuple(ids) for ids in response["output_ids"][0].tolist()}) == 3


def test_every_response_has_the_whole_texts_of_a_beam_search(stream: Stream) -> None:
    tensors = {"INPUT_0": text_rows("Hello"), "INPUT_1": np.array([[5]], np.uint32)}
    tensors["beam_width"] = np.array([[2]], np.uint32)
    for response in stream.ask("ensemble", **tensors):
        assert response["OUTPUT_0"].shape == (1, 2, 1)
        assert response["OUTPUT_DELTA"].tolist() == response["OUTPUT_0"].tolist()


def test_text_comes_in_pieces_that_make_the_whole(stream: Stream, served: dict[str, Any]) -> None:
    """Random weights also choose tokens that are parts of characters."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    prompt = "Grüße"
    tokens = 200  # many, so that they do not all come while one response is sent
    ids = tuple(tokenizer.encode(prompt))
    sampled = {"runtime_top_k": 400, "temperature": 3.0}
    for seed in range(5):
        answer = whole(served, **ids_request([ids], tokens, random_seed=seed, **sampled))
        text = tokenizer.decode([*ids, *generated(answer)])
        responses = stream.ask(
            "ensemble",
            INPUT_0=text_rows(prompt),
            INPUT_1=np.array([[tokens]], np.uint32),
            runtime_top_k=np.array([[400]], np.uint32),
            temperature=np.array([[3.0]], np.float32),
            random_seed=np.array([[seed]], np.uint64),
        )
        assert 1 < len(responses) <= len(generated(answer))
        deltas = [response["OUTPUT_DELTA"][0, 0, 0].decode() for response in responses]
        assert prompt + "".join(deltas) == text
        assert responses[-1]["OUTPUT_0"][0, 0, 0].decode() == "".join(deltas)
        for count, response in enumerate(responses, 1):
            assert response["OUTPUT_0"][0, 0, 0].decode() == "".join(deltas[:count])


def test_rows_of_text_end_on_their_own_and_may_hold_their_prompts(stream: Stream) -> None:
    responses = stream.ask(
        "ensemble",
        INPUT_0=text_rows("Hello the", "The"),
        INPUT_1=np.array([[3], [5]], np.uint32),
        is_return_prompt=np.array([[True], [False]]),
    )
    texts = [response["OUTPUT_0"][:, 0, 0] for response in responses]
    deltas = [response["OUTPUT_DELTA"][:, 0, 0] for response in responses]
    assert 1 <= len(responses) <= 5
    assert texts[-1][0] == b"Hello the" + b"".join(row[0] for row in deltas)
    assert texts[-1][1] == b"".join(row[1] for row in deltas)
    assert not any(row[0] for row in deltas[3:])


def test_text_of_a_t5_streams(stream: Stream) -> None:
    responses = stream.ask(
        "t5_ensemble", INPUT_0=text_rows("Hello"), INPUT_1=np.array([[7]], np.uint32)
    )
    deltas = [response["OUTPUT_DELTA"][0, 0, 0] for response in responses]
    assert 1 <= len(responses) <= 7
    assert responses[-1]["OUTPUT_0"][0, 0, 0] == b"".join(deltas)


@pytest.mark.parametrize("model", ["gpt", "plain"])
def test_cancelled_requests_make_room_at_once(served: dict[str, Any], model: str) -> None:
    """Every place is taken for many seconds; when the clients leave, the next one is served."""
    import tritonclient.grpc as grpc

    tensors = ids_request([(1, 2)] * 8, 16000, end_id=1000)
    with given_up(served, model):
        if model == "gpt":
            leaving = Stream(served)
            for _ in range(ROWS_IN_FLIGHT // 8):
                leaving.send(model, **tensors)
            leaving.next()
            leaving.cancel()
        else:
            client = grpc.InferenceServerClient(served["grpc"])
            asked = [
                client.async_infer(model, infer_inputs(grpc, tensors), lambda **_: None)
                for _ in range(ROWS_IN_FLIGHT // 8)
            ]
            wait_for(lambda: cache_tokens_used(served, model) >= ROWS_IN_FLIGHT * BLOCK_TOKENS)
            for one in asked:
                one.cancel()
        with Stream(served) as stream:
            assert stream.ask(model, **ids_request([PROMPT], 2))


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_request_is_given_up_at_its_timeout(served: dict[str, Any], transport: str) -> None:
    """What a client over HTTP can do, which cannot cancel."""
    tensors = ids_request([(1, 2)] * 8, 16000, end_id=1000)
    with (
        given_up(served, "plain"),
        Client(served, transport) as client,
        pytest.raises(InferenceServerException, match="the request's timeout is over"),
    ):
        client.infer("plain", sequence={"timeout": 300_000}, **tensors)


def post(served: dict[str, Any], path: str, output_len: int) -> socket.socket:
    """A connection on which a request was sent that nobody has read the answer of."""
    host, port = served["http"].rsplit(":", 1)
    asked = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": output_len}
    body = json.dumps({**asked, "end_id": 1000})
    head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
    connection = socket.create_connection((host, int(port)), 30)
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


def test_a_stream_over_http_ends_with_its_connection(served: dict[str, Any]) -> None:
    with given_up(served, "gpt"), post(served, "gpt/generate_stream", 16000) as connection:
        assert b"200 OK" in connection.recv(100)
        wait_for(lambda: cache_tokens_used(served, "gpt") > 0)


def test_another_request_over_http_goes_on_without_its_client(served: dict[str, Any]) -> None:
    """Triton tells a model nothing of such a connection; the rows are generated to their end."""
    before = requests_given_up(served, "plain")
    tokens = tokens_generated(served, "plain")
    post(served, "plain/generate", 1000).close()
    wait_for(lambda: tokens_generated(served, "plain") >= tokens + 1000)
    with Client(served, "http") as client:
        assert client.infer("plain", **ids_request([PROMPT], 2))
    wait_for(lambda: cache_tokens_used(served, "plain") == 0)
    assert requests_given_up(served, "plain") == before
