"""Pickles that were made to harm: each is an error or plain data, and changes nothing."""

from __future__ import annotations

import functools
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.formats import pickles, torch_file
from launcher_scripts.checkpoint.formats.archive import Archive, Region
from launcher_scripts.common.errors import CheckpointError
from tests.checkpoint.small_memory import small_memory
from tests.checkpoint.test_torch_file import region_of, rewritten, saved

FLOATS = 4  # of the storage that every pickle here may refer to


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@functools.cache
def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return pickle.LONG4 + struct.pack("<i", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def storage(kind: bytes = name("torch", "FloatStorage"), key: bytes = text("0")) -> bytes:
    return b"(" + text("storage") + kind + key + text("cpu") + number(FLOATS) + b"tQ"


def tensor(source: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The call that makes a tensor of a storage."""
    numbers = [b"(" + b"".join(map(number, part)) + b"t" for part in (size, stride)]
    return REBUILD + b"(" + source + number(offset) + b"".join(numbers) + b"tR"


REBUILD = name("torch._utils", "_rebuild_tensor_v2")
EXPANDED = tensor(storage(), 0, (1 << 20,), (0,))
DEEP = b")" + b"\x85" * 100_000
# Every level is a tuple of the one before, twice; and lists that are filled from the outside.
LAUGHS = number(1) + b"2\x86" * 60
LATE = b"".join(b"]q%c" % n for n in range(60)) + b"".join(
    b"h%c(h%ch%ce0" % (n + 1, n, n) for n in reversed(range(59))
)
SET = name("__builtin__", "set")

HARMFUL = {
    "a state for a shared type": name("torch", "FloatStorage")
    + b"("
    + number(3)
    + text("<")
    + b"NNN"
    + number(4096)
    + number(4)
    + number(0)
    + b"tb",
    "a state for a function": REBUILD + b"}" + text("a") + b"Nsb",
    "attributes for a function": REBUILD + b"N}" + text("__defaults__") + b")s\x86b",
    "a state for a class": name("collections", "OrderedDict") + b"}" + text("a") + b"Nsb",
    "a state for a storage": storage() + b"(NNNNtb",
    "items for a tensor": tensor(storage(), 0, (4,), (1,)) + number(0) + number(5) + b"s",
    "a tensor for a storage": tensor(EXPANDED, 0, (1 << 20,), (1,)),
    "a strided tensor for a storage": tensor(tensor(storage(), 0, (2, 2), (1, 2)), 1, (3,), (1,)),
    "more values than the storage has": EXPANDED,
    "a tensor of 300,000 axes": tensor(storage(), 0, (1 << 62,) * 300_000, (1,) * 300_000),
    "a list of more values": name("collections", "OrderedDict") + b"(" + EXPANDED + b"tR",
    "4 EB of bytes": b"\x8e" + struct.pack("<Q", 1 << 62),
    "4 EB of changeable bytes": b"\x96" + struct.pack("<Q", 1 << 62),
    "4 EB of text": b"\x8d" + struct.pack("<Q", 1 << 62),
    "a frame of 4 EB": b"\x95" + struct.pack("<Q", 1 << 62),
    "a number of 2 GB": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "a key of a hundred thousand tuples": b"}" + DEEP + b"Ns",
    "a set of a hundred thousand tuples": SET + b"(]" + DEEP + b"atR",
    "members of a hundred thousand tuples": b"\x8f(" + DEEP + b"\x90",
    "a key of exponentially many parts": b"}" + LAUGHS + b"Ns",
    "exponentially many parts": LAUGHS,
    "exponentially many parts, late": LATE + b"h\x3b",
    "a list that contains itself": b"]2a",
    "a hundred thousand tuples": DEEP,
    "dictionaries in dictionaries": b"}" + (text("a") + b"}") * 10_000 + b"s" * 10_000,
    "an extension": b"\x82\x01",
    "an instance": b"(i__builtin__\nset\n",
    "a call of a text": text("a") + b")R",
    "an object of a type": name("torch", "FloatStorage") + b")\x81",
    "no arguments": REBUILD + b"NR",
    "an empty stack": b"0",
    "a storage with a list for a name": storage(key=b"](ee"),
    "a storage of no type": storage(kind=text("float")),
}


def region(code: bytes, folder: Path) -> Region:
    """A file of torch.save with FLOATS values and another pickle."""
    content = saved({"a": torch.arange(FLOATS, dtype=torch.float32)})
    return region_of(rewritten(content, {"data.pkl": code}), folder)


def shared() -> Any:
    """What all pickles are given, in a form that shows a change."""
    types = {**torch_file.STORAGES, **torch_file.TORCH_DTYPES}
    functions = [value for value in vars(torch_file).values() if callable(value)]
    return (
        [(repr(kind), kind.itemsize, kind.alignment, kind.str) for kind in types.values()],
        [
            (dict(vars(f)), getattr(f, "__defaults__", None))
            for f in functions
            if hasattr(f, "__dict__")
        ],
        [dict(vars(kind)) for kind in (pickles.Opaque, pickles.PickledObject, pickles.Token)],
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_pickle_is_refused(case: str, tmp_path: Path) -> None:
    file = region(b"\x80\x02" + HARMFUL[case] + b".", tmp_path / "f")
    before = shared()
    with small_memory(), pytest.raises(CheckpointError, match=r"file|storage|shape|axes") as caught:
        torch_file.load_torch_file(file, "file")
    assert "MemoryError" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert shared() == before


def test_a_place_beyond_the_memo_is_no_memory(tmp_path: Path) -> None:
    with small_memory():
        assert (
            torch_file.load_torch_file(region(b"\x80\x02Nr\xff\xff\xff\x7f.", tmp_path / "f"), "f")
            is None
        )


def test_what_a_pickle_may_do() -> None:
    """Records, containers and parts that several places share are plain data."""
    code = pickle.dumps({"a": [1, (2.5, "b")], ("c", (1, ("e",))): {3, 4}, "d": frozenset([5])}, 4)
    assert pickles.load_pickle(code, "file", {}) == pickle.loads(code)
    part = ["shared"]
    code = pickle.dumps([part, part, {"again": part}], 2)
    found = pickles.load_pickle(code, "file", {})
    assert found == [part, part, {"again": part}] and found[0] is found[1]


# Arguments of opcodes: what a reader would rather not get, beside what it knows.
NAMES = (
    *(("torch", kind) for kind in ("FloatStorage", "HalfStorage", "float32", "Size", "device")),
    *(("torch._utils", kind) for kind in ("_rebuild_tensor_v2", "_rebuild_parameter")),
    *(("collections", "OrderedDict"), ("_codecs", "encode"), ("__builtin__", "set")),
    *(("__builtin__", kind) for kind in ("list", "dict", "int", "getattr")),
    *(("argparse", "Namespace"), ("numpy", "dtype"), ("numpy.core.multiarray", "scalar")),
    *(("copyreg", "_reconstructor"), ("torch._tensor", "_rebuild_from_type_v2")),
    *(("torch._utils", "_rebuild_tensor_v3"), ("torch", "QInt8Storage"), ("posix", "system")),
)
NUMBERS = (0, 1, 2, 3, 4, 5, 64, 4096, -1, 1 << 20, 1 << 31, 1 << 62, -(1 << 63))
TEXTS = ("storage", "0", "cpu", "a", "__defaults__", "__setstate__", "<", "state_dict")
PARTS = (storage(), tensor(storage(), 0, (2, 2), (2, 1)), tensor(storage(), 3, (1,), (0,)))


def instruction(draw: random.Random) -> bytes:
    """One opcode with an argument, or a few that belong together."""
    match draw.randrange(8):
        case 0:
            return name(*draw.choice(NAMES))
        case 1:
            return number(draw.choice(NUMBERS))
        case 2:
            return text(draw.choice(TEXTS))
        case 3:
            return draw.choice(PARTS)
        case 4:
            return draw.choice(b"qh").to_bytes(1, "big") + bytes([draw.randrange(6)])
        case 5:
            return b"r" + struct.pack("<I", draw.choice((0, 5, 1 << 20, (1 << 32) - 1)))
        case 6:
            plain = [op.code for op in pickletools.opcodes if op.arg is None]
            return draw.choice(plain).encode("latin-1")
    return draw.choice((b"R", b"b", b"s", b"u", b"a", b"e", b"(", b"t", b"\x81", b"}", b"]", b")"))


def program(draw: random.Random, sound: bytes) -> bytes:
    """A random pickle, or a sound one with something in it exchanged."""
    if draw.random() < 0.5:
        length = draw.randrange(1, 40)
        return b"\x80\x02" + b"".join(instruction(draw) for _ in range(length)) + b"."
    code = bytearray(sound)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(2, len(code))
        code[at : at + draw.randrange(3)] = instruction(draw)
    return bytes(code)


def arrays(value: Any) -> list[np.ndarray]:
    """All tensors that a pickle gave."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, pickles.PickledObject):
        value = value.state
    parts = value.values() if isinstance(value, dict) else value
    return (
        [found for part in parts for found in arrays(part)]
        if isinstance(value, (dict, list, tuple))
        else []
    )


def try_programs(seed: int, count: int, folder: Path) -> int:
    """Load `count` random pickles; how many of them were data."""
    draw = random.Random(seed)
    sound = (
        pickletools.optimize(
            pickle.dumps({"a": [1, 2.5, ("b", None)], "c": {1, 2}, ("d", 1): {}}, 2)
        )
        + b""
    )
    sound = sound[:-1] + b"(" + PARTS[1] + PARTS[1] + b"t\x86."
    content = saved({"a": torch.arange(FLOATS, dtype=torch.float32)})
    folder.mkdir()
    (folder / "file").write_bytes(content)
    whole = Archive(folder).region("file")
    values = np.frombuffer(whole.buffer, np.uint8)
    low = values.__array_interface__["data"][0]
    file = torch_file._TorchFile(whole, "file")
    before = shared()
    data = 0
    for _ in range(count):
        code = program(draw, sound)
        try:
            found = pickles.load_pickle(code, "file", torch_file._GLOBALS, file._storage)
        except CheckpointError as error:
            assert "MemoryError" not in str(error), code
            continue
        data += 1
        for array in arrays(found):
            first = array.__array_interface__["data"][0]
            steps = zip(array.shape, array.strides, strict=True)
            last = first + sum((n - 1) * step for n, step in steps) + array.itemsize
            assert not array.size or low <= first < last <= low + values.size, code
    assert shared() == before
    return data


def test_random_pickles_are_errors_or_data(tmp_path: Path) -> None:
    with small_memory():
        assert try_programs(0, 4000, tmp_path / "f") > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_pickles_are_errors_or_data(seed: int, tmp_path: Path) -> None:
    with small_memory():
        assert try_programs(seed, 200_000, tmp_path / "f") > 2500
