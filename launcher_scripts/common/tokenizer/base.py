"""The interface of every tokenizer, and the settings in the files next to one.

Models of several languages: what stands around their sources.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The special tokens of fairseq's vocabularies (BART, OPT, mBART), by their ids there.
FAIRSEQ_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
# Files that refine the others: which tokens start, end and pad a sequence, the source's language.
OPTIONAL_FILES = ("special_tokens_map.json", "tokenizer_config.json")


class TokenizerError(Exception):
    """The tokenizer's files are missing or cannot be read; the message is meant for the user."""


class TokenizationError(Exception):
    """A library refuses a text or ids; the message is meant for whoever sent them."""


def is_of_library(error: BaseException) -> bool:
    """True unless the process is to end: libraries raise bare Exception, and panic in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def library_call(
    subject: str,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make a function's errors TokenizationErrors, those included that are no Exception.

    subject: of the function, for the message
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if not is_of_library(error):
                    raise
                # Rust prints its panics itself, and they are about the library's inside.
                reason = f": {error}" if isinstance(error, Exception) else ""
                raise TokenizationError(f"the tokenizer refuses {subject}{reason}") from error

        return call

    return decorate


class Tokenizer(ABC):
    """The interface of every tokenizer. No special token is added or needs to be removed by the
    caller.

    vocab_size: number of ids, special ones included
    start_id, end_id, pad_id: as NeMo gives them; None where the tokenizer has no such token
    joined_bytes: what one token adds to a text where decoding joins the tokens' bytes, a special
        token nothing; None where it does more than that
    """

    vocab_size: int
    start_id: int | None
    end_id: int | None
    pad_id: int | None
    joined_bytes: Callable[[int], bytes] | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without start or end token. Raises TokenizationError."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens leave no text, broken UTF-8 becomes U+FFFD.

        Raises TokenizationError.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes in UTF-8, a special token's name; b"" for unknown ids."""

    @abstractmethod
    def surround(self) -> tuple[list[int], list[int]]:
        """The ids that a model was trained to see before and after a text, as far as is known."""

    def is_added(self, token_id: int) -> bool:  # noqa: ARG002
        """True for a token that is found in a text by its name, before the text is cut."""
        return False

    @abstractmethod
    def special_id(self, token: str) -> int | None:
        """The id of a special token, such as a language's; None where there is no such one."""


def tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / OPTIONAL_FILES[1]
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise TokenizerError(f"{path} is damaged: {error}") from error
    return config if isinstance(config, dict) else {}


def added_tokens(config: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of those that tokenizer_config.json adds."""
    decoder = config.get("added_tokens_decoder") or {}
    return {str(token["content"]): int(number) for number, token in decoder.items()}


def tokenizer_class(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class"))


def named_special_tokens(folder: Path) -> dict[str, str] | None:
    """role -> token as the files beside tokenizer.json name them; None without such a file."""
    for name in OPTIONAL_FILES:
        path = folder / name
        if path.is_file():
            roles: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            contents = {
                role: token.get("content") if isinstance(token, dict) else token
                for role, token in roles.items()
            }
            return {role: token for role, token in contents.items() if isinstance(token, str)}
    return None


# The languages of the models below, in the order of their ids.
LANGUAGES_FILE = Path(__file__).with_name("languages.json")
# What transformers' name of a translator's tokenizer begins with -> the language of a source where
# none is named, and whether it comes before the text or after its end.
TRANSLATORS = {
    "MBart50": ("en_XX", True),
    "MBart": ("en_XX", False),
    "M2M100": ("en", True),
    "Nllb": ("eng_Latn", True),
}


def translator_of(config: dict[str, Any]) -> str | None:
    """The key of TRANSLATORS; config: tokenizer_config.json."""
    name = tokenizer_class(config)
    return next((start for start in TRANSLATORS if name.startswith(start)), None)


def languages_of(model: str) -> tuple[str, ...]:
    return tuple(json.loads(LANGUAGES_FILE.read_text(encoding="utf-8"))[model])


def with_language(ids: Sequence[int], language: int | None, other: int) -> tuple[int, ...]:
    """The ids around a source, in another language than the model's own."""
    return tuple(other if token == language else token for token in ids)


def decoder_opening(
    target: int, language: int | None, closing: Sequence[int], start: int
) -> tuple[int, ...]:
    """Return the first IDs of the decoder for a text in the language `target`.

    In the first mBARTs, which name the source's language last, the language is the start token.

    language: the source's;  closing: the ids behind a source;  start: the usual start token
    """
    return (target,) if language in closing else (start, target)


class SpecialIds(NamedTuple):
    """The ids around a prompt, and what the decoder begins with; none: its start token.

    language: of those around a prompt, the prompt's language; None: the model knows no languages
    start:    the decoder's start token, in a model of several languages
    ends:     what ends a text besides the model's end_id
    """

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    decoder: tuple[int, ...] = ()
    language: int | None = None
    start: int = 0
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SpecialIds:
        """As config.pbtxt of a text model says them."""
        opening, closing, decoder, ends = (
            tuple(map(int, parameters.get(name, "").split()))
            for name in ("opening_id", "closing_id", "decoder_id", "end_ids")
        )
        language = int(parameters["language_id"]) if "language_id" in parameters else None
        return cls(opening, closing, decoder, language, int(parameters.get("start_id", 0)), ends)

    def surround(self, ids: Sequence[int]) -> list[int]:
        """A prompt's ids with those around it."""
        return [*self.opening, *ids, *self.closing]

    def language_id(self, name: str, tokenizer: Tokenizer) -> int | None:
        """A language's; None where the model does not know it."""
        return None if self.language is None else tokenizer.special_id(name)

    def between(self, source: int | None, target: int | None) -> SpecialIds:
        """For sources and texts in these languages; None: as it is."""
        result = self
        if source is not None:
            opening = with_language(self.opening, self.language, source)
            closing = with_language(self.closing, self.language, source)
            result = result._replace(opening=opening, closing=closing)
        if target is not None:
            started = decoder_opening(target, self.language, self.closing, self.start)
            result = result._replace(decoder=started)
        return result


def template_of_translator(
    tokenizer: Tokenizer, config: dict[str, Any], translator: str
) -> tuple[list[int], list[int]]:
    """The end token and the source's language; config: tokenizer_config.json."""
    language_token, before = TRANSLATORS[translator]
    language = config.get("src_lang") or language_token
    source, end = tokenizer.special_id(str(language)), tokenizer.end_id
    if source is None or end is None:
        where = f"src_lang of {OPTIONAL_FILES[1]}"
        raise TokenizerError(f"{where} is not a language of the tokenizer; got {language!r}")
    if config.get("legacy_behaviour"):
        raise TokenizerError(f"legacy_behaviour of {OPTIONAL_FILES[1]} is not supported; got True")
    return ([source], [end]) if before else ([], [end, source])
