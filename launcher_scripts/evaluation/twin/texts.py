"""The same texts as token ids of the served model and of its original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.evaluation.twin.diagnosis import (
    ADDED_BOS,
    CHAT_TEMPLATE,
    LOST_BOS,
    OTHER,
    TOKENIZER,
    Finding,
)

_MAX_LISTED = 10
# What every chat template is asked to write: without and with a system's message, and on and on.
_USER = {"role": "user", "content": "What is the capital of France?"}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_ANSWER = {"role": "assistant", "content": "Paris."}
_MORE = {"role": "user", "content": "And of Italy?"}
CONVERSATIONS: tuple[tuple[Mapping[str, str], ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ANSWER, _MORE),
)

# Numbers, accents, scripts, emoji, contractions, white space; special tokens and chats are added.
PROBES = (
    *("Hello world", "Hi 12345! 2024-2025 3.14", "I'LL DON'T it's we're", "a,b;c...!?", ""),
    *(
        "caf\u00e9 cafe\u0301 \u00df \ufb01 \u2460",
        "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4 \u0627\u0644",
    ),
    *("\U0001f642 \U0001f469\u200d\U0001f467", " two  spaces ", "x   y    z", "a\tb\nc\n\n  x\r\n"),
)

Render = Callable[[Sequence[Mapping[str, str]]], str]


@dataclass(frozen=True)
class TextSide:
    """One of the two models' ways of reading text.

    encode:      a text's ids with the tokens that belong around it
    tokenizer:   the vocabulary
    render:      a chat as text, ready for an answer; raises ValueError for what the template
                 refuses; None: the model has no chat template
    decoder_ids: what an encoder-decoder's decoder begins with
    """

    encode: Callable[[str], Sequence[int]]
    tokenizer: Tokenizer
    render: Render | None = None
    decoder_ids: tuple[int, ...] = ()


def text_findings(
    texts: Sequence[str], served: Sequence[Sequence[int]], original: Sequence[Sequence[int]]
) -> list[Finding]:
    """Compare the ids of the same texts, of the served model and of the original.

    Another beginning or end is told apart from another vocabulary.
    """
    different = [
        (text, list(served_ids), list(original_ids))
        for text, served_ids, original_ids in zip(texts, served, original, strict=True)
        if list(served_ids) != list(original_ids)
    ]
    if not different:
        return []
    counts: dict[str, Any] = {"texts": len(texts), "different": len(different)}
    lost = {_lead(original_ids, served_ids) for _, served_ids, original_ids in different}
    added = {_lead(served_ids, original_ids) for _, served_ids, original_ids in different}
    if len(lost) == 1 and None not in lost:
        (ids,) = lost
        return [_bos(LOST_BOS, ids or (), counts)]
    if len(added) == 1 and None not in added:
        (ids,) = added
        return [_bos(ADDED_BOS, ids or (), counts)]
    ends = {
        (_tail(served_ids, original_ids), _tail(original_ids, served_ids))
        for _, served_ids, original_ids in different
    }
    if len(ends) == 1 and ends != {(None, None)}:
        ((more, less),) = ends
        message = (
            "has tokens after a text that the original does not have" if more else "lacks tokens"
        )
        return [
            Finding(
                OTHER,
                f"The served preprocessing {message} after every text: {list(more or less or ())}. "
                "Export the tokenizer's files again, or correct closing_id in the "
                "preprocessing model's config.pbtxt.",
                {**counts, "closing_ids": list(more or less or ())},
            )
        ]
    examples = [_example(*item) for item in different[:3]]
    return [
        Finding(
            TOKENIZER,
            f"The served tokenizer makes other tokens of {len(different)} of {len(texts)} texts. "
            "Export with the original's tokenizer (export.model.tokenizer).",
            {**counts, "examples": examples},
        )
    ]


def vocabulary_finding(served: Tokenizer, original: Tokenizer) -> Finding | None:
    """Test if the ids stand for other tokens; None if they do not."""
    vocab_size = max(served.vocab_size, original.vocab_size)
    ids = [
        token_id
        for token_id in range(vocab_size)
        if served.token_bytes(token_id) != original.token_bytes(token_id)
    ]
    if not ids:
        return None
    examples = [
        {
            "id": token_id,
            "served": _printable(served, token_id),
            "original": _printable(original, token_id),
        }
        for token_id in ids[:_MAX_LISTED]
    ]
    sizes = [served.vocab_size, original.vocab_size]
    return Finding(
        TOKENIZER,
        f"{len(ids)} of {vocab_size} ids are other tokens in the served vocabulary, id {ids[0]} "
        "first. "
        "Export with the original's tokenizer (export.model.tokenizer).",
        {"ids": ids[:1000], "different": len(ids), "examples": examples, "vocab_sizes": sizes},
    )


def chat_finding(served: Render | None, original: Render | None) -> Finding | None:
    """Test if the served model writes chats differently; None if it does not.

    An original without a template says nothing about chats: any may be added.
    """
    if original is None:
        return None
    if served is None:
        return Finding(
            CHAT_TEMPLATE,
            "The served model has no chat template, its original has one. Put the original's "
            "chat_template.jinja or tokenizer_config.json beside the served model's tokenizer.",
        )
    for conversation in CONVERSATIONS:
        served_text, original_text = (
            _rendered(served, conversation),
            _rendered(original, conversation),
        )
        if served_text != original_text:
            index = _first_difference(served_text, original_text)
            return Finding(
                CHAT_TEMPLATE,
                f"The chat templates write other text from character {index} on. Put the "
                "original's chat template beside the served model's tokenizer.",
                {"first_difference": index, "served": served_text, "original": original_text},
            )
    return None


def _bos(name: str, ids: Sequence[int], counts: dict[str, Any]) -> Finding:
    verb, reason = ("lacks", "was trained with") if name == LOST_BOS else ("has", "does not have")
    return Finding(
        name,
        f"Every served prompt {verb} the opening tokens {list(ids)} that the original {reason}. "
        "Correct opening_id in the preprocessing model's config.pbtxt, or the tokenizer's files "
        "beside the checkpoint, and export again.",
        {**counts, "opening_ids": list(ids)},
    )


def _lead(longer: list[int], shorter: list[int]) -> tuple[int, ...] | None:
    """Return the tokens that `longer` has before all of `shorter`; None if it does not end with
    that."""
    more = len(longer) - len(shorter)
    return tuple(longer[:more]) if more > 0 and longer[more:] == shorter else None


def _tail(longer: list[int], shorter: list[int]) -> tuple[int, ...] | None:
    more = len(longer) - len(shorter)
    return tuple(longer[-more:]) if more > 0 and longer[:-more] == shorter else None


def _example(text: str, served_ids: list[int], original_ids: list[int]) -> dict[str, Any]:
    index = _first_difference(served_ids, original_ids)
    window = slice(max(0, index - 2), index + _MAX_LISTED)
    return {
        "text": text[:200],
        "place": index,
        "served": served_ids[window],
        "original": original_ids[window],
    }


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _printable(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _rendered(render: Render, conversation: Sequence[Mapping[str, str]]) -> str:
    """The text, or that the template refuses the chat: then both must."""
    try:
        return render(conversation)
    except ValueError:
        return "(refused)"
