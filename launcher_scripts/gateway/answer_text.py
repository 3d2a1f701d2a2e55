"""The text of a chat's answer: what is thought, what is said, and which tools are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher_scripts.gateway.reasoning import NAMES, Reasoning, ReasoningText
from launcher_scripts.gateway.tool_calls import ToolCall, ToolText


class AnswerText:
    """Reads the text of one answer as it comes."""

    def __init__(
        self,
        reasoning: Reasoning | None,
        tools: Sequence[Mapping[str, Any]],
        *,
        lists_only: bool = False,
        must_call: bool = False,
    ) -> None:
        """tools, lists_only, must_call: see ToolText"""
        self._reasoning = None if reasoning is None else ReasoningText(reasoning)
        more = {"lists_only": lists_only, "must_call": must_call}
        self._tools = ToolText(tools, **more) if tools else None

    @property
    def calls(self) -> list[ToolCall]:
        """Those that are complete."""
        return [] if self._tools is None else self._tools.calls

    def take(self, text: str, *, finished: bool) -> dict[str, Any]:
        """What is new of a message, without its calls. finished: no more text comes"""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.take(text, finished=finished)
        if self._tools is not None:
            text, _ = self._tools.take(text, finished=finished)
        said: dict[str, Any] = dict.fromkeys(NAMES, thought) if thought else {}
        return {**said, "content": text} if text else said
