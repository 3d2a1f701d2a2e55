"""The twin of a served model: its original, on the same texts and on the same token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.common.tokenizer import Tokenizer
from launcher_scripts.config.evaluation import ReferenceSettings
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
    ProgressCallback,
    Reference,
    TaskModel,
    average,
    fraction,
    from_the_first,
)
from launcher_scripts.evaluation.twin.certificate import measurements, statement
from launcher_scripts.evaluation.twin.diagnosis import (
    PROBES,
    TOKENIZER,
    DiagnosisSample,
    Finding,
    Inspection,
    TextSide,
    chat_finding,
    diagnose,
    text_findings,
    vocabulary_finding,
)
from launcher_scripts.evaluation.twin.faults import COMPUTED, LayerTrace, faults_of

DATA_FILE = Path(__file__).parents[1] / "data" / "lambada_first200.jsonl"
DATA_KEY = "evaluate.twin.data_file"
_MAX_ADDED = 100  # added tokens that texts are made of
_PRICED = 8  # texts of which the cost of other ids is computed


@dataclass(frozen=True)
class ComparedModels:
    """A served model and its original.

    served, original: how each reads text; None: it has no tokenizer
    precision: the coarsest type of the served model's weights, computation and cache: fp32, ...
    encodes:   whether they are encoder-decoders
    positions: tokens that fit into the model; None: any number
    continued: what the rows are asked through, as tasks do theirs
    trace:     compares the layers of the export with the original's; None: not requested
    """

    model: TaskModel
    reference: Reference
    served: TextSide | None
    original: TextSide | None
    precision: str = "fp32"
    encodes: bool = False
    positions: int | None = None
    inspection: Inspection = field(default_factory=Inspection)
    trace: Callable[[], LayerTrace] | None = None
    continued: Continue = from_the_first


@dataclass(frozen=True)
class ReferenceResult:
    """The section `twin` of the report: see docs/evaluation.md.

    certificate: see docs/certificate.md
    """

    source: str
    reference: str
    metrics: dict[str, Metric]
    positions: list[PositionRange]
    findings: list[Finding]
    items: list[dict[str, Any]]
    certificate: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizedText:
    """One text as token ids. decoder_ids: of an encoder-decoder, what its decoder reads."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()

    @property
    def compared(self) -> tuple[int, ...]:
        """The ids at whose positions there are logits."""
        return self.decoder_ids or self.ids

    def followed_by(self, ids: Sequence[int]) -> TokenizedText:
        if self.decoder_ids:
            return TokenizedText(self.ids, (*self.decoder_ids, *ids))
        return TokenizedText((*self.ids, *ids))


def read_reference_texts(settings: ReferenceSettings) -> list[str]:
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
class TokenizedTexts:
    """The texts as token ids.

    rows: of the original, where it has a tokenizer: the ids that it was trained with
    own:  of the served model, of those texts that it reads otherwise: (its row, the original's)
    findings: what differs before there are logits
    """

    rows: list[TokenizedText]
    own: list[tuple[TokenizedText, TokenizedText]]
    findings: list[Finding]


def compare_models(
    settings: ReferenceSettings,
    comparison: ComparedModels,
    texts: Sequence[str],
    source: str,
    progress: ProgressCallback,
) -> ReferenceResult:
    """Compare both on every text: first the ids they make of it, then the logits of the same ids.

    source: what the original is
    """
    reading = _reading(settings, comparison, texts)
    rows, items, compared = reading.rows, [], []
    answered = comparison.continued(lambda first: _answers(settings, comparison, rows[first:]))
    for index, (row, answer) in enumerate(zip(rows, answered, strict=True)):
        full = RowComparison.of(answer["compared"])
        compared.append(full.part(0, len(row.compared)))
        items.append(_item(index, row, compared[-1], full, answer["continuation"]))
        progress(index + 1, len(rows))
    if not rows:
        raise ConfigError(problem("there is no text to compare", change=DATA_KEY))
    positions = by_position(compared)
    findings = reading.findings + diagnose(
        compared,
        positions,
        lambda: _sample(comparison, rows[int(np.argmax([item["kl"] for item in items]))]),
        comparison.reference,
        comparison.precision,
        comparison.inspection,
    )
    metrics = _metrics(items, compared)
    if own := _readable(comparison, reading.own[:_PRICED]):
        metrics["text_difference"] = _text_difference(settings, comparison, own)
    record = measurements(compared, settings.margin, settings.alpha)
    if comparison.trace is not None:
        trace = comparison.trace()
    else:
        trace = LayerTrace(comparison.reference.name, 0.0, skipped="evaluate.twin.layers=False")
    served_differs = any(one.name in COMPUTED for one in findings)
    faults = faults_of(findings, trace, served_differs=served_differs)
    record |= {"layers": trace.plain(), "faults": [vars(fault) for fault in faults]}
    record = {"statement": statement(record["test"], faults), **record}
    return ReferenceResult(
        source, comparison.reference.name, metrics, positions, findings, items, record
    )


def _reading(
    settings: ReferenceSettings, comparison: ComparedModels, texts: Sequence[str]
) -> TokenizedTexts:
    side = comparison.original or comparison.served
    if side is None:
        raise ConfigError(
            problem(
                "neither the served model nor its original has a tokenizer to read texts with",
                change="evaluate.tokenizer_dir",
            )
        )
    max_tokens = _max_tokens(settings, comparison)
    parts = [_halves(text) if comparison.encodes else (text, "") for text in texts]
    first = [text for text, _ in parts]

    def row(ids: Sequence[int], answer: str) -> TokenizedText:
        if not comparison.encodes:
            return TokenizedText(tuple(ids)[:max_tokens])
        start = (comparison.served or side).decoder_ids
        return TokenizedText(
            tuple(ids)[:max_tokens], (*start, *side.tokenizer.encode(answer))[:max_tokens]
        )

    original_ids = [side.encode(text) for text in first]
    rows = [row(ids, answer) for ids, (_, answer) in zip(original_ids, parts, strict=True)]
    if comparison.served is None or comparison.original is None:
        return TokenizedTexts(rows, [], [])
    served_ids = [comparison.served.encode(text) for text in first]
    local = [row(ids, answer) for ids, (_, answer) in zip(served_ids, parts, strict=True)]
    probes = [*PROBES, *_added_texts(comparison.original.tokenizer)]
    findings = text_findings(
        [*first, *probes],
        [*served_ids, *map(comparison.served.encode, probes)],
        [*original_ids, *map(comparison.original.encode, probes)],
    )
    vocabulary = vocabulary_finding(comparison.served.tokenizer, comparison.original.tokenizer)
    if vocabulary is not None:
        findings = [*(finding for finding in findings if finding.name != TOKENIZER), vocabulary]
    chat = chat_finding(comparison.served.render, comparison.original.render)
    findings += [] if chat is None else [chat]
    pairs = zip(local, rows, strict=True)
    return TokenizedTexts(rows, [(a, b) for a, b in pairs if a != b], findings)


def _added_texts(tokenizer: Tokenizer) -> list[str]:
    """A text around each of the first tokens that are found before a text is cut."""
    ids = [number for number in range(tokenizer.vocab_size) if tokenizer.is_added(number)]
    tokens = [tokenizer.token_bytes(number).decode(errors="replace") for number in ids[:_MAX_ADDED]]
    return [f"a {token} b{token}c" for token in tokens]


def _max_tokens(settings: ReferenceSettings, comparison: ComparedModels) -> int:
    """Tokens of a text that fit, with its continuation, into the model."""
    if comparison.positions is None:
        return settings.max_tokens
    max_tokens = min(settings.max_tokens, comparison.positions - settings.continuation)
    if max_tokens < 2:
        raise ConfigError(
            problem(
                f"a model of {comparison.positions} positions has no room for a text",
                got=settings.continuation,
                change="evaluate.twin.continuation",
            )
        )
    return max_tokens


def _readable(
    comparison: ComparedModels, pairs: Sequence[tuple[TokenizedText, TokenizedText]]
) -> list[tuple[TokenizedText, TokenizedText]]:
    """Return the texts whose ids are in the vocabulary: a wrong tokenizer may have others."""
    if not pairs:
        return []
    row = pairs[0][1]
    size = comparison.reference.logits(row.ids, row.decoder_ids).shape[-1]
    return [pair for pair in pairs if max((*pair[0].ids, *pair[0].decoder_ids), default=0) < size]


def _text_difference(
    settings: ReferenceSettings,
    comparison: ComparedModels,
    pairs: Sequence[tuple[TokenizedText, TokenizedText]],
) -> Metric:
    """Measure the effect of different tokenization on a few texts."""
    requests = (_request(served_row, 0) for served_row, _ in pairs)
    differences = []
    for (local, row), answer in zip(
        pairs, comparison.model.generate_rows(requests, settings.batch_size), strict=True
    ):
        served = next_log_probs(local.compared, np.asarray(answer.context_logits))
        log_probs = next_log_probs(
            row.compared, comparison.reference.logits(row.ids, row.decoder_ids)
        )
        differences.append(float(served.mean() - log_probs.mean()))
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


def _answers(
    settings: ReferenceSettings, comparison: ComparedModels, rows: Sequence[TokenizedText]
) -> Iterator[dict[str, Any]]:
    """Iterate over the rows' greedy continuations, and RowComparison.plain of both together."""
    size = settings.batch_size
    for batch in (rows[first : first + size] for first in range(0, len(rows), size)):
        added: list[tuple[int, ...]] = [()] * len(batch)
        if settings.continuation:
            requests = (_request(row, settings.continuation) for row in batch)
            outputs = comparison.model.generate_rows(requests, size)
            added = [tuple(map(int, output.output_ids)) for output in outputs]
        full_rows = [row.followed_by(ids) for row, ids in zip(batch, added, strict=True)]
        served = _logits(comparison, full_rows, size)
        for row, ids, logits in zip(full_rows, added, served, strict=True):
            reference = comparison.reference.logits(row.ids, row.decoder_ids)
            _check_logits(row, reference, comparison.reference.name)
            compared = compare_logits(row.compared, logits, reference)
            yield {"continuation": ids, "compared": compared.plain()}


def _sample(comparison: ComparedModels, row: TokenizedText) -> DiagnosisSample:
    (logits,) = _logits(comparison, [row], 1)
    return DiagnosisSample(row.ids, row.decoder_ids, logits)


def _logits(
    comparison: ComparedModels, rows: Sequence[TokenizedText], in_flight: int
) -> Iterator[NDArray[np.float32]]:
    """The served model's of every row, [S, vocab]."""
    answers = comparison.model.generate_rows((_request(row, 0) for row in rows), in_flight)
    for row, answer in zip(rows, answers, strict=True):
        logits = np.asarray(answer.context_logits)
        _check_logits(row, logits, "the served model")
        yield logits


def _check_logits(row: TokenizedText, logits: NDArray[np.float32], who: str) -> None:
    if len(logits) != len(row.compared) or not np.isfinite(logits).all():
        raise ServerError(
            problem(
                f"the logits of {who} are not numbers, or not those of every token: the model's "
                "values may leave the range of its data_type",
                got=f"{len(logits)} positions for {len(row.compared)} tokens",
                change="export.triton_deployment.data_type",
            )
        )


def _request(row: TokenizedText, output_len: int) -> GenerateRequest:
    """Greedy; the logits of what is read where nothing is to be generated."""
    return GenerateRequest(
        row.ids,
        output_len,
        decoder_input_ids=row.decoder_ids,
        return_context_logits=output_len == 0,
    )


def _item(
    index: int,
    row: TokenizedText,
    local: RowComparison,
    full: RowComparison,
    continuation: Sequence[int],
) -> dict[str, Any]:
    """local: over the text; full: over the text and what the served model generated after it."""
    first = len(row.compared) - 1
    best = full.chosen[first : first + len(continuation)]
    parted = (n for n, (a, b) in enumerate(zip(best, continuation, strict=True)) if a != b)
    return {
        "index": index,
        "tokens": len(row.compared),
        "log_likelihood": local.log_likelihood,
        "reference_log_likelihood": local.reference_log_likelihood,
        "difference": local.log_likelihood - local.reference_log_likelihood,
        "top1": float(local.same.mean()),
        "kl": float(local.kl.mean()),
        "kl_max": float(local.kl.max()),
        "first_divergence": local.first_divergence,
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
