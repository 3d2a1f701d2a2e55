"""Messages between the processes of one engine: rank 0, other ranks, and hosts of other nodes.

A message is a msgspec Struct, sent as msgpack: an array of its name and its fields. Whoever reads
says which messages it expects, and anything else is an error. Nothing that is read is ever executed
or looked up by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from launcher_scripts.common.errors import ServerError


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of messages: fields in order, checked by their types when it is read."""


class Message(Record, frozen=True, tag=True):
    """Base of the messages between processes."""


@dataclass(frozen=True)
class RankInfo:
    """Location of a rank."""

    rank: int
    pid: int
    host: str
    device: str


class RankHello(Message, frozen=True):
    """First words of a rank to rank 0."""

    rank: int
    pid: int
    host: str


class NodeHello(Message, frozen=True):
    """First words of the process that starts the ranks of another node."""

    node: int
    nodes: int
    pid: int
    host: str


class StartRanks(Message, frozen=True):
    """The ranks that a node is to start; none where the model needs fewer nodes."""

    ranks: tuple[int, ...]


class Meet(Message, frozen=True):
    """Every rank has its weights: they meet now, through the store at this address."""

    host: str
    port: int


class Loaded(Message, frozen=True):
    """A rank has read its weights and waits to meet the others."""


class Ready(Message, frozen=True):
    """A rank waits for plans."""

    info: RankInfo


class Failed(Message, frozen=True):
    """A rank cannot go on, or rank 0 turns somebody away."""

    reason: str


class RankLost(Message, frozen=True):
    """A node's host has lost one of its ranks."""

    rank: int
    reason: str


class GroupLost(Message, frozen=True):
    """Rank 0 has given up: some rank is lost."""

    reason: str


class Stop(Message, frozen=True):
    """The engine is closing."""


class ExchangeWeights(Message, frozen=True):
    """Operation: the weights of another export of the same sizes come in place of the present ones.

    manifest: the digest of the export's manifest.json, the same for every rank
    """

    checkpoint_dir: Path
    manifest: str


class LoadLoRA(Message, frozen=True):
    """Operation: an adapter comes into a slot of the LoRA adapters.

    digest: of its files, the same for every rank
    """

    path: Path
    digest: str
    slot: int


class RefitWeights(Message, frozen=True):
    """Operation: the weights of a transformers folder of the same model come in place of the
    present ones.

    identity: of its files, by their sizes and times, the same for every rank
    """

    folder: Path
    identity: str


class Sleep(Message, frozen=True):
    """Operation: the device has neither weights nor cache until it is reverted."""


# Operations on all ranks between two steps; see runner/operations.py.
Operation = ExchangeWeights | LoadLoRA | RefitWeights | Sleep
Action = Literal["prepare", "apply", "revert", "finish"]


class OperationRequest(Message, frozen=True):
    """The next action of an operation.

    prepare: while steps go on;  apply, revert: between two steps, the same ones on all ranks;
    finish: whatever it still holds is released
    """

    number: int
    action: Action
    operation: Operation | None = None


class OperationReply(Message, frozen=True):
    """A rank has done so. reason: why it could not, and has changed nothing."""

    number: int
    action: Action
    reason: str = ""


class _RawTensor(Record, frozen=True):
    """A tensor's elements in row-major order; dtype as torch prints it."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data: bytes


class Decoder:
    """Reads messages of the given types, and no others."""

    def __init__(self, *kinds: Any) -> None:
        self._names = ", ".join(kind.__name__ for kind in kinds)
        self._decoder = msgspec.msgpack.Decoder(reduce(or_, kinds), dec_hook=_read_value)

    def decode(self, data: bytes) -> Any:
        """One of the types; ServerError where the bytes do not hold one."""
        try:
            return self._decoder.decode(data)
        except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError
            raise ServerError(f"expected a message of type {self._names}: {error}") from error


def encode(message: Any) -> bytes:
    """A message as bytes. TypeError for what messages cannot hold."""
    return _ENCODER.encode(message)


def _write_value(value: Any) -> Any:
    """Encode a Path or a tensor, which msgspec does not support by itself."""
    if isinstance(value, Path):
        return str(value)
    import torch  # the hosts of other nodes' ranks do without it

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"messages cannot hold a {type(value).__name__}")
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return _RawTensor(str(value.dtype), tuple(value.shape), data)


def _read_value(kind: Any, value: Any) -> Any:
    """A Path, or a tensor on the CPU; msgspec turns a ValueError into its own."""
    if kind is Path:
        return Path(value)
    import torch

    raw = msgspec.convert(value, _RawTensor, builtin_types=(bytes,))
    dtype = getattr(torch, raw.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {raw.dtype}")
    try:
        flat = torch.empty(len(raw.data), dtype=torch.uint8)
        flat.numpy()[:] = memoryview(raw.data)
        return flat.view(dtype).reshape(raw.shape)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_write_value)
