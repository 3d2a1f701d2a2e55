"""Why a served model's logits differ from its original's on the same token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
