"""SentencePiece models: the pieces and settings of `tokenizer.model` and its kin.

The file is one message of Protocol Buffers, ModelProto of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Its few fields
are read here from the wire format (https://protobuf.dev/programming-guides/encoding): the library
sentencepiece does not give its normalization, and the code that it generates needs a newer protobuf
than Triton's client allows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Values of a piece's type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
# The fields of ModelProto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
# The fields of TrainerSpec: name -> number, default.
_OF_TRAINER: dict[str, tuple[int, Any]] = {
    "algorithm": (3, UNIGRAM),
    "byte_fallback": (35, False),
    "unk_id": (40, 0),
    "bos_id": (41, 1),
    "eos_id": (42, 2),
    "unk_piece": (45, "<unk>"),
    "bos_piece": (46, "<s>"),
    "eos_piece": (47, "</s>"),
}
_CHARSMAP = 2


@dataclass(frozen=True)
class Piece:
    """text, score and type (NORMAL, ...); its id is its index."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a ModelProto that say how text becomes ids.

    algorithm:     UNIGRAM or BPE (or words or characters, 3 and 4)
    byte_fallback: characters without a piece become pieces of bytes
    charsmap:      the compiled normalization; b"" without one
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes
    algorithm: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    unk_piece: str
    bos_piece: str
    eos_piece: str

    @classmethod
    def parse(cls, content: bytes) -> SentencePieceModel:
        """Raises ValueError for a file that is not such a model, or is truncated."""
        pieces: list[Piece] = []
        trainer: dict[int, Any] = {}
        charsmap = b""
        for number, value in _fields(memoryview(content)):
            if number == _PIECES:
                pieces.append(_piece(_message(value)))
            elif number == _TRAINER:
                trainer = dict(_fields(_message(value)))
            elif number == _NORMALIZER:
                charsmap = bytes(_message(dict(_fields(_message(value))).get(_CHARSMAP, b"")))
        if not pieces:
            raise ValueError("it is not a SentencePiece model: it has no pieces")
        values = {
            name: _converted(trainer.get(number, default), type(default))
            for name, (number, default) in _OF_TRAINER.items()
        }
        return cls(tuple(pieces), charsmap, **values)


def _piece(content: Any) -> Piece:
    fields = dict(_fields(content))
    score = fields.get(2, b"\0\0\0\0")
    if not isinstance(score, memoryview | bytes) or len(score) != 4:
        raise ValueError("it is not a SentencePiece model: a score is not a float")
    text = _converted(fields.get(1, ""), str)
    return Piece(text, struct.unpack("<f", score)[0], _converted(fields.get(3, NORMAL), int))


def _message(value: Any) -> Any:
    """The bytes of a field that must have some."""
    if isinstance(value, int):
        raise ValueError("it is not a SentencePiece model: a message is a number")
    return value


def _converted(value: Any, kind: type) -> Any:
    """A field's value as `kind`; numbers of 64 bits may be negative."""
    if kind is str:
        return value if isinstance(value, str) else bytes(_message(value)).decode("utf-8")
    if not isinstance(value, int):
        raise ValueError("it is not a SentencePiece model: a number is a message")
    return kind(value - 2**64 if value >= 2**63 else value)


def _fields(content: Any) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: an int for a varint, else its bytes."""
    offset, size = 0, len(content)
    while offset < size:
        key, offset = _varint(content, offset)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, offset = _varint(content, offset)
            yield number, value
            continue
        if kind == _BYTES:
            length, offset = _varint(content, offset)
        elif kind in _SIZES:
            length = _SIZES[kind]
        else:
            raise ValueError(f"it is not a SentencePiece model: a field of wire type {kind}")
        if length > size - offset:
            raise ValueError(f"it is truncated: a field has {length} bytes, {size - offset} remain")
        yield number, content[offset : offset + length]
        offset += length


def _varint(content: Any, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(content):
            raise ValueError("it is truncated: a number is not complete")
        byte = content[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("it is not a SentencePiece model: a number has more than 64 bits")
