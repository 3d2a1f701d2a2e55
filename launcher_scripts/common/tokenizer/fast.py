"""Tokenizers of the library `tokenizers`, which is imported when a folder needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .base import (
    Tokenizer,
    library_call,
    named_special_tokens,
    template_of_translator,
    tokenizer_config,
    translator_of,
)
from .pieces import piece_bytes

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
    if byte_level and all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
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


_BYTES = _byte_characters()


def _added_id(tokenizer: Any, token: str) -> int | None:
    """The id of a special token of the library's tokenizer."""
    token_id: int | None = tokenizer.token_to_id(token)
    added = tokenizer.get_added_tokens_decoder()
    return token_id if token_id in added and added[token_id].special else None
