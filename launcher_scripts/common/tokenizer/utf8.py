"""ByT5's tokenizer, which has no vocabulary: a byte of UTF-8 is a token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import tokenizer_class
from .pieces import PieceTokenizer

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
