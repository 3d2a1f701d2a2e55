"""Reasoning of a model before its answer, separated from the answer.

A reasoning model writes its thoughts between two marks that its chat template knows, too. Some
templates write the first mark themselves, at the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class StopTexts:
    """Looks for stop texts in a text that comes in pieces.

    What may still become a stop text is held back. `match` is the one of `texts` that was found.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """included: the stop text stays at the end of the answer"""
        self.match: str | None = None
        self.texts = tuple(stops)
        self._included = included
        self._buffered = ""

    def feed(self, piece: str, *, finished: bool = False) -> str:
        """Return the text that may be shown after the next delta; none once a stop text was
        found."""
        if not self.texts or self.match is not None:
            return "" if self.match is not None else piece
        text = self._buffered + piece
        met = [(text.find(stop), -len(stop), stop) for stop in self.texts if stop in text]
        if met:
            index, _, self.match = min(met)
            self._buffered = ""
            return text[: index + len(self.match) if self._included else index]
        num_buffered = 0 if finished else overlap(text, *self.texts)
        self._buffered = text[len(text) - num_buffered :]
        return text[: len(text) - num_buffered]


def overlap(text: str, *delimiters: str) -> int:
    """Return the length of the longest end of a text that begins one of `delimiters`."""
    sizes = range(min(len(text), max(map(len, delimiters)) - 1), 0, -1)
    return next((size for size in sizes if any(m.startswith(text[-size:]) for m in delimiters)), 0)


DELIMITERS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),  # of Magistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # of Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # of Apertus
    ("<|channel>thought", "<channel|>"),  # of Gemma 4
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # of Kimi-VL
)
# Two names of one thing: vLLM's and OpenRouter's, and DeepSeek's, which most templates read.
NAMES = ("reasoning", "reasoning_content")


def with_both_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a chat; what was thought has both names, since templates read one of them."""
    reasoning = next((message[name] for name in NAMES if message.get(name) is not None), None)
    return {**message, **({} if reasoning is None else dict.fromkeys(NAMES, reasoning))}


@dataclass(frozen=True)
class Reasoning:
    """Delimiters of the reasoning in responses to one prompt.

    begin, end: the delimiters
    started:    the prompt has the first one, and the answer usually only the second
    """

    begin: str
    end: str
    started: bool = False

    @property
    def marks(self) -> dict[str, str]:
        """Delimiters that are to come, as guided_grammar names them."""
        return {"end": self.end} if self.started else {"begin": self.begin, "end": self.end}

    @classmethod
    def after(cls, prompt: str, template: str, *, continues: bool = False) -> Reasoning | None:
        """Return the delimiters of responses to a prompt that this template wrote; None if it has
        none.

        continues: the prompt ends within an answer
        """
        for begin, end in DELIMITERS:
            if end in template:
                is_open = prompt.rstrip().endswith(begin)
                if continues:
                    is_open = prompt.rfind(begin) > prompt.rfind(end)
                return cls(begin, end, is_open)
        return None


class ReasoningText:
    """The text of one answer as it comes: first what is thought, then what is answered.

    Text is held back while it may still become a mark. Blanks around what is thought are left out.
    """

    def __init__(self, delimiters: Reasoning) -> None:
        self._delimiters = delimiters
        self._buffered = ""
        self._thinks: bool | None = None
        self._begins = True  # blanks that come are left out

    def feed(self, text: str, *, finished: bool) -> tuple[str, str]:
        """Return the new reasoning, and the new text of the response. finished: no more text
        comes"""
        if self._thinks is False:
            return "", self._after_blanks(text)
        self._buffered += text
        if self._thinks is None and not self._decide(finished):
            return "", ""
        if not self._thinks:
            text, self._buffered = self._buffered, ""
            return "", text
        reasoning, end, answer = self._buffered.partition(self._delimiters.end)
        if end or finished:
            self._buffered = ""
            reasoning = self._after_blanks(reasoning).rstrip()
            self._thinks, self._begins = False, True
            return reasoning, self._after_blanks(answer)
        streamable = self._buffered[
            : len(self._buffered) - overlap(self._buffered, self._delimiters.end)
        ].rstrip()
        self._buffered = self._buffered[len(streamable) :]
        return self._after_blanks(streamable), ""

    def _decide(self, finished: bool) -> bool:
        """Return whether it is known if the answer begins with the first mark, which is taken
        away."""
        start = self._buffered.lstrip()
        if start.startswith(self._delimiters.begin):
            self._thinks, self._buffered = True, start.removeprefix(self._delimiters.begin)
        elif finished or not self._delimiters.begin.startswith(start):
            self._thinks = self._begins = self._delimiters.started
        return self._thinks is not None

    def _after_blanks(self, text: str) -> str:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        return text
