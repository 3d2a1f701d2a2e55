"""What the token model knows of the requests that text models send on."""

from __future__ import annotations

import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.backends.fastertransformer.answer_tensors import news
from launcher_scripts.backends.fastertransformer.streams import (
    FINAL,
    Channels,
    ChannelSender,
    ForwardedRequest,
    TextModelChannel,
    forwarded_request,
)
from launcher_scripts.backends.text_channel import FORWARDED, ChannelMessage
from launcher_scripts.backends.text_channel import Channel as TextChannel
from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateOutput
from tests.processes import wait_for


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("", None),
        ("4242", None),
        ("a client's own id", None),
        (f"{FORWARDED} ab", None),
        (f"{FORWARDED} ab c 1", ForwardedRequest("ab", "c", streams=True)),
        (f"{FORWARDED} ab c 0", ForwardedRequest("ab", "c", streams=False)),
    ],
)
def test_ids_of_forwarded_requests(request_id: str, expected: ForwardedRequest | None) -> None:
    request: Any = types.SimpleNamespace(request_id=lambda: request_id)
    assert forwarded_request(request) == expected


class Ends:
    """Both ends of a channel, in this process: of the text model and of the token model."""

    def __init__(self) -> None:
        self.messages: list[ChannelMessage] = []
        self.lost: list[bool] = []
        self.text = TextChannel(self.messages.append, lambda: self.lost.append(True))
        self.token: TextModelChannel = Channels().to(self.text.name)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    if not ends.token.closed:
        ends.text.close()
        wait_for(lambda: ends.token.closed)


def response(**tensors: torch.Tensor) -> Any:
    found = [
        types.SimpleNamespace(name=lambda name=name: name, to_dlpack=lambda at=at: at.__dlpack__())
        for name, at in tensors.items()
    ]
    return types.SimpleNamespace(has_error=lambda: False, output_tensors=lambda: found)


def failed(message: str, code: str) -> Any:
    named = types.SimpleNamespace(name=code)
    error = types.SimpleNamespace(message=lambda: message, code=lambda: named)
    return types.SimpleNamespace(has_error=lambda: True, error=lambda: error)


def test_responses_go_over_the_channel(ends: Ends) -> None:
    answered = []
    sender = ChannelSender(
        ends.token, ForwardedRequest("k", "", True), lambda: answered.append(True)
    )
    ids = torch.tensor([[[5, 6, 7]]], dtype=torch.int32)
    sender.send(response(news=ids, cum_log_probs=torch.tensor([[-1.5]])))
    sender.hand_over()
    sender.send(failed("nö", "INVALID_ARG"), flags=FINAL)
    wait_for(lambda: len(ends.messages) == 2)
    first, last = ends.messages
    assert (first.key, first.last, first.error) == ("k", False, None)
    assert first.tensors["news"].tolist() == ids.tolist()
    assert first.tensors["news"].dtype == np.int32
    assert first.tensors["cum_log_probs"].tolist() == [[-1.5]]
    assert (last.last, last.error, last.tensors) == (True, ("nö", "INVALID_ARG"), {})
    assert answered == [True]


def test_only_the_key_cancels_and_only_while_the_request_runs(ends: Ends) -> None:
    cancelled: list[str] = []
    senders = {}
    for key in ("a", "b"):
        senders[key] = ChannelSender(ends.token, ForwardedRequest(key, "", True), lambda: None)
        answer: Any = types.SimpleNamespace(cancel=lambda key=key: cancelled.append(key))
        senders[key].opened(answer)
    senders["a"].send(flags=FINAL)
    wait_for(lambda: bool(ends.messages))
    for key in ("c", "a", "b"):
        ends.text.cancel(key)
    wait_for(lambda: bool(cancelled))
    assert cancelled == ["b"]


def test_what_a_text_model_leaves_is_cancelled(ends: Ends) -> None:
    cancelled: list[bool] = []
    answer: Any = types.SimpleNamespace(cancel=lambda: cancelled.append(True))
    ends.token.add("k", answer)
    ChannelSender(ends.token, ForwardedRequest("k", "", True), lambda: None).send()
    wait_for(lambda: bool(ends.messages))
    ends.text.close()
    wait_for(lambda: cancelled == [True])
    wait_for(lambda: ends.token.closed)
    wait_for(lambda: ends.lost == [True])


LISTENER = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind("\\0" + sys.argv[1])
listening.listen()
print(flush=True)
sys.stdin.read()
"""


def test_a_channel_of_another_program_is_not_used() -> None:
    """A client might name any socket of the machine."""
    name = f"launcher-test-{uuid.uuid4().hex}"
    with pytest.raises(RequestError, match="channel cannot be used"):
        Channels().to(name)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LISTENER, name], **pipes) as other:
        assert other.stdout.readline()
        with pytest.raises(RequestError, match="none of this server's models'"):
            Channels().to(name)
        other.stdin.close()


def test_news_are_the_tokens_that_earlier_responses_did_not_have() -> None:
    """A row's first news begin with its prompt; a beam search's rows are news as a whole."""
    outputs = [GenerateOutput((9, 1)), GenerateOutput((4, 3))]
    found = news([(7, 8), (5,)], outputs, before=[1, 0], finished=[False, True])
    assert found.dtype == torch.int32
    assert found.tolist() == [[[4, 2, 3, 0, 1, 0, 0]], [[3, 1, 0, 1, 5, 4, 3]]]


def test_news_of_a_model_whose_answers_have_no_prompts() -> None:
    assert news([()], [GenerateOutput((7, 8))], [2], [True]).tolist() == [[[2, 0, 2, 1]]]
