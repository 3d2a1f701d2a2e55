"""What clients are tried against, and what they should get."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.common.http_client import query
from launcher_scripts.contract.metric_names import parse_values

PROMPT = "The capital of France is"
QUESTION = "What is the capital of France?"
SENTENCE = "Two dogs play in the snow."
TOKENS = 12
MESSAGES = [{"role": "user", "content": QUESTION}]

# What is asked, and what tries it: it returns a few words about the result, or raises.
Trial = tuple[str, Callable[[], str]]


class WrongAnswer(Exception):
    """A client did not get what plain HTTP gets."""


@dataclass
class Target:
    """A gateway with SmolLM2, and with a T5 or None.

    tokenizer: the folder of SmolLM2's, for clients that count tokens themselves
    """

    address: str  # http://host:port
    model: str
    t5: str | None
    tokenizer: Path
    completion: str = field(init=False)
    chat: str = field(init=False)

    def __post_init__(self) -> None:
        asked = {"model": self.model, "max_tokens": TOKENS, "temperature": 0}
        text = self.ask("/v1/completions", {**asked, "prompt": PROMPT})
        self.completion = str(text["choices"][0]["text"])
        chat = self.ask("/v1/chat/completions", {**asked, "messages": MESSAGES})
        self.chat = str(chat["choices"][0]["message"]["content"])

    @property
    def openai(self) -> str:
        """The base address of OpenAI's routes."""
        return f"{self.address}/v1"

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer by plain HTTP. Raises WrongAnswer for an error."""
        status, text = query(self.address, path, 600, method="POST", body=body)
        if status != 200:
            raise WrongAnswer(text)
        return dict(json.loads(text))

    def rows_running(self) -> float:
        """The gateway's gauge of rows that the server was given."""
        values = parse_values(query(self.address, "/metrics", 60)[1])
        if "launcher_gateway_rows_running" not in values:
            raise WrongAnswer("the gateway has no gauge of running rows")
        return sum(values["launcher_gateway_rows_running"])


def same(got: str, expected: str) -> str:
    """`got`, which has to be what plain HTTP gets. Raises WrongAnswer."""
    if got != expected:
        raise WrongAnswer(f"got {got!r}, expected {expected!r}")
    return f"as plain HTTP: {expected[:30]!r}"


def check(right: object, got: object) -> str:
    """`got`, in words. Raises WrongAnswer unless it is `right`."""
    if not right:
        raise WrongAnswer(f"got {got!r}")
    return str(got)


def tokenizer_folder(target: Target, folder: Path) -> Path:
    """The served tokenizer as a folder of transformers', without the weights beside it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((target.tokenizer / name).read_bytes())
    return folder
