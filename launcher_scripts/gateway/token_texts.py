"""What each token of a row adds to its text, as the tokens come.

Put together the parts are the decoded row without its prompt, and none ends within a character: a
token that does adds nothing, the one that completes the character all of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Protocol

from launcher_scripts.common.text_deltas import GrowingText
from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.gateway import harmony
from launcher_scripts.gateway.reasoning import MARKS

# How many tokens of the prompt the first generated ones are decoded with.
_CONTEXT = 32


class TokenTexts(Protocol):
    """The text of one row."""

    def take(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        """What each of the next tokens adds; with `finished` the last one all that was held back.

        Without ids at most one part, which is what was held back.
        """
        ...


def token_texts(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> TokenTexts:
    """Of a row whose text goes on after its prompt's.

    Where a text is its tokens' bytes, the marks around what a model thinks are text, even if they
    are special tokens; and so are those of the format harmony.
    """
    context = prompt_ids[-_CONTEXT:]
    bytes_of = _bytes_of(tokenizer)
    return _Decoded(tokenizer.decode, context) if bytes_of is None else _Joined(bytes_of, context)


@cache
def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes] | None:
    """What a tokenizer's tokens stand for, remembered; None: its texts are not their bytes."""
    joined = tokenizer.joined_bytes
    if joined is None:
        return None
    texts = list(chain(*MARKS))
    if tokenizer.special_id(harmony.CHANNEL) is not None:
        texts += harmony.MARKS
    marks = {tokenizer.special_id(mark): mark.encode() for mark in texts}
    return cache(lambda token: marks[token] if token in marks else joined(token))


class _Joined:
    """Of a vocabulary whose text is its tokens' bytes, one after the other."""

    def __init__(self, bytes_of: Callable[[int], bytes], context: Sequence[int]) -> None:
        self._bytes = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.take(context, finished=False)

    def take(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        decode = self._decoder.decode
        parts = [decode(self._bytes(each)) for each in ids]
        if finished:
            rest = decode(b"", final=True)
            parts[-1:] = [parts[-1] + rest if parts else rest]
        return parts


class _Decoded:
    """Of any other tokenizer, which is asked to decode the tokens together."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._text = GrowingText(decode)
        self._text.take(0, context, prompt=len(context), finished=False)
        self._prompt = self._count = len(context)

    def take(self, ids: Sequence[int], *, finished: bool) -> list[str]:
        last = len(ids) - 1
        parts = [self._next([each], finished and place == last) for place, each in enumerate(ids)]
        return parts if ids else [self._next([], finished)]

    def _next(self, ids: Sequence[int], finished: bool) -> str:
        self._text.take(self._count, ids, prompt=self._prompt, finished=finished)
        self._count += len(ids)
        return self._text.news()
