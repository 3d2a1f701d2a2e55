"""Models of several languages: what stands around their sources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .base import OPTIONAL_FILES, Tokenizer, TokenizerError, tokenizer_class

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
