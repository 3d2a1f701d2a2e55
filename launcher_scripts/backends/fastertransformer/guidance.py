"""Guides for rows whose text has to follow a grammar, made by llguidance.

A request's guided_grammar is a JSON object with one of the keys of _GRAMMARS. With `reasoning`
beside it the text that follows the grammar comes behind what the model thinks.

A grammar is a stranger's program. llguidance limits most of its work, but some grammars of a few
kilobytes take minutes, and some overflow its stack. So each is compiled in a process of limited
time and memory first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from launcher_scripts.common.errors import BusyError, RequestError, problem
from launcher_scripts.common.json_schema import supported_schema
from launcher_scripts.common.limited_process import (
    LimitedProcesses,
    WorkLimitError,
    WorkLimits,
    WorkTimeoutError,
)
from launcher_scripts.common.tokenizer import (
    PieceTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)
from launcher_scripts.contract.tensors import MAX_GRAMMAR_BYTES

# The processes that compile grammars import this module, and nothing of torch.
if TYPE_CHECKING:
    from launcher_scripts.engine.core.row import Guide
    from launcher_scripts.models.family import ModelConfig

# Between two tokens of JSON: a space, or a new line with its indentation. Without a limit a model
# may fill its answer with white space.
_WHITESPACE = r"[ ]|\n[ \t]{0,32}"


def _json_schema(value: Any) -> str:
    options = {"whitespace_pattern": _WHITESPACE}
    schema, _ = supported_schema(value)
    matcher = _library().LLMatcher
    return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


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
    for index, ((key, alternative),) in enumerate(item.items() for item in value):
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


# Of one grammar: to compile it and to compute its first mask.
LIMITS = WorkLimits(cpu_seconds=2.0, seconds=60.0, memory_mib=128, niceness=10)
NUM_COMPILERS = 2
CLIENT_COMPILERS = NUM_COMPILERS // 2  # of one client at a time
# Grammars that are kept, each of at most LIMITS.memory_mib; and refusals, by the texts' digests.
MAX_CACHED = 8
MAX_REFUSALS = 1024
MAX_MASK_THREADS = 4
_TOO_COMPLEX = ("LexerTooComplex", "ParserTooComplex")


class Guidance:
    """Guides for the model whose checkpoint is in `folder`.

    A grammar is compiled once for all rows that follow it at about the same time.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        sizes = {"vocab_size": config.vocab_size, "end_id": config.end_id}
        self._compiler = GrammarCompiler(folder, **sizes)
        self._trials = LimitedProcesses(
            f"{__name__}:make_trial", {"folder": str(folder), **sizes}, LIMITS, NUM_COMPILERS
        )
        self._masks = ThreadPoolExecutor(
            min(MAX_MASK_THREADS, os.cpu_count() or 1), thread_name_prefix="masks"
        )
        self._lock = Lock()
        self._compiled: OrderedDict[str, Future[tuple[Any, bytes]]] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        # Threads that wait for compilations; guides come out of them.
        self.executor = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammars")

    def guide(self, text: str) -> Guide:
        """A guide for one row, with its first mask; blocks until the grammar is compiled.

        Raises RequestError.
        """
        matcher, mask = self._compile_once(text)
        return _MatcherGuide(matcher.deep_copy(), mask, self._masks)

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def is_compiled(self, text: str) -> bool:
        """True if a guide is made at once."""
        with self._lock:
            compiled = self._compiled.get(text)
        return compiled is not None and compiled.done()

    def _compile_once(self, text: str) -> tuple[Any, bytes]:
        """The grammar's matcher at its start and its first mask."""
        digest = hashlib.blake2b(text.encode()).digest()
        with self._lock:
            if digest in self._refusals:
                raise RequestError(self._refusals[digest])
            compiled = self._compiled.get(text)
            if is_new := compiled is None:
                compiled = self._compiled[text] = Future()
            self._compiled.move_to_end(text)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        if is_new:
            try:
                compiled.set_result(self._compile(text))
            except BaseException as error:
                self._forget(text, digest, error)
                compiled.set_exception(error)
        return compiled.result()

    def _forget(self, text: str, digest: bytes, error: BaseException) -> None:
        """Keep no grammar that is refused, but that it is."""
        with self._lock:
            self._compiled.pop(text, None)
            if isinstance(error, RequestError) and not isinstance(error, BusyError):
                self._refusals[digest] = str(error)
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def _compile(self, text: str) -> tuple[Any, bytes]:
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                problem(
                    "guided_grammar is too long, in bytes",
                    got=size,
                    choices=(f"at most {MAX_GRAMMAR_BYTES}",),
                )
            )
        self._compiler.check()
        try:
            refusal = self._trials.call(text)
        except WorkTimeoutError as error:
            raise BusyError(f"guided_grammar cannot be compiled in time: {error}") from error
        except WorkLimitError as error:
            raise RequestError(
                problem(f"guided_grammar is too complex: {error}", got=text[:200])
            ) from error
        if refusal is not None:
            raise RequestError(refusal)
        return self._compiler.compile(text)


def make_trial(argument: Mapping[str, Any]) -> Callable[[str], str | None]:
    """For LimitedProcesses: compiles a grammar as Guidance does; returns why it is refused."""
    compiler = GrammarCompiler(Path(argument["folder"]), argument["vocab_size"], argument["end_id"])
    compiler.check()

    def attempt(text: str) -> str | None:
        try:
            compiler.compile(text)
        except RequestError as error:
            return str(error)
        return None

    return attempt


class GrammarCompiler:
    """Compiles guided_grammar for one vocabulary, in the process that calls it."""

    def __init__(self, folder: Path, vocab_size: int, end_id: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_id = end_id

    def check(self) -> None:
        """Raises RequestError for a model that cannot follow grammars."""
        _ = self._vocabulary

    def compile(self, text: str) -> tuple[Any, bytes]:
        """The grammar's matcher at its start, and its first mask. Raises RequestError."""
        library, grammar = _library(), self._grammar(text)
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(
                problem(f"guided_grammar cannot be followed: {matcher.get_error()}", got=text[:200])
            )
        mask = _mask(matcher)
        if matcher.is_error():
            raise RequestError(problem("no text follows guided_grammar", got=text[:200]))
        return matcher, mask

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return load_tokenizer(self._folder)
        except TokenizerError as error:
            raise RequestError(f"guided_grammar needs the model's tokenizer: {error}") from error

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's own tokenizer; it is made once, which takes a while."""
        tokenizer, end = self._tokenizer, self._end_id
        if end >= self._vocab_size:
            end = -1 if tokenizer.end_id is None else tokenizer.end_id
        if not 0 <= end < self._vocab_size:
            raise RequestError(
                problem("guided_grammar needs a model with an end token", got=self._end_id)
            )
        ids = max(self._vocab_size, tokenizer.vocab_size)
        return _library().LLTokenizer(_vocabulary(tokenizer, end), ids, end)

    def _grammar(self, text: str) -> str:
        """The grammar in llguidance's own form."""
        try:
            grammar_request = json.loads(text)
            delimiters = (
                grammar_request.pop("reasoning", None)
                if isinstance(grammar_request, dict)
                else None
            )
            if not _is_grammar(grammar_request):
                raise ValueError("it is a JSON object with one key, and maybe reasoning")
            ((key, value),) = grammar_request.items()
            grammar = _GRAMMARS[key](value)
            return grammar if delimiters is None else self._after_reasoning(delimiters, grammar)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                problem(
                    f"guided_grammar is wrong: {error}", got=text[:200], choices=list(_GRAMMARS)
                )
            ) from error

    def _after_reasoning(self, delimiters: Any, grammar: str) -> str:
        """A grammar's text behind what is thought, whose first mark may have come already."""
        if not isinstance(delimiters, dict) or not {"end"} <= delimiters.keys() <= {"begin", "end"}:
            raise ValueError("reasoning is an object with the mark `end`, and maybe `begin`")
        if not all(isinstance(mark, str) and mark for mark in delimiters.values()):
            raise ValueError("the marks of reasoning are texts")
        begin, end = delimiters.get("begin"), self._symbols(delimiters["end"])
        opened = "thought" if begin is None else f"({' '.join(self._symbols(begin))} thought)?"
        plain = len(end) == 1 and end[0].startswith('"')
        within = f"[suffix={end[0]}]: TEXT" if plain else f": TEXT {' '.join(end)}"
        rules = [
            f"start: {opened} @answer",
            "thought: within BLANKS",
            f"within{within}",
            r"TEXT: /(.|\n)*/",
            r"BLANKS: /[ \t\n]{0,8}/",
        ]
        first, *others = _members(grammar)
        grammars = [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *others]
        return json.dumps({"grammars": grammars})

    def _symbols(self, mark: str) -> list[str]:
        """A mark in llguidance's grammars: its texts, and the ids of special tokens, which have no
        text."""
        special_id = self._tokenizer.special_id
        parts = [mark] if special_id(mark) is not None else filter(None, _TOKENS.split(mark))
        symbol_ids = [(part, special_id(part)) for part in parts]
        if all(special is None for _, special in symbol_ids):
            return [json.dumps(mark, ensure_ascii=False)]
        return [
            json.dumps(part, ensure_ascii=False) if special is None else f"<[{special}]>"
            for part, special in symbol_ids
        ]


def _mask(matcher: Any) -> bytes:
    """The next mask. Raises RequestError where it exceeds llguidance's limits."""
    mask = bytes(matcher.compute_bitmask())
    if matcher.is_error() and matcher.stop_reason() in _TOO_COMPLEX:
        reason = str(matcher.get_error()).partition("\n")[0]
        raise RequestError(f"guided_grammar is too complex: {reason}")
    return mask


class _MatcherGuide:
    """A guide that is llguidance's matcher; its masks are computed by other threads."""

    def __init__(self, matcher: Any, mask: bytes, executor: Executor) -> None:
        self._matcher = matcher
        self._executor = executor
        self._mask: Future[bytes] = Future()
        self._mask.set_result(mask)
        self.finished = bool(matcher.is_stopped())

    def is_ready(self, timeout: float) -> bool:
        try:
            self._mask.result(timeout)
        except FutureTimeoutError:
            return False
        return True

    def mask(self) -> bytes:
        return self._mask.result()

    def accept(self, token: int) -> bool:
        wait((self._mask,))  # the matcher serves one thread at a time
        accepted = bool(self._matcher.consume_token(token)) and not self._matcher.is_error()
        self.finished = bool(self._matcher.is_stopped())
        if not self.finished:
            self._mask = self._executor.submit(_mask, self._matcher)
        return accepted


def _vocabulary(tokenizer: Tokenizer, end: int) -> Any:
    """Return the vocabulary that llguidance makes its tokenizer of."""
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
