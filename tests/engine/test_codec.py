"""Messages come out of their bytes as they went in, and nothing else comes out of bytes."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.engine.codec import decode, encode
from launcher_scripts.engine.loading import EngineSettings, RankSetup
from launcher_scripts.engine.messages import (
    MESSAGES,
    Beat,
    Failed,
    FrameReader,
    RankInfo,
    Ready,
    Stop,
    _kind,
    pack_message,
)
from launcher_scripts.engine.plan import Plan, PrefillPart, RowStart
from launcher_scripts.errors import ServerError
from launcher_scripts.parallel import Parallelism
from launcher_scripts.protocol import SamplingParameters

ROW = RowStart(
    slot=3,
    start=17,
    ids=(5, -1, 0),
    end_id=1 << 31,
    sampling=SamplingParameters(temperature=0.1 + 0.2, random_seed=(1 << 64) - 1),
    bad_words=((1, 2), (3,)),
)
EXAMPLES = [
    RankSetup(EngineSettings(Path("a folder/2-gpu"), parallelism=Parallelism(2, 3), nodes=2)),
    Plan((ROW,), (1, 2), (PrefillPart(3, 0, 3),), (0, 7), longest=40),
    Plan(),
    Ready(RankInfo(1, 4321, "nœud", "cpu")),
    Beat(3, "all_reduce", 7, 0.25, 1e-9, float("inf")),
    Failed('quotes " and\nlines'),
    Stop(),
]


def round_trip(message):
    return list(FrameReader().feed(pack_message(message)))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert round_trip(message) == [message]


def test_every_message_of_the_table_has_a_form():
    for number, name in enumerate(MESSAGES):
        kind = _kind(number)
        assert kind.__name__ == name
        with pytest.raises(ServerError, match=f"is no {name}"):
            decode(kind, memoryview(b"\0\0\0\2\0\0\0\0{}"))


@given(st.integers(), st.integers(1, 60))
def test_pieces_of_any_size(value, piece):
    messages = [Beat(step=value), Stop(), Failed("x" * 100)]
    data = b"".join(map(pack_message, messages))
    reader = FrameReader()
    pieces = (data[start : start + piece] for start in range(0, len(data), piece))
    assert [message for part in pieces for message in reader.feed(part)] == messages


@dataclass(frozen=True)
class Holder:
    table: int | torch.Tensor | None
    array: np.ndarray
    raw: bytes = b""


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4).to(torch.bfloat16), torch.empty(0, 5), torch.arange(6).view(2, 3).t()],
)
def test_tensors_and_arrays(tensor):
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    back = decode(Holder, memoryview(encode(Holder, Holder(tensor, array, b"\0raw"))))
    assert back.table.dtype == tensor.dtype
    assert torch.equal(back.table, tensor)
    assert (back.array == array).all()
    assert back.array.dtype == array.dtype
    assert back.raw == b"\0raw"
    assert decode(Holder, memoryview(encode(Holder, Holder(7, array)))).table == 7


@pytest.mark.parametrize(
    "text", ['["1",2]', "[1]", "[1,2,3,4]", '{"step":1}', "null", "[1,true", ""]
)
def test_what_does_not_fit_is_refused(text):
    body = len(text).to_bytes(4, "big") + bytes(4) + text.encode()
    with pytest.raises(ServerError, match="is no PrefillPart"):
        decode(PrefillPart, memoryview(body))


def test_a_tail_that_is_not_there_is_refused():
    text = json.dumps([None, ["<f4", [4], 16], 1000000]).encode()
    body = len(text).to_bytes(4, "big") + bytes(4) + text
    with pytest.raises(ServerError, match="is no Holder"):
        decode(Holder, memoryview(body))


@dataclass(frozen=True)
class Formless:
    other: socket.socket


def test_a_type_without_a_form_is_an_error_of_the_program():
    with pytest.raises(TypeError, match="messages cannot hold"):
        encode(Formless, None)


@pytest.mark.parametrize("head", [b"\xff" * 10, (5).to_bytes(8, "big") + b"\0\xff"])
def test_a_stream_of_something_else_is_refused(head):
    with pytest.raises(ServerError, match="no message between ranks"):
        list(FrameReader().feed(head))
