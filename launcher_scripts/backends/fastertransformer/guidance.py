"""Guides for rows whose text has to follow a grammar, made by llguidance.

A request's guided_grammar is a JSON object with one of the keys of _GRAMMARS. With `reasoning`
beside it the text that follows the grammar comes behind what the model thinks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import RequestError, problem
from launcher_scripts.common.tokenizer import (
    PieceTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)
from launcher_scripts.engine.core.guide import Guide
from launcher_scripts.models.family import ModelConfig


def _json_schema(value: Any) -> str:
    return str(_library().LLMatcher.grammar_from_json_schema(json.dumps(value)))


def _json_object(value: Any) -> str:
    if value is not True:
        raise ValueError("json_object is true or left out")
    return _json_schema({"type": "object"})


def _regex(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("regex is a text")
    return str(_library().LLMatcher.grammar_from_regex(value))


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError("choice is a list of texts")
    return str(_library().grammar_from("choice", json.dumps(value)))


def _lark(value: Any) -> str:
    """A context-free grammar in Lark's syntax or in GBNF's (EBNF with ::=)."""
    if not isinstance(value, str):
        raise ValueError("grammar is a text")
    try:
        return str(_library().grammar_from("grammar", value))
    except Exception as error:  # the library raises what its parts do
        raise ValueError(f"the grammar cannot be read: {error}") from error


def _any_of(value: Any) -> str:
    """Alternatives, each with its own definitions."""
    if not isinstance(value, list) or not value or not all(map(_is_grammar, value)):
        raise ValueError("any_of is a list of objects with one key each")
    names, grammars = [], []
    for index, ((key, alternative),) in enumerate(each.items() for each in value):
        first, *others = _members(_GRAMMARS[key](alternative))
        names.append(f"@alternative{index}")
        grammars += [{**first, "name": names[-1][1:]}, *others]
    return json.dumps({"grammars": [{"lark_grammar": f"start: {' | '.join(names)}"}, *grammars]})


def _is_grammar(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and not value.keys() - _GRAMMARS.keys()


def _members(grammar: str) -> list[dict[str, Any]]:
    """Return the entries of a grammar in llguidance's form, which may be Lark's text."""
    is_json = grammar.startswith("{")
    return list(json.loads(grammar)["grammars"]) if is_json else [{"lark_grammar": grammar}]


# key of guided_grammar -> llguidance's grammar from its value; ValueError for a wrong one
_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "any_of": _any_of,
}


# What may be a special token within a mark.
_TOKENS = re.compile(r"(<\|[^|<>]*\|>)")


class Guidance:
    """What turns guided_grammar into a guide, for the model whose checkpoint is in `folder`."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._config = config

    def guide(self, text: str) -> Guide:
        """A guide for one row. Raises RequestError."""
        grammar = self._grammar(text)
        matcher = _library().LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(
                problem(f"guided_grammar cannot be followed: {matcher.get_error()}", got=text[:200])
            )
        return _MatcherGuide(matcher)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return load_tokenizer(self._folder)
        except TokenizerError as error:
            raise RequestError(f"guided_grammar needs the model's tokenizer: {error}") from error

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's own tokenizer; it is made once, which takes a while."""
        tokenizer, end = self._tokenizer, self._config.end_id
        if end >= self._config.vocab_size:
            end = -1 if tokenizer.end_id is None else tokenizer.end_id
        if not 0 <= end < self._config.vocab_size:
            raise RequestError(
                problem("guided_grammar needs a model with an end token", got=self._config.end_id)
            )
        ids = max(self._config.vocab_size, tokenizer.vocab_size)
        return _library().LLTokenizer(_vocabulary(tokenizer, end), ids, end)

    def _grammar(self, text: str) -> str:
        """The grammar in llguidance's own form."""
        try:
            given = json.loads(text)
            marks = given.pop("reasoning", None) if isinstance(given, dict) else None
            if not _is_grammar(given):
                raise ValueError("it is a JSON object with one key, and maybe reasoning")
            ((key, value),) = given.items()
            grammar = _GRAMMARS[key](value)
            return grammar if marks is None else self._behind_reasoning(marks, grammar)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                problem(
                    f"guided_grammar is wrong: {error}", got=text[:200], choices=list(_GRAMMARS)
                )
            ) from error

    def _behind_reasoning(self, marks: Any, grammar: str) -> str:
        """A grammar's text behind what is thought, whose first mark may have come already."""
        if not isinstance(marks, dict) or not {"end"} <= marks.keys() <= {"begin", "end"}:
            raise ValueError("reasoning is an object with the mark `end`, and maybe `begin`")
        if not all(isinstance(mark, str) and mark for mark in marks.values()):
            raise ValueError("the marks of reasoning are texts")
        begin, end = marks.get("begin"), self._symbols(marks["end"])
        opened = "thought" if begin is None else f"({' '.join(self._symbols(begin))} thought)?"
        plain = len(end) == 1 and end[0].startswith('"')
        within = f"[suffix={end[0]}]: TEXT" if plain else f": TEXT {' '.join(end)}"
        rules = [
            f"start: {opened} @answer",
            "thought: within BLANKS",
            f"within{within}",
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /\s*/",
        ]
        first, *others = _members(grammar)
        grammars = [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *others]
        return json.dumps({"grammars": grammars})

    def _symbols(self, mark: str) -> list[str]:
        """A mark in llguidance's grammars: its texts, and the ids of special tokens, which have no
        text."""
        special_id = self._tokenizer.special_id
        parts = [mark] if special_id(mark) is not None else filter(None, _TOKENS.split(mark))
        found = [(part, special_id(part)) for part in parts]
        if all(special is None for _, special in found):
            return [json.dumps(mark, ensure_ascii=False)]
        return [
            json.dumps(part, ensure_ascii=False) if special is None else f"<[{special}]>"
            for part, special in found
        ]


class _MatcherGuide:
    """A guide that is llguidance's matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token)) and not self._matcher.is_error()


def _vocabulary(tokenizer: Tokenizer, end: int) -> Any:
    """What llguidance makes its tokenizer of."""
    if not isinstance(tokenizer, PieceTokenizer):
        return tokenizer.to_json()  # type: ignore[attr-defined]
    return _library().TokenizerWrapper(_Pieces(tokenizer.pieces(), end))


class _Pieces:
    """A SentencePiece model as llguidance wants to see it.

    What it is asked to encode is the middle of a text: the longest pieces that fit, because the
    model itself would put a blank in front.
    """

    bos_token_id = None

    def __init__(self, pieces: list[bytes], end: int) -> None:
        self.tokens = pieces
        self.eos_token_id = end
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        ids = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            if size:
                ids.append(self._ids[text[:size]])
            text = text[size or 1 :]
        return ids


def _library() -> Any:
    """llguidance, which is imported when a request needs it."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            problem(
                "guided_grammar needs the Python package llguidance where the model is served",
                got=str(error),
                change="requirements/job.txt",
            )
        ) from error
    return llguidance
