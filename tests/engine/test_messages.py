"""Messages come out of their bytes as they went in, and nothing else comes out of bytes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.distributed.heartbeat import Heartbeat
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    Message,
    RankInfo,
    Ready,
    Stop,
    encode,
)
from launcher_scripts.engine.messages.plan import (
    AssignedBlocks,
    Choice,
    Draft,
    Move,
    Plan,
    PrefillPart,
    Proposal,
    RowStart,
    StepShape,
    TokenMask,
)
from launcher_scripts.engine.runner.loading import EngineSettings, RankSetup

ROW = RowStart(
    slot=3,
    start=17,
    ids=(5, -1, 0),
    end_id=1 << 31,
    request=GenerateRequest(
        (),
        9,
        SamplingParameters(temperature=0.1 + 0.2, random_seed=(1 << 64) - 1),
        bad_words=((1, 2), (3,)),
        logit_bias=((7, -1e9),),
        prompt_task=4,
    ),
)
WHOLE_PLAN = Plan(
    starts=(ROW,),
    encode=(1, 2),
    prefill=(PrefillPart(3, 0, 3),),
    decode=(0, 7),
    drafts=(Draft(4, 30, (8,), 2), Draft(5, 30, (8, 9))),
    proposals=(Proposal(4, 29, (7, 8), 2),),
    longest=40,
    moves=(Move(0, 2),),
    blocks=(AssignedBlocks(1, -1, (3, 4)),),
    masks=(TokenMask(3, b"\0\xff\n"),),
    record=(StepShape(8, 64, 0, Choice.SAMPLED),),
)
EXAMPLES = [
    RankSetup(EngineSettings(Path("a folder/2-gpu"), parallelism=Parallelism(2, 3), nodes=2)),
    RankSetup(EngineSettings(Path("a/1-gpu"), draft_checkpoint_dir=Path("b/1-gpu"))),
    WHOLE_PLAN,
    Plan(),
    Ready(RankInfo(1, 4321, "nœud", "cpu")),
    Heartbeat(3, "all_reduce", 7, 0.25, 1e-9, float("inf")),
    Failed('quotes " and\nlines'),
    Stop(),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert Decoder(*map(type, EXAMPLES)).decode(encode(message)) == message


class Holder(Message, frozen=True):
    table: torch.Tensor | None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).to(torch.bfloat16),
        torch.empty(0, 5),
        torch.tensor(2.5),
        torch.arange(6).view(2, 3).t(),
    ],
)
def test_tensors_are_sent_as_their_bytes(tensor: torch.Tensor) -> None:
    data = encode(Holder(tensor))
    assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() in data
    back = Decoder(Holder).decode(data).table
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert Decoder(Holder).decode(encode(Holder(None))) == Holder(None)


def test_the_tensor_of_a_row() -> None:
    row = msgspec.structs.replace(ROW, prompt_embedding=torch.ones(2, 3, dtype=torch.float16))
    (back,) = Decoder(Plan).decode(encode(Plan(starts=(row,)))).starts
    assert torch.equal(back.prompt, row.prompt_embedding)
    assert ROW.prompt == 4


@pytest.mark.parametrize(
    "tensor",
    [
        ["torch.float32", [4], b"\0" * 15],
        ["torch.float32", [4], b"\0" * 12],
        ["torch.float32", [-1], b"\0" * 16],
        ["torch.float32", [1 << 62], b""],
        ["torch.float33", [4], b"\0" * 16],
        ["torch.load", [4], b"\0" * 16],
        ["torch.float32", [4], "text"],
        "torch.float32",
    ],
    ids=repr,
)
def test_a_tensor_that_its_bytes_do_not_make_is_refused(tensor: object) -> None:
    with pytest.raises(ServerError, match="expected a message of type Holder: "):
        Decoder(Holder).decode(msgspec.msgpack.encode(["Holder", tensor]))


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        ["Plan"],
        ["Failed"],
        ["Failed", 3],
        ["Failed", "a", "b"],
        {"reason": "a"},
        ["os.system", "true"],
        "Failed",
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(body: object) -> None:
    with pytest.raises(ServerError, match="expected a message of type Failed, Stop: "):
        Decoder(Failed, Stop).decode(msgspec.msgpack.encode(body))


@given(st.binary())
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ServerError, match="expected a message of type Plan, Stop: "):
        Decoder(Plan, Stop).decode(data)


SMALL_MEMORY = """
import resource
from launcher_scripts.engine.distributed.heartbeat import Heartbeat
from launcher_scripts.engine.messages.message import Decoder, Failed, StartRanks
from launcher_scripts.common.errors import ServerError

resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, 1 << 28))
decoder = Decoder(StartRanks, Failed, Heartbeat)
for data in (
    bytes([0xDD]) + bytes([0xFF] * 4),
    bytes([0x92, 0xAA]) + b"StartRanks" + bytes([0xDD] + [0xFF] * 4),
    bytes([0x92, 0xA6]) + b"Failed" + bytes([0xDB] + [0xFF] * 4),
    bytes([0x91] * (1 << 20)),
):
    try:
        decoder.decode(data)
    except ServerError:
        continue
    raise SystemExit("it was read")
"""


def test_declared_sizes_take_no_memory() -> None:
    """Four bytes may say that 4 Gi items follow."""
    subprocess.run([sys.executable, "-c", SMALL_MEMORY], check=True, timeout=120)


def test_what_has_no_form_is_an_error_of_the_program() -> None:
    with socket.socket() as other, pytest.raises(TypeError, match="cannot hold a socket"):
        encode(Failed(other))  # type: ignore[arg-type]
