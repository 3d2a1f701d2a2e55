"""One stream of responses that serves many requests of one client.

A response costs a server and its client some tens of microseconds, whatever it holds. A client with
many requests at once opens a shared stream: a request of a decoupled model whose id is `open_id()`.
Requests whose ids are `row_id()` then get their tokens in that stream, one response for all that
have any. Their own streams have one empty response at the end, or the error, and cancelling them
frees their rows. A stream that has had no requests for a while is ended by the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_OPEN = "launcher-shared-stream"
_ROW = "launcher-shared-row"
# What the error says of a request whose stream has ended; it may be sent again without one.
NO_STREAM = "the shared stream has ended"


class SharedId(NamedTuple):
    """What a request's id says. number: of the row; None: the request opens the stream."""

    stream: str
    number: int | None


class RowNews(NamedTuple):
    """What is new of one row: its tokens, and whether those were the last.

    num_cached_tokens: prompt tokens that were in the prefix cache, with the first tokens
    """

    number: int
    ids: Sequence[int]
    finished: bool
    num_cached_tokens: int = 0


News = tuple[int, Sequence[int], bool, int]  # a RowNews, or a tuple like it, which is made faster


def open_id(stream: str) -> str:
    """The id of a request that opens a stream. stream: a word that nobody guesses"""
    return f"{_OPEN} {stream}"


def row_id(stream: str, number: int, name: str) -> str:
    """The id of a request that takes its tokens from the stream. name: its id for people"""
    return f"{_ROW} {stream} {number} {name}"


def shared_id(request_id: str) -> SharedId | None:
    """What `open_id` or `row_id` wrote; None for any other id."""
    words = request_id.split(" ", 3)
    if words[0] == _OPEN and len(words) == 2:
        return SharedId(words[1], None)
    if words[0] == _ROW and len(words) == 4 and words[2].isdecimal():
        return SharedId(words[1], int(words[2]))
    return None


def pack(rows: Iterable[News]) -> NDArray[np.int32]:
    """The tensor `news` of a shared stream, [1, 1, n]: of every row number, end, count, ids.

    Cached tokens are in front, as the only id of -1 - number, which older gateways skip.
    """
    numbers: list[int] = []
    for number, ids, finished, cached in rows:
        if cached:
            numbers += (-1 - number, 0, 1, cached)
        numbers += (number, finished, len(ids))
        numbers += ids
    return np.fromiter(numbers, np.int32, len(numbers)).reshape(1, 1, -1)


def unpack(packed: NDArray[np.int32]) -> Iterator[RowNews]:
    """The rows of `pack`."""
    numbers = packed.reshape(-1).tolist()
    place = 0
    cached: dict[int, int] = {}
    while place < len(numbers):
        number, finished, count = numbers[place : place + 3]
        place += 3 + count
        ids = tuple(numbers[place - count : place])
        if number < 0:
            cached[-1 - number] = ids[0]
            continue
        yield RowNews(number, ids, bool(finished), cached.pop(number, 0))
