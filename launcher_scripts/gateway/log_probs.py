"""Log-probabilities in the two forms that OpenAI's interface has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.gateway.row_text import LogProbEntry

# JSON has no infinity.
LEAST = -9999.0
TokenName = Callable[[int], str]


def token_names(tokenizer: Tokenizer, *, as_ids: bool = False) -> TokenName:
    """How a token is called: by its text, `bytes:\\x..` where that is a part of a character.

    as_ids: `token_id:<id>`, which is unambiguous
    """

    def name(token_id: int) -> str:
        raw = tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    return (lambda token_id: f"token_id:{token_id}") if as_ids else name


def of_completion(entries: Sequence[LogProbEntry], name: TokenName, top: int) -> dict[str, Any]:
    """`logprobs` of /v1/completions: parallel lists.

    top: how many of the likeliest tokens; the chosen one is there in any case
    """
    tops: list[dict[str, float] | None] = []
    values: list[float | None] = []
    for entry in entries:
        found = entry.log_prob
        if found is None:
            tops.append(None)
            values.append(None)
            continue
        alternatives: dict[str, float] = {}
        for token_id, value in (*found.top[:top], (found.token_id, found.log_prob)):
            alternatives.setdefault(name(token_id), _finite(value))
        tops.append(alternatives)
        values.append(_finite(found.log_prob))
    return {
        "tokens": [name(entry.token_id) for entry in entries],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def of_chat(
    entries: Sequence[LogProbEntry], tokenizer: Tokenizer, name: TokenName, top: int
) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions: one object per token."""

    def shown(token_id: int, value: float) -> dict[str, Any]:
        raw = list(tokenizer.token_bytes(token_id))
        return {"token": name(token_id), "logprob": _finite(value), "bytes": raw}

    content = [
        {
            **shown(found.token_id, found.log_prob),
            "top_logprobs": [shown(*alternative) for alternative in found.top[:top]],
        }
        for entry in entries
        if (found := entry.log_prob) is not None
    ]
    return {"content": content}


def _finite(value: float) -> float:
    return max(value, LEAST)
