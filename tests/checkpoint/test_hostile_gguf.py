"""GGUF files that were made to harm: each is one error of the project."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.gguf_maker import finish
from tests.checkpoint.small_memory import small_memory

U8, U32, F32, TEXT, ARRAY, U64 = 0, 4, 6, 8, 9, 10
EB4 = 1 << 62


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return field(key, U32, struct.pack("<I", value))


def array(key: str, kind: int, count: int, content: bytes = b"") -> bytes:
    return field(key, ARRAY, struct.pack("<IQ", kind, count) + content)


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """The entry of a tensor; kind 0 is float32."""
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(*parts: bytes, fields: int | None = None, tensors: int = 0, data: int = 4096) -> bytes:
    count = len(parts) - tensors if fields is None else fields
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, count) + b"".join(parts) + bytes(data)


LLAMA = field("general.architecture", TEXT, text(b"llama"))
FILES = {
    "an array of 2^62": file(array("a", U8, EB4)),
    "a text of 2^62": file(field("a", TEXT, text(b"", EB4))),
    "a key of 2^62": file(text(b"", EB4)),
    "an array of 2^62 texts": file(array("a", TEXT, EB4)),
    "many small values": file(array("a", U8, 5 << 20), data=5 << 20),
    "2^62 fields": file(LLAMA, fields=EB4),
    "2^63 fields": file(LLAMA, fields=1 << 63),
    "2^62 tensors": file(LLAMA, fields=1, tensors=EB4),
    "70,000 fields": file(*[number(str(key), 1) for key in range(70_000)]),
    "70,000 tensors": file(
        LLAMA, *[tensor(str(name).encode(), (0,)) for name in range(70_000)], tensors=70_000
    ),
    "300,000 axes": file(LLAMA, tensor(b"a", (EB4,) * 300_000), tensors=1),
    "arrays in arrays": file(array("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 5000)),
    "an unknown type": file(field("a", 99, b"")),
    "a key that is not text": file(text(b"\xff\xfe") + struct.pack("<IB", U8, 0)),
    "a key twice": file(number("a", 1), number("a", 2)),
    "an alignment of 0": file(LLAMA, number("general.alignment", 0)),
    "an alignment of 3": file(LLAMA, number("general.alignment", 3)),
    "an alignment that is a text": file(LLAMA, field("general.alignment", TEXT, text(b"32"))),
    "a tensor of 2^62": file(LLAMA, tensor(b"a", (EB4,)), tensors=1),
    "sizes whose product is 0": file(LLAMA, tensor(b"a", (1 << 32, 1 << 32)), tensors=1),
    "a tensor beyond the file": file(LLAMA, tensor(b"a", (4,), offset=EB4), tensors=1),
    "a tensor before the data": file(LLAMA, tensor(b"a", (4,), offset=(1 << 64) - 64), tensors=1),
    "two tensors in one place": file(LLAMA, tensor(b"a", (4,)), tensor(b"b", (4,)), tensors=2),
    "tensors that overlap": file(
        LLAMA, tensor(b"a", (16,)), tensor(b"b", (4,), offset=32), tensors=2
    ),
    "a tensor twice": file(LLAMA, tensor(b"a", (4,)), tensor(b"a", (4,), offset=32), tensors=2),
    "2^32 axes": file(LLAMA, text(b"a") + b"\xff" * 4, fields=1, tensors=1),
    "an unknown quantisation": file(LLAMA, tensor(b"a", (4,), kind=999), tensors=1),
    "whole numbers": file(LLAMA, tensor(b"a", (4,), kind=26), tensors=1),
    "a block cut in two": file(LLAMA, tensor(b"a", (5,), kind=8), tensors=1),
    "a block of 256 cut in two": file(LLAMA, tensor(b"a", (128,), kind=12), tensors=1),
    "a block of IQ cut in two": file(LLAMA, tensor(b"a", (255,), kind=16), tensors=1),
    "blocks beyond the file": file(LLAMA, tensor(b"a", (1 << 20,), kind=12), tensors=1),
    "blocks of 2^62": file(LLAMA, tensor(b"a", (EB4,), kind=30), tensors=1),
    "blocks that overlap": file(
        LLAMA, tensor(b"a", (256,), kind=14), tensor(b"b", (256,), kind=18, offset=192), tensors=2
    ),
    "blocks of a type that is not read": file(LLAMA, tensor(b"a", (256,), kind=9), tensors=1),
    "a name that is not text": file(LLAMA, tensor(b"\xff", (4,)), tensors=1),
    "the other byte order": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(4096),
    "another version": struct.pack("<4sIQQ", b"GGUF", 99, 0, 0),
    "the magic alone": b"GGUF",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", FILES)
def test_a_harmful_file(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(FILES[case])
    with small_memory():
        message = refused_export(tmp_path / "a.gguf", tmp_path, "cannot read .* as a GGUF file")
    assert "MemoryError" not in message


TOKENS = ["a", "b", "ab", "c", "d", "e", "f", "g"]
SIZES: dict[str, Any] = {
    "block_count": 10,
    "embedding_length": 16,
    "feed_forward_length": 16,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 8,
    "vocab_size": 8,
    "context_length": 16,
}


def llama(*tensors: bytes, **changes: bytes) -> bytes:
    """The fields of a Llama, some of them exchanged, and few tensors."""
    fields = {key: number(f"llama.{key}", value) for key, value in SIZES.items()}
    real = struct.pack("<f", 1.0)
    fields["base"] = field("llama.rope.freq_base", F32, real)
    fields["eps"] = field("llama.attention.layer_norm_rms_epsilon", F32, real)
    return file(LLAMA, *(fields | changes).values(), *tensors, tensors=len(tensors))


TABLE = tensor(b"token_embd.weight", (16, 8))
YARN = field("llama.rope.scaling.type", TEXT, text(b"yarn"))
MODELS = {
    "a billion layers": llama(block_count=number("llama.block_count", 10**9)),
    "2^64 layers": llama(block_count=field("llama.block_count", U64, b"\xff" * 8)),
    "no layers": llama(block_count=number("llama.block_count", 0)),
    "layers that are a text": llama(block_count=field("llama.block_count", TEXT, text(b"many"))),
    "layers that are not text": llama(
        block_count=field("llama.block_count", TEXT, text(b"\xff\xff"))
    ),
    "a list of layers": llama(
        block_count=array("llama.block_count", U32, 2, struct.pack("<II", 1, 2))
    ),
    "an empty list": llama(block_count=array("llama.block_count", U32, 0)),
    "a base that is a text": llama(base=field("llama.rope.freq_base", TEXT, text(b"a"))),
    "heads of 2^31": llama(
        TABLE,
        block_count=number("llama.block_count", 1),
        kind=YARN,
        length=number("llama.attention.key_length", 1 << 31),
        width=number("llama.attention.value_length", 1 << 31),
    ),
    "more rotary dimensions than heads have": llama(
        TABLE,
        block_count=number("llama.block_count", 1),
        kind=YARN,
        **{"rope.dimension_count": number("llama.rope.dimension_count", 1 << 31)},
    ),
    "2^31 experts of nothing": llama(
        TABLE,
        tensor(b"blk.0.ffn_gate_exps.weight", (16, 0, 1 << 31), offset=512),
        block_count=number("llama.block_count", 1),
        experts=number("llama.expert_count", 1 << 31),
        used=number("llama.expert_used_count", 2),
    ),
    "an architecture that is a number": file(number("general.architecture", 1)),
    "an architecture that is a list": file(array("general.architecture", U8, 1, b"\0")),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be(case: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(MODELS[case])
    with small_memory():
        message = refused_export(tmp_path / "a.gguf", tmp_path, "problems? in the GGUF file")
    assert len(message) < 2000


def write_tokens(path: Path, **metadata: Any) -> Path:
    """A whole model of one layer whose tokenizer has some values exchanged."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (SIZES | {"block_count": 1}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [1] * 8,
        "merges": ["a b"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for key, value in (tokens | metadata).items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, *kinds(value))
    matrices = {"token_embd": (8, 16), "output_norm": (16,)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        matrices[f"blk.0.{part}"] = (16, 16)
    matrices |= {"blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    finish(writer)
    return path


def kinds(value: Any) -> tuple[Any, ...]:
    types = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.INT32,
        bool: gguf.GGUFValueType.BOOL,
    }
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, types[type(value[0])]
    return (types[type(value)],)


def test_a_tokenizer_that_can_be(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.gguf")
    folder = export_folder(path, tmp_path, tokenizer=TokenizerSettings("auto"))
    assert (folder / "tokenizer.json").is_file()


TOKENIZERS: dict[str, dict[str, Any]] = {
    "a start beyond the vocabulary": {"bos_token_id": 8},
    "a negative end": {"eos_token_id": -1},
    "an end that is a text": {"eos_token_id": "b"},
    "tokens that are numbers": {"tokens": [1] * 8},
    "one token": {"tokens": "a"},
    "a merge that is none": {"merges": ["a"]},
    "a merge of one": {"merges": ["a b", "c"]},
    "a merge into nothing": {"merges": ["a c"]},
    "merges of unknown tokens": {"merges": ["a z"]},
    "kinds that are texts": {"token_type": ["1"] * 8},
    "too few kinds": {"token_type": [1]},
    "a rule that is a number": {"pre": 1},
    "more tokens than rows": {"tokens": [*TOKENS, "h"], "token_type": [1] * 9},
    "a start that is a template's": {
        "tokens": [*TOKENS[:7], "$A:x"],
        "bos_token_id": 7,
        "add_bos_token": True,
    },
    "the same token twice": {"tokens": [*TOKENS[:7], "a"]},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_cannot_be(case: str, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.gguf", **TOKENIZERS[case])
    refused_export(path, tmp_path, "GGUF|tokenizer|vocabulary", tokenizer=TokenizerSettings("auto"))
