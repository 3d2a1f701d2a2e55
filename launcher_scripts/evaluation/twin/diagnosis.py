"""Why a served model's logits differ from its original's on the same token ids, and why the same
texts are other token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.evaluation.tasks.logits import (
    Fit,
    PositionRange,
    RowComparison,
    compare_logits,
    fit,
)
from launcher_scripts.evaluation.tasks.task import Reference

LOST_BOS = "lost_bos"
ADDED_BOS = "added_bos"
TOKENIZER = "tokenizer"
CHAT_TEMPLATE = "chat_template"
ROPE_SCALING = "rope_scaling"
SCALED_LOGITS = "scaled_logits"
SWAPPED_SHARD = "swapped_shard"
OTHER = "other"


@dataclass(frozen=True)
class Finding:
    """One difference that rounding does not explain.

    name:     one of the above
    text:     what it is and what to do, in sentences
    evidence: the figures and examples behind it, as plain values
    """

    name: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


# How far rounding alone takes the logits, as Fit.error has it, at any range of positions.
LIMITS = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2, "int8": 2e-1, "fp8": 4e-1}
# A factor nearer to 1 than this, or than this many residuals, is none.
_MIN_SCALE = 0.01
_RESIDUALS = 5.0
_MAX_LISTED = 20
Rotary = Callable[[Sequence[int]], Iterator[tuple[str, NDArray[np.float32]]]]


@dataclass(frozen=True)
class AlteredFile:
    """A weight file of the served model with other content than the original's tensor gives.

    tensor: its name;  layer: None outside of the layers
    holds:  the file whose content it has; None: that of none
    kind:   what distinguishes the tensor from the original's
    """

    file: str
    tensor: str
    layer: int | None
    rank: int
    holds: str | None
    kind: str = ""


@dataclass(frozen=True)
class Inspection:
    """Details to look up if the logits differ; None if they cannot be read here.

    settings: hyperparameters with another value: name -> (served, original)
    weights:  files that are not what the original's tensors give
    rotary:   of token ids: what the original computes with other rotary positions, and which;
              None: the model has no rotary positions
    start_id: the token that begins a sequence
    """

    settings: Callable[[], Mapping[str, tuple[Any, Any]]] | None = None
    weights: Callable[[], Sequence[AlteredFile]] | None = None
    rotary: Rotary | None = None
    start_id: int | None = None


@dataclass(frozen=True)
class DiagnosisSample:
    """The row that differs most, with the served logits [S, vocab] at its positions.

    decoder_ids: of an encoder-decoder, whose logits they are; otherwise those of `ids`
    """

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...]
    logits: NDArray[np.float32]


def diagnose(
    rows: Sequence[RowComparison],
    positions: Sequence[PositionRange],
    sample: Callable[[], DiagnosisSample],
    reference: Reference,
    precision: str,
    inspection: Inspection,
) -> list[Finding]:
    """Return explanations of the difference; none if it is rounding.

    Other weights and settings are a difference, also where the logits of these texts agree: of
    longer texts they may not.

    positions: those of `rows`
    sample:    asked for where rounding does not explain the difference
    precision: the coarsest type of the served model's weights, computation and cache: of LIMITS
    """
    limit, errors = LIMITS[precision], [position.error for position in positions]
    listed = [
        {"first": position.first, "last": position.last, "error": position.error}
        for position in positions
    ]
    details: dict[str, Any] = {"limit": limit, "precision": precision, "positions": listed}
    if max(errors) <= limit:  # what texts like these do not show
        return [*_weights(inspection), *_settings(inspection, details)]
    scaled = _scaled(fit(rows), limit, details)
    if scaled is not None:
        return [scaled]
    worst = sample()
    opened = _opened(worst, reference, limit, inspection.start_id)
    if opened is not None:
        return [opened]
    findings = [*_weights(inspection), *_settings(inspection, details)]
    if not findings and errors[0] <= limit:
        findings = [*_rotary(worst, limit, inspection, details)]
    return findings or [_unexplained(details)]


def _scaled(result: Fit, limit: float, details: dict[str, Any]) -> Finding | None:
    away = abs(result.scale - 1)
    if away <= max(_MIN_SCALE, _RESIDUALS * result.residual) or result.residual > limit:
        return None
    return Finding(
        SCALED_LOGITS,
        f"The served logits are the original's times {result.scale:.4g}; beside that factor they "
        f"differ by {result.residual:.2g} of their size. Look for a temperature or a multiplier "
        "(logits_scale in config.ini) that is applied twice or not at all.",
        {**details, "scale": result.scale, "residual": result.residual},
    )


def _opened(
    sample: DiagnosisSample, reference: Reference, limit: float, start_id: int | None
) -> Finding | None:
    """Test if the served model reads an opening token more, or less, than it is given."""
    if start_id is None or sample.decoder_ids or len(sample.ids) < 3:
        return None
    ids, logits = sample.ids, sample.logits
    cases = [(ADDED_BOS, "adds an opening token to", ids, (start_id, *ids), logits)]
    if ids[0] == start_id:
        cases.append((LOST_BOS, "drops the opening token of", ids[1:], ids[1:], logits[1:]))
    for name, verb, compared, requested, served in cases:
        scores = reference.logits(requested)[-len(compared) :]
        error = fit([compare_logits(compared, served, scores)]).error
        if error <= limit:
            return Finding(
                name,
                f"The served model {verb} what it is sent: read so by the original, the logits "
                f"differ by {error:.2g} of their size only. One of the two, the client or the "
                "server, is to open the prompts.",
                {"opening_ids": [start_id], "error": error, "limit": limit},
            )
    return None


def _weights(inspection: Inspection) -> list[Finding]:
    altered = list(inspection.weights()) if inspection.weights is not None else []
    swapped = [tensor for tensor in altered if tensor.holds is not None]
    unplaced = [tensor for tensor in altered if tensor.holds is None]
    result = []
    if swapped:
        first = swapped[0]
        result.append(
            Finding(
                SWAPPED_SHARD,
                f"{len(swapped)} weight files hold what belongs into another: {first.file} "
                f"(rank {first.rank} of {first.tensor}) has the content of {first.holds}. Export "
                "again, and find out what renamed them.",
                {
                    "files": [vars(tensor) for tensor in swapped[:_MAX_LISTED]],
                    "altered": len(altered),
                },
            )
        )
    if unplaced:
        first = unplaced[0]
        result.append(
            Finding(
                OTHER,
                f"{len(unplaced)} weight files are not what the original's tensors give: "
                f"{first.file} "
                f"(rank {first.rank} of {first.tensor}) is the first. Export again.",
                {
                    "files": [vars(tensor) for tensor in unplaced[:_MAX_LISTED]],
                    "altered": len(altered),
                },
            )
        )
    return result


def _settings(inspection: Inspection, details: dict[str, Any]) -> list[Finding]:
    different = dict(inspection.settings()) if inspection.settings is not None else {}
    rotary = {name: values for name, values in different.items() if name.startswith("rotary_")}
    result = []
    for name, values in (
        (ROPE_SCALING, rotary),
        (OTHER, {key: pair for key, pair in different.items() if key not in rotary}),
    ):
        if not values:
            continue
        listed = ", ".join(
            f"{key} {served} (original: {original})" for key, (served, original) in values.items()
        )
        label = "rotary positions" if name == ROPE_SCALING else "hyperparameters"
        result.append(
            Finding(
                name,
                f"The served model has other {label} than its original: {listed}. Correct "
                "config.ini, or export again.",
                {**details, "settings": {key: list(pair) for key, pair in values.items()}},
            )
        )
    return result


def _rotary(
    sample: DiagnosisSample, limit: float, inspection: Inspection, details: dict[str, Any]
) -> Iterator[Finding]:
    """Test if other rotary positions explain it: by computing them, else by how it begins.

    A query at position 0 has one key to look at, so there no rotation changes anything.
    """
    if inspection.rotary is None or sample.decoder_ids:
        return
    tried = (
        (fit([compare_logits(sample.ids, sample.logits, logits)]).error, text)
        for text, logits in inspection.rotary(sample.ids)
    )
    error, nearest = min(tried, default=(None, None))
    if error is not None and error <= limit:
        yield Finding(
            ROPE_SCALING,
            f"The served model computes what the original does with {nearest}. Correct the "
            "rotary settings of config.ini, or export again.",
            {**details, "explained_by": nearest, "error": error},
        )
        return
    yield Finding(
        ROPE_SCALING,
        "The logits agree at the first position and part from the second on, as they do with "
        "wrong rotary positions, though none that were tried give the served ones. Compare the "
        "rotary settings of config.ini with the original's, then its attention.",
        {**details, "explained_by": None, "nearest": nearest, "error": error},
    )


def _unexplained(details: dict[str, Any]) -> Finding:
    return Finding(
        OTHER,
        "The served model computes other logits than its original, and neither a factor, its "
        "opening token, nor what could be read of its weights and settings explains it. Export "
        "again with export.model.verify=True.",
        details,
    )


_MAX_LISTED_TOKENS = 10
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
        for token_id in ids[:_MAX_LISTED_TOKENS]
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
    window = slice(max(0, index - 2), index + _MAX_LISTED_TOKENS)
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
