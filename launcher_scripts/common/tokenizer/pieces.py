"""Tokenizers of SentencePiece models; the library is imported when a folder needs it."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import (
    FAIRSEQ_TOKENS,
    MASK,
    Tokenizer,
    said_around,
    tokenizer_class,
    tokenizer_config,
)
from .translators import around_of_translator, languages_of, translator_of

PEGASUS = "Pegasus"
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
        self._said = tokenizer_config(folder)

    def pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(self.vocab_size)]

    def _piece(self, token: int) -> bytes:
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return b""
        return piece_bytes(str(self._processor.id_to_piece(token)))

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if i < self.vocab_size]))

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        return self._piece(token_id) or str(self._processor.id_to_piece(token_id)).encode()

    def token_id(self, token: str) -> int | None:
        """The id of one piece; None where the vocabulary lacks it."""
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    def around(self) -> tuple[list[int], list[int]]:
        """Pieces say nothing of it, but tokenizer_config.json may."""
        return said_around(self._said, self.start_id, self.end_id)

    def special_id(self, token: str) -> int | None:
        found = self.token_id(token)
        return found if found is not None and self._processor.is_control(found) else None


class NumberedPieceTokenizer(PieceTokenizer):
    """A SentencePiece model whose pieces have other ids. What looks like a special token is text.

    said: tokenizer_config.json
    numbers: piece -> id;  special: special token -> id, with a language's name without marks, too
    translator: a key of TRANSLATORS
    """

    translator: str | None = None

    def __init__(
        self,
        processor: Any,
        said: dict[str, Any],
        numbers: Mapping[str, int],
        special: Mapping[str, int],
    ) -> None:
        self._processor, self._said = processor, said
        self._numbers, self._special = numbers, special
        self._pieces = {number: piece for piece, number in numbers.items()}
        for name, number in special.items():
            if self._pieces.get(number) == name:
                del self._pieces[number]
        self.vocab_size = 1 + max(*numbers.values(), *special.values())
        self.start_id, self.pad_id, self.end_id = map(special.get, FAIRSEQ_TOKENS[:3])

    def pieces(self) -> list[bytes]:
        return [piece_bytes(self._pieces.get(token, "")) for token in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        pieces = self._processor.encode(text, out_type=str)
        return [self._numbers.get(piece, self._special["<unk>"]) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces[int(i)] for i in ids if int(i) in self._pieces]
        return str(self._processor.decode(pieces))

    def token_bytes(self, token_id: int) -> bytes:
        names = (name for name, number in self._special.items() if number == token_id)
        return piece_bytes(self._pieces.get(token_id) or next(names, ""))

    def around(self) -> tuple[list[int], list[int]]:
        """The end token behind a text, and a translator's language."""
        if self.translator is not None:
            return around_of_translator(self, self._said, self.translator)
        return [], [] if self.end_id is None else [self.end_id]

    def special_id(self, token: str) -> int | None:
        return self._special.get(token)


class MBartTokenizer(NumberedPieceTokenizer):
    """mBART's, numbered as fairseq does: first the special tokens, then the pieces from the fourth
    on, one later than the model has them, the languages and the mask.

    tokenizer_config.json says by `tokenizer_class` whether it is an mBART-50, which has more
    languages, and by `src_lang` which one is the source's.
    """

    def __init__(self, folder: Path) -> None:
        processor = _sentencepiece(folder / "sentencepiece.bpe.model")
        said, pieces = tokenizer_config(folder), _pieces_of(processor)
        self.translator = translator_of(said) or "MBart"
        after = (*languages_of(self.translator), MASK)
        special = dict(zip(FAIRSEQ_TOKENS, range(len(FAIRSEQ_TOKENS)), strict=True))
        special |= {token: len(pieces) + 1 + place for place, token in enumerate(after)}
        numbers = {piece: place + 1 for place, piece in enumerate(pieces) if place > 2}
        super().__init__(processor, said, numbers, special)


class _VocabularyTokenizer(NumberedPieceTokenizer):
    """One that vocab.json numbers, where there may be pieces that the model does not have."""

    def __init__(
        self,
        model: Path,
        said: dict[str, Any],
        tokens: Sequence[str],
        languages: Sequence[str] = (),
    ) -> None:
        text = model.with_name("vocab.json").read_text(encoding="utf-8")
        numbers: dict[str, int] = json.loads(text)
        special = {token: numbers[token] for token in tokens}
        for marks in ("__", ""):
            after = enumerate(languages, start=len(numbers))
            special |= {f"{marks}{name}{marks}": number for number, name in after}
        super().__init__(_sentencepiece(model), said, numbers, special)

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace(BLANK, " ").strip()


class M2M100Tokenizer(_VocabularyTokenizer):
    """M2M-100's. Behind the vocabulary are the languages: `__fr__`, or `fr`."""

    translator = "M2M100"

    def __init__(self, folder: Path) -> None:
        said = tokenizer_config(folder)
        languages = languages_of(said.get("language_codes", "m2m100"))
        super().__init__(folder / "sentencepiece.bpe.model", said, FAIRSEQ_TOKENS, languages)


class MarianTokenizer(_VocabularyTokenizer):
    """Marian's. A text may begin with the language to translate it into, as `>>fra<<`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "source.spm", tokenizer_config(folder), FAIRSEQ_TOKENS[1:])

    def encode(self, text: str) -> list[int]:
        language = re.match(">>.*?<<", text, re.DOTALL)
        if language is None:
            return super().encode(text)
        number = self._numbers.get(language[0], self._special["<unk>"])
        return [number, *super().encode(text[language.end() :])]


class PegasusTokenizer(NumberedPieceTokenizer):
    """Pegasus', whose pieces are numbered behind tokens that only its training knew."""

    def __init__(self, folder: Path) -> None:
        processor, said = _sentencepiece(folder / "tokenizer.model"), tokenizer_config(folder)
        offset = said.get("offset", 103)
        of_training = ("<mask_1>", "<mask_2>", *(f"<unk_{place}>" for place in range(2, offset)))
        tokens = ("<pad>", "</s>", *of_training, "<unk>")
        pieces = enumerate(_pieces_of(processor))
        numbers = {piece: place + offset for place, piece in pieces if place > 2}
        special = {token: place for place, token in enumerate(tokens)}
        super().__init__(processor, said, numbers, special)


def of_tokenizer_model(folder: Path) -> Tokenizer:
    pegasus = tokenizer_class(tokenizer_config(folder)).startswith(PEGASUS)
    return (PegasusTokenizer if pegasus else SentencePieceTokenizer)(folder)


def piece_bytes(piece: str) -> bytes:
    """What a piece of SentencePiece stands for: <0xNN> is a byte, U+2581 a blank."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(BLANK, " ").encode()


def _sentencepiece(model: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(model))


def _pieces_of(processor: Any) -> list[str]:
    return [str(processor.id_to_piece(place)) for place in range(processor.vocab_size())]


def _or_none(token_id: int) -> int | None:
    """SentencePiece says -1 for a token it does not have."""
    return None if token_id < 0 else token_id
