"""The twin of a served model: its original, on the same texts and on the same token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.config.evaluation import TwinSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.tasks.logits import (
    PositionRange,
    RowComparison,
    by_position,
    compare_logits,
    fit,
    next_log_probs,
)
from launcher_scripts.evaluation.tasks.prompts import numbered, read_lines, require_items
from launcher_scripts.evaluation.tasks.task import (
    Continue,
    Metric,
    Model,
    ProgressCallback,
    Reference,
    average,
    fraction,
    from_the_first,
)
from launcher_scripts.evaluation.twin.diagnosis import (
    TOKENIZER,
    Finding,
    Inspection,
    Sample,
    diagnose,
)
from launcher_scripts.evaluation.twin.texts import (
    TextSide,
    chat_finding,
    text_findings,
    vocabulary_finding,
)

DATA_FILE = Path(__file__).parents[1] / "data" / "lambada_first200.jsonl"
DATA_KEY = "evaluate.twin.data_file"
_PRICED = 8  # texts of which the cost of other ids is computed


@dataclass(frozen=True)
class Twins:
    """A served model and its original.

    served, original: how each reads text; None: it has no tokenizer
    precision: the coarsest type of the served model's weights, computation and cache: fp32, ...
    encodes:   whether they are encoder-decoders
    positions: tokens that fit into the model; None: any number
    continued: what the rows are asked through, as tasks do theirs
    """

    model: Model
    reference: Reference
    served: TextSide | None
    original: TextSide | None
    precision: str = "fp32"
    encodes: bool = False
    positions: int | None = None
    inspection: Inspection = field(default_factory=Inspection)
    continued: Continue = from_the_first


@dataclass(frozen=True)
class TwinResult:
    """The section `twin` of the report: see docs/evaluation.md."""

    source: str
    reference: str
    metrics: dict[str, Metric]
    positions: list[PositionRange]
    findings: list[Finding]
    items: list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One text as token ids. decoder_ids: of an encoder-decoder, what its decoder reads."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()

    @property
    def compared(self) -> tuple[int, ...]:
        """The ids at whose positions there are logits."""
        return self.decoder_ids or self.ids

    def followed_by(self, ids: Sequence[int]) -> Row:
        if self.decoder_ids:
            return Row(self.ids, (*self.decoder_ids, *ids))
        return Row((*self.ids, *ids))


def read_twin_texts(settings: TwinSettings) -> list[str]:
    """The first `limit` texts; raises ConfigError that names every line that has none."""
    path = settings.data_file or str(DATA_FILE)
    problems, texts = Problems(f"the texts of {path}"), []
    for number, line in numbered(read_lines(path, DATA_KEY), settings.limit):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if isinstance(text, str) and len(text.split()) > 1:
            texts.append(text)
        else:
            problems.add(f'line {number} is not JSON with a "text" of words', got=line[:60])
    require_items(texts, problems)
    return texts


@dataclass(frozen=True)
class Reading:
    """The texts as token ids.

    rows: of the original, where it has a tokenizer: the ids that it was trained with
    own:  of the served model, of those texts that it reads otherwise: (its row, the original's)
    findings: what differs before there are logits
    """

    rows: list[Row]
    own: list[tuple[Row, Row]]
    findings: list[Finding]


def measure_twins(
    settings: TwinSettings,
    twins: Twins,
    texts: Sequence[str],
    source: str,
    progress: ProgressCallback,
) -> TwinResult:
    """Compare both on every text: first the ids they make of it, then the logits of the same ids.

    source: what the original is
    """
    reading = _reading(settings, twins, texts)
    rows, items, compared = reading.rows, [], []
    asked = twins.continued(lambda first: _answers(settings, twins, rows[first:]))
    for index, (row, answer) in enumerate(zip(rows, asked, strict=True)):
        whole = RowComparison.of(answer["compared"])
        compared.append(whole.part(0, len(row.compared)))
        items.append(_item(index, row, compared[-1], whole, answer["continuation"]))
        progress(index + 1, len(rows))
    if not rows:
        raise ConfigError(problem("there is no text to compare", change=DATA_KEY))
    positions = by_position(compared)
    findings = reading.findings + diagnose(
        compared,
        positions,
        lambda: _sample(twins, rows[int(np.argmax([item["kl"] for item in items]))]),
        twins.reference,
        twins.precision,
        twins.inspection,
    )
    metrics = _metrics(items, compared)
    if reading.own:
        metrics["text_difference"] = _text_difference(settings, twins, reading.own)
    return TwinResult(source, twins.reference.name, metrics, positions, findings, items)


def _reading(settings: TwinSettings, twins: Twins, texts: Sequence[str]) -> Reading:
    side = twins.original or twins.served
    if side is None:
        raise ConfigError(
            problem(
                "neither the served model nor its original has a tokenizer to read texts with",
                change="evaluate.tokenizer_dir",
            )
        )
    room = _room(settings, twins)
    parts = [_halves(text) if twins.encodes else (text, "") for text in texts]
    first = [text for text, _ in parts]

    def row(ids: Sequence[int], answer: str) -> Row:
        if not twins.encodes:
            return Row(tuple(ids)[:room])
        start = (twins.served or side).decoder_ids
        return Row(tuple(ids)[:room], (*start, *side.tokenizer.encode(answer))[:room])

    theirs = [side.encode(text) for text in first]
    rows = [row(ids, answer) for ids, (_, answer) in zip(theirs, parts, strict=True)]
    if twins.served is None or twins.original is None:
        return Reading(rows, [], [])
    ours = [twins.served.encode(text) for text in first]
    own = [row(ids, answer) for ids, (_, answer) in zip(ours, parts, strict=True)]
    found = text_findings(first, ours, theirs)
    vocabulary = vocabulary_finding(twins.served.tokenizer, twins.original.tokenizer)
    if vocabulary is not None:
        found = [*(each for each in found if each.name != TOKENIZER), vocabulary]
    chat = chat_finding(twins.served.render, twins.original.render)
    found += [] if chat is None else [chat]
    pairs = zip(own, rows, strict=True)
    return Reading(rows, [(a, b) for a, b in pairs if a != b], found)


def _room(settings: TwinSettings, twins: Twins) -> int:
    """Tokens of a text that fit, with its continuation, into the model."""
    if twins.positions is None:
        return settings.max_tokens
    room = min(settings.max_tokens, twins.positions - settings.continuation)
    if room < 2:
        raise ConfigError(
            problem(
                f"a model of {twins.positions} positions has no room for a text",
                got=settings.continuation,
                change="evaluate.twin.continuation",
            )
        )
    return room


def _text_difference(
    settings: TwinSettings, twins: Twins, pairs: Sequence[tuple[Row, Row]]
) -> Metric:
    """Measure the effect of different tokenization on a few texts."""
    pairs = pairs[:_PRICED]
    asked = (_request(own, 0) for own, _ in pairs)
    differences = []
    for (own, row), answer in zip(
        pairs, twins.model.generate_each(asked, settings.batch_size), strict=True
    ):
        served = next_log_probs(own.compared, np.asarray(answer.context_logits))
        theirs = next_log_probs(row.compared, twins.reference.logits(row.ids, row.decoder_ids))
        differences.append(float(served.mean() - theirs.mean()))
    return average(
        differences,
        False,
        f"log-likelihood (nats a token) of the served model on its own ids less that of the "
        f"original on its ids, {len(differences)} texts that they read otherwise",
    )


def _halves(text: str) -> tuple[str, str]:
    """Return the encoder's and the decoder's part of a text."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _answers(settings: TwinSettings, twins: Twins, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Iterate over the rows' greedy continuations, and RowComparison.plain of both together."""
    size = settings.batch_size
    for batch in (rows[first : first + size] for first in range(0, len(rows), size)):
        added: list[tuple[int, ...]] = [()] * len(batch)
        if settings.continuation:
            requests = (_request(row, settings.continuation) for row in batch)
            outputs = twins.model.generate_each(requests, size)
            added = [tuple(map(int, output.output_ids)) for output in outputs]
        whole = [row.followed_by(ids) for row, ids in zip(batch, added, strict=True)]
        served = _logits(twins, whole, size)
        for row, ids, logits in zip(whole, added, served, strict=True):
            theirs = twins.reference.logits(row.ids, row.decoder_ids)
            _check_logits(row, theirs, twins.reference.name)
            compared = compare_logits(row.compared, logits, theirs)
            yield {"continuation": ids, "compared": compared.plain()}


def _sample(twins: Twins, row: Row) -> Sample:
    (logits,) = _logits(twins, [row], 1)
    return Sample(row.ids, row.decoder_ids, logits)


def _logits(twins: Twins, rows: Sequence[Row], in_flight: int) -> Iterator[NDArray[np.float32]]:
    """The served model's of every row, [S, vocab]."""
    answers = twins.model.generate_each((_request(row, 0) for row in rows), in_flight)
    for row, answer in zip(rows, answers, strict=True):
        logits = np.asarray(answer.context_logits)
        _check_logits(row, logits, "the served model")
        yield logits


def _check_logits(row: Row, logits: NDArray[np.float32], who: str) -> None:
    if len(logits) != len(row.compared) or not np.isfinite(logits).all():
        raise ServerError(
            problem(
                f"the logits of {who} are not numbers, or not those of every token: the model's "
                "values may leave the range of its data_type",
                got=f"{len(logits)} positions for {len(row.compared)} tokens",
                change="export.triton_deployment.data_type",
            )
        )


def _request(row: Row, output_len: int) -> GenerateRequest:
    """Greedy; the logits of what is read where nothing is to be generated."""
    return GenerateRequest(
        row.ids,
        output_len,
        decoder_input_ids=row.decoder_ids,
        return_context_logits=output_len == 0,
    )


def _item(
    index: int,
    row: Row,
    own: RowComparison,
    whole: RowComparison,
    continuation: Sequence[int],
) -> dict[str, Any]:
    """own: over the text; whole: over the text and what the served model generated after it."""
    first = len(row.compared) - 1
    chosen = whole.chosen[first : first + len(continuation)]
    parted = (n for n, (a, b) in enumerate(zip(chosen, continuation, strict=True)) if a != b)
    return {
        "index": index,
        "tokens": len(row.compared),
        "log_likelihood": own.log_likelihood,
        "reference_log_likelihood": own.reference_log_likelihood,
        "difference": own.log_likelihood - own.reference_log_likelihood,
        "top1": float(own.same.mean()),
        "kl": float(own.kl.mean()),
        "kl_max": float(own.kl.max()),
        "first_divergence": own.first_divergence,
        "continuation_tokens": len(continuation),
        "continuation_divergence": next(parted, None),
    }


def _metrics(
    items: Sequence[dict[str, Any]], compared: Sequence[RowComparison]
) -> dict[str, Metric]:
    """Intervals are those of the mean over texts: positions of one text depend on each other."""
    differences = [abs(item["difference"]) for item in items]
    metrics = {
        "kl": average(
            [item["kl"] for item in items],
            False,
            "divergence (nats) of the served from the original's next-token probabilities",
        ),
        "top1": average(
            [item["top1"] for item in items], True, "positions with the same likeliest next token"
        ),
        "log_likelihood_difference": average(
            differences, False, "mean over texts of the difference of log-likelihoods, unsigned"
        ),
        "largest_difference": Metric(
            max(differences), None, None, False, "largest of those differences"
        ),
        "logit_error": Metric(
            fit(compared).error,
            None,
            None,
            False,
            "root mean square difference of the logits, as a part of the original's",
        ),
    }
    generated = [item for item in items if item["continuation_tokens"]]
    if generated:
        metrics["same_continuation"] = fraction(
            [item["continuation_divergence"] is None for item in generated],
            "texts that both continue greedily with the same tokens",
        )
    return metrics
