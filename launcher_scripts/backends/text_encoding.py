"""Prompts and words to token ids.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from text_tensors import BadRequestError
from tokenizer import SpecialIds, Tokenizer

# CSV ends its rows at these, which no word should; no text that was UTF-8 has the others.
HIDDEN = {ord("\n"): 0xD800, ord("\r"): 0xD801}
SHOWN = {hidden: character for character, hidden in HIDDEN.items()}


def language_ids(
    names: Sequence[str] | None, tensor: str, special: SpecialIds, tokenizer: Tokenizer
) -> list[int] | None:
    """The ids of the rows' languages; None where the request names none."""
    if names is None:
        return None
    if special.language is None:
        raise BadRequestError(f"{tensor}: this model knows no languages")
    ids = [special.language_id(name, tokenizer) for name in names]
    unknown = sorted(
        {name for name, language_id in zip(names, ids, strict=True) if language_id is None}
    )
    if unknown:
        raise BadRequestError(f"{tensor} must be a language of the tokenizer; got {unknown}")
    return [language_id for language_id in ids if language_id is not None]


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[Any]:
    """UINT32 [rows, longest]; at least one column, since Triton refuses empty axes."""
    width = max(1, *(len(row) for row in rows))
    padded = np.full((len(rows), width), pad_id, dtype=np.uint32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def to_word_lists(
    lines: Sequence[str], tokenizer: Tokenizer, more: Sequence[int] = ()
) -> NDArray[Any]:
    """The table of the words of each row's line, which are comma separated; `more` as below.

    CSV: a word in double quotes may hold commas.
    """
    return word_table([split_words(line) for line in lines], tokenizer, more)


def word_table(
    rows: Sequence[Sequence[str]], tokenizer: Tokenizer, more: Sequence[int] = ()
) -> NDArray[Any]:
    """INT32 [rows, 2, L]: the ids of a row's words, zero-padded; their end offsets, -1-padded.

    Words keep their leading blanks, which matter to byte-pair tokenizers; empty words are left out.

    more: token ids, each a word of every row
    """
    words = [[ids for word in row if word and (ids := word_ids(word, tokenizer))] for row in rows]
    for row in words:
        row.extend([token_id] for token_id in more)
    width = max(1, *(sum(map(len, row)) for row in words))
    table = np.zeros((len(rows), 2, width), dtype=np.int32)
    table[:, 1] = -1
    for target, row in zip(table, words, strict=True):
        ids = [token_id for word in row for token_id in word]
        target[0, : len(ids)] = ids
        target[1, : len(row)] = np.cumsum([len(word) for word in row])
    return table


def word_ids(word: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of `word` as it is met in the middle of a text.

    SentencePiece begins any text with a blank. Where no piece holds that and what follows, it is
    a piece of its own, which a full stop or a line break did not ask for: "." would only match
    " .". It stays before what stands apart in a text, too.
    """
    ids = tokenizer.encode(word)
    following = ids[1:]
    if not following or stands_apart(word):
        return ids
    blank = tokenizer.decode([*following, *ids]) != tokenizer.decode([*following, *following])
    return following if blank and tokenizer.decode(following) == tokenizer.decode(ids) else ids


def stands_apart(word: str) -> bool:
    """Return whether a blank comes before it: to a word of a script that has blanks, or as
    given."""
    first = word[0]
    return first == " " or (first.isalnum() and not "\u2e80" <= first <= "\u9fff")


def split_words(line: str) -> list[str]:
    """The words of a CSV line; line breaks are characters of words like any other."""
    try:
        rows = list(csv.reader([line.translate(HIDDEN)]))
    except csv.Error as error:
        raise BadRequestError(f"the words are not comma separated text: {error}") from error
    return [word.translate(SHOWN) for words in rows for word in words if word]
