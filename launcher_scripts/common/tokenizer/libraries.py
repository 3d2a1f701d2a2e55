"""Tokenizers of the libraries `sentencepiece` and `tokenizers`, which are imported when a folder
needs them.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .base import (
    FAIRSEQ_TOKENS,
    Tokenizer,
    added_tokens,
    languages_of,
    library_call,
    named_special_tokens,
    template_of_translator,
    tokenizer_class,
    tokenizer_config,
    translator_of,
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


END_OF_TEXT = "<|endoftext|>"
# Usual names of special tokens, for a tokenizer.json that comes without the files that say so.
_DEFAULT_START = ("<s>", "<bos>", "<|begin_of_text|>", END_OF_TEXT, "[CLS]")
_DEFAULT_END = ("</s>", "<eos>", "<|end_of_text|>", END_OF_TEXT, "[SEP]")
_DEFAULT_PAD = ("<pad>", "[PAD]", "<|pad|>")


class _FastTokenizer(Tokenizer):
    """One of the `tokenizers` library's."""

    _tokenizer: Any
    _byte_level = True

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        return str(self._tokenizer.to_str())

    @library_call("this text")
    def encode(self, text: str) -> list[int]:
        # A batch of one: unlike `encode` it leaves Python's other threads running meanwhile.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return list(encoding.ids)

    @library_call("these ids")
    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return _token_bytes(self._tokenizer, token_id, byte_level=self._byte_level)

    def is_added(self, token_id: int) -> bool:
        return token_id in self._tokenizer.get_added_tokens_decoder()

    def special_id(self, token: str) -> int | None:
        return _added_id(self._tokenizer, token)


class GPT2Tokenizer(_FastTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt (NeMo's GPT2BPETokenizer).

    `<|endoftext|>` both starts and ends a sequence; a vocabulary without it gets it as last id.
    There is no padding token.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as BytePairTokenizer
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        bpe = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        self._tokenizer = BytePairTokenizer(bpe)
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = ByteLevelDecoder()
        self.joined_bytes = partial(_joined_bytes, self._tokenizer)
        self._tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.start_id = self.end_id = self._tokenizer.token_to_id(END_OF_TEXT)
        self.pad_id = None

    def surround(self) -> tuple[list[int], list[int]]:
        """Nothing: NeMo's models saw none."""
        return [], []


class HuggingFaceTokenizer(_FastTokenizer):
    """A fast tokenizer from tokenizer.json.

    special_tokens_map.json or tokenizer_config.json beside it say which tokens start, end and
    pad; without them the usual names are looked for.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        state = None if decoder is None else decoder.__getstate__()
        self._byte_level = state is not None and b"ByteLevel" in state
        joins = state is not None and json.loads(state)["type"] == "ByteLevel"
        self.joined_bytes = partial(_joined_bytes, self._tokenizer) if joins else None
        self.vocab_size = self._tokenizer.get_vocab_size()
        named = named_special_tokens(folder)
        self.start_id = self._special_id(named, "bos_token", _DEFAULT_START)
        self.end_id = self._special_id(named, "eos_token", _DEFAULT_END)
        self.pad_id = self._special_id(named, "pad_token", _DEFAULT_PAD)
        self._config = tokenizer_config(folder)

    def _special_id(
        self, named: dict[str, str] | None, key: str, defaults: tuple[str, ...]
    ) -> int | None:
        if named is not None:
            token = named.get(key)
            return None if token is None else self._tokenizer.token_to_id(token)
        ids = (self._tokenizer.token_to_id(token) for token in defaults)
        return next((token_id for token_id in ids if token_id is not None), None)

    def surround(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer's post-processor adds; transformers gives a
        translator its own."""
        translator = translator_of(self._config)
        if translator is not None:
            return template_of_translator(self, self._config, translator)
        encoded = self._tokenizer.encode("a")
        indices = [index for index, added in enumerate(encoded.special_tokens_mask) if not added]
        first, last = (indices[0], indices[-1] + 1) if indices else (0, 0)
        return encoded.ids[:first], encoded.ids[last:]


def _token_bytes(tokenizer: Any, token_id: int, *, byte_level: bool) -> bytes:
    """Tokenizer.token_bytes of the library tokenizers' tokenizers."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if token_id in tokenizer.get_added_tokens_decoder():
        return str(token).encode()
    if byte_level and all(character in BYTES_OF_CHARACTERS for character in token):
        return bytes(BYTES_OF_CHARACTERS[character] for character in token)
    return piece_bytes(token)


@library_call("this id")
def _joined_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Tokenizer.joined_bytes of a byte-level vocabulary of the library tokenizers."""
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if added is not None:
        return b"" if added.special else str(tokenizer.decode([token_id])).encode()
    return _token_bytes(tokenizer, token_id, byte_level=True)


def _byte_characters() -> dict[str, int]:
    """The character that GPT-2's vocabularies have for every byte -> the byte.

    Printable ones of Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in printable} | moved


BYTES_OF_CHARACTERS = _byte_characters()


def _added_id(tokenizer: Any, token: str) -> int | None:
    """The id of a special token of the library's tokenizer."""
    token_id: int | None = tokenizer.token_to_id(token)
    added = tokenizer.get_added_tokens_decoder()
    return token_id if token_id in added and added[token_id].special else None
