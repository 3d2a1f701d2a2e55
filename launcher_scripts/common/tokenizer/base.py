"""The interface of every tokenizer, and the settings in the files next to one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

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
