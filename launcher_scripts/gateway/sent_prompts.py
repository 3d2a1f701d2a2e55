"""Which prompts a server was given lately, and so what its prefix cache may hold."""

from __future__ import annotations

from collections.abc import Sequence

from launcher_scripts.common.digests import block_digests

BLOCK_TOKENS = 64
MOST_BLOCKS = 1 << 14  # a million tokens; the cache of a server holds no more of most models


def prompt_digests(
    ids: Sequence[int], model: str, salt: int, adapter: int | None = None
) -> tuple[bytes, ...]:
    """Of a prompt's blocks; texts of other models, salts and LoRA adapters have others."""
    return tuple(block_digests(ids, BLOCK_TOKENS, f"{model} {salt} {adapter}".encode()))


class SentPrompts:
    """The newest blocks of prompts that one server was given."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, None] = {}  # the oldest first

    def tokens(self, digests: Sequence[bytes]) -> int:
        """How many tokens at the beginning of a prompt it was given before."""
        count = len(digests)
        while count and digests[count - 1] not in self._blocks:
            count -= 1
        return BLOCK_TOKENS * count

    def add(self, digests: Sequence[bytes]) -> None:
        """The server gets a prompt with such blocks."""
        for digest in digests:
            self._blocks.pop(digest, None)
            self._blocks[digest] = None
        while len(self._blocks) > MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
