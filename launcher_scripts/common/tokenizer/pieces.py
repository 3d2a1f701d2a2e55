"""Tokenizers of SentencePiece models; the library is imported when a folder needs it.

ByT5's tokenizer, which has no vocabulary: a byte of UTF-8 is a token.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import (
    FAIRSEQ_TOKENS,
    Tokenizer,
    added_tokens,
    languages_of,
    library_call,
    template_of_translator,
    tokenizer_class,
    tokenizer_config,
)

BLANK = "\u2581"


class PieceTokenizer(Tokenizer):
    """One whose ids each stand for bytes of a text."""

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The bytes that each id stands for; none for control tokens."""


class SentencePieceTokenizer(PieceTokenizer):
    """A SentencePiece model from tokenizer.model; its own ids for start, end and padding.

    Ids past the pieces (a padded vocabulary) have no text.
    """

    def __init__(self, folder: Path) -> None:
        self._processor = _sentencepiece(folder / "tokenizer.model")
        self.vocab_size = self._processor.vocab_size()
        self.start_id = _or_none(self._processor.bos_id())
        self.end_id = _or_none(self._processor.eos_id())
        self.pad_id = _or_none(self._processor.pad_id())

    def pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(self.vocab_size)]

    def _piece(self, token: int) -> bytes:
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return b""
        return piece_bytes(str(self._processor.id_to_piece(token)))

    @library_call("this text")
    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    @library_call("these ids")
    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if i < self.vocab_size]))

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        return self._piece(token_id) or str(self._processor.id_to_piece(token_id)).encode()

    def token_id(self, token: str) -> int | None:
        """The id of one piece; None where the vocabulary lacks it."""
        token_id = int(self._processor.piece_to_id(token))
        return token_id if self._processor.id_to_piece(token_id) == token else None

    def surround(self) -> tuple[list[int], list[int]]:
        """Pieces say nothing of it."""
        return [], []

    def special_id(self, token: str) -> int | None:
        token_id = self.token_id(token)
        return token_id if token_id is not None and self._processor.is_control(token_id) else None


class NumberedPieceTokenizer(PieceTokenizer):
    """A SentencePiece model whose pieces have the ids of vocab.json, where some may be missing.

    The vocabulary may have pieces that the model lacks. Special tokens and those that
    tokenizer_config.json adds are found in a text before it is cut into pieces.
    """

    translator: str | None = None

    def __init__(self, model: Path, tokens: Sequence[str], languages: Sequence[str] = ()) -> None:
        """tokens: the special ones in the vocabulary; languages: their names, after it"""
        self._processor, self._config = _sentencepiece(model), tokenizer_config(model.parent)
        text = model.with_name("vocab.json").read_text(encoding="utf-8")
        self._numbers: dict[str, int] = json.loads(text)
        named = {token: self._numbers[token] for token in tokens}
        after = list(enumerate(languages, start=len(self._numbers)))
        named |= {f"__{name}__": number for number, name in after}
        named |= (added := added_tokens(self._config))
        self._special = {**named, **{name: number for number, name in after}}
        self._parts = re.compile(f"({'|'.join(map(re.escape, sorted(named, key=len)[::-1]))})")
        self._pieces = {number: piece for piece, number in self._numbers.items()}
        for name, number in self._special.items():
            if self._pieces.get(number) == name:
                del self._pieces[number]
        decoder = self._config.get("added_tokens_decoder") or {}
        texts = {name for name in added if not decoder[str(added[name])].get("special")}
        self._pieces |= {added[name]: name for name in texts}
        self.vocab_size = 1 + max(*self._numbers.values(), *self._special.values())
        self.start_id, self.pad_id, self.end_id = map(self._special.get, FAIRSEQ_TOKENS[:3])

    def pieces(self) -> list[bytes]:
        return [piece_bytes(self._pieces.get(token, "")) for token in range(self.vocab_size)]

    @library_call("this text")
    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in filter(None, self._parts.split(text)):
            ids += [self._special[part]] if part in self._special else self._encode_part(part)
        return ids

    def _encode_part(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        pieces = self._processor.encode(text, out_type=str)
        return [self._numbers.get(piece, self._special["<unk>"]) for piece in pieces]

    @library_call("these ids")
    def decode(self, ids: Sequence[int]) -> str:
        text = "".join(self._pieces.get(int(i), "") for i in ids)
        return text.replace(BLANK, " ").strip()

    def token_bytes(self, token_id: int) -> bytes:
        names = (name for name, number in self._special.items() if number == token_id)
        return piece_bytes(self._pieces.get(token_id) or next(names, ""))

    def surround(self) -> tuple[list[int], list[int]]:
        """The end token behind a text, and a translator's language."""
        if self.translator is not None:
            return template_of_translator(self, self._config, self.translator)
        return [], [] if self.end_id is None else [self.end_id]

    def is_added(self, token_id: int) -> bool:
        return token_id in self._special.values()

    def special_id(self, token: str) -> int | None:
        return self._special.get(token)


class M2M100Tokenizer(NumberedPieceTokenizer):
    """M2M-100's. After the vocabulary come the languages: `__fr__`, or `fr`."""

    translator = "M2M100"

    def __init__(self, folder: Path) -> None:
        languages = languages_of(tokenizer_config(folder).get("language_codes", "m2m100"))
        super().__init__(folder / "sentencepiece.bpe.model", FAIRSEQ_TOKENS, languages)


class MarianTokenizer(NumberedPieceTokenizer):
    """Marian's. A text may begin with the language to translate it into, as `>>fra<<`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "source.spm", FAIRSEQ_TOKENS[1:])

    def _encode_part(self, text: str) -> list[int]:
        language = re.match(">>.*?<<", text, re.DOTALL)
        if language is None:
            return super()._encode_part(text)
        number = self._numbers.get(language[0], self._special["<unk>"])
        return [number, *super()._encode_part(text[language.end() :])]


def piece_bytes(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece: <0xNN> is a byte, U+2581 a blank."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(BLANK, " ").encode()


def _sentencepiece(model: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(model))


def _or_none(token_id: int) -> int | None:
    """SentencePiece says -1 for a token it does not have."""
    return None if token_id < 0 else token_id


BYT5 = "ByT5"
_SPECIAL = ("<pad>", "</s>", "<unk>")
_FIRST_SENTINEL = len(_SPECIAL) + 256
_SENTINELS = 125


def is_byt5(*configs: Mapping[str, Any]) -> bool:
    """Return whether tokenizer_config.json or config.json names the tokenizer; nothing else tells
    it."""
    return any(tokenizer_class(config).startswith(BYT5) for config in configs)


class ByT5Tokenizer(PieceTokenizer):
    """Special tokens, the bytes, and the sentinels `<extra_id_0>` and following."""

    vocab_size = _FIRST_SENTINEL + _SENTINELS
    start_id = None
    pad_id, end_id = 0, 1

    def __init__(self, _folder: Path) -> None:
        names = (*_SPECIAL, *(f"<extra_id_{number}>" for number in range(_SENTINELS)))
        ids = (*range(len(_SPECIAL)), *range(_FIRST_SENTINEL, self.vocab_size))
        self._special = dict(zip(names, ids, strict=True))
        self._names = {number: name for name, number in self._special.items()}
        self._parts = re.compile(f"({'|'.join(map(re.escape, names))})")

    def joined_bytes(self, token_id: int) -> bytes:
        byte = int(token_id) - len(_SPECIAL)
        return bytes([byte]) if 0 <= byte < 256 else b""

    def pieces(self) -> list[bytes]:
        return [self.joined_bytes(token) for token in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._parts.split(text):
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids += [byte + len(_SPECIAL) for byte in part.encode()]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.joined_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.joined_bytes(token_id) or self._names.get(token_id, "").encode()

    def surround(self) -> tuple[list[int], list[int]]:
        return [], [self.end_id]

    def special_id(self, token: str) -> int | None:
        return self._special.get(token)
