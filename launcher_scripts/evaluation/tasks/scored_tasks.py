"""Tasks without generating. LAMBADA: predict the last word of a passage whose context is needed to
know it. Encoding: an encoder's hidden states beside those of transformers on the same token ids.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.contract_tensors import States
from launcher_scripts.common.errors import ConfigError, Problems, ServerError, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.tasks.logits import next_log_probs
from launcher_scripts.evaluation.tasks.prompts import (
    numbered,
    prompts_of,
    read_lines,
    read_model_ini,
    require_items,
    row_of,
)
from launcher_scripts.evaluation.tasks.task import (
    REFERENCE_KEY,
    EvaluatedModel,
    Metric,
    ProgressCallback,
    TaskResult,
    average,
    fraction,
    mean_95,
)


@dataclass(frozen=True)
class Item:
    """One passage as tokens: the last `target_length` of `tokens` are the target."""

    index: int
    target: str
    tokens: tuple[int, ...]
    target_length: int


def read_passages(data_file: Path, limit: int | None = None) -> list[str]:
    """The first `limit` texts of a JSON-lines file of {"text": ...} objects."""
    lines = read_lines(str(data_file), "evaluate.tasks.lambada.data_file")
    texts = []
    problems = Problems(f"the LAMBADA items in {data_file}")
    for number, line in numbered(lines, limit):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            problems.add(f'line {number} is not a JSON object with a "text"', got=line[:60])
            continue
        if not (isinstance(text, str) and all(split_target(text))):
            problems.add(f"line {number} has no last word after a blank", got=str(text)[-60:])
        texts.append(text)
    if not lines:
        problems.add("the file is empty")
    problems.raise_if_any(ConfigError)
    return texts


def split_target(text: str) -> tuple[str, str]:
    """Context and target of a passage: up to its last blank, and that blank with the last word.

    >>> split_target("the last word")
    ('the last', ' word')
    """
    context, blank, word = text.rpartition(" ")
    return context, blank + word if word else ""


def encode_pair(
    encode: Callable[[str], Sequence[int]], context: str, target: str
) -> tuple[tuple[int, ...], int]:
    """The tokens of context + target, and how many of them belong to the target.

    As lm-evaluation-harness does it: blanks at the context's end move to the target, both are
    encoded as one text, and the target's tokens are those after as many as the context alone has.
    """
    stripped = context.rstrip()
    ids = tuple(encode(context + target))
    return ids, len(ids) - len(encode(stripped))


def make_items(texts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[Item]:
    """The texts as tokens. Raises ConfigError for a text whose target or context has no token."""
    items = []
    problems = Problems("LAMBADA's items as tokens")
    for index, text in enumerate(texts):
        context, target = split_target(text)
        tokens, target_length = encode_pair(encode, context, target)
        if not 0 < target_length < len(tokens):
            problems.add(f"item {index} needs tokens before and in its last word", got=text[-60:])
        items.append(Item(index, target, tokens, target_length))
    problems.raise_if_any(ConfigError)
    return items


def score_item(item: Item, logits: NDArray[np.float32]) -> dict[str, Any]:
    """One item of the report, judged by the logits at every position of its tokens but the last.

    Its log_likelihood is the target's, in nats.
    logits: float32 [len(item.tokens) - 1, vocab]; row i predicts token i + 1
    """
    read = item.tokens[-item.target_length - 1 :]  # one before the target, and the target
    predictions = logits[-item.target_length :]  # [T, vocab]
    hits = predictions.argmax(axis=-1) == np.asarray(read[1:])  # [T]
    return {
        "index": item.index,
        "target": item.target,
        "correct": bool(hits.all()),
        "log_likelihood": float(next_log_probs(read, predictions).sum()),
        "last_token_correct": bool(hits[-1]),
    }


def score_items(
    items: Sequence[Item], logits_of_rows: Iterable[NDArray[np.float32]]
) -> Iterator[dict[str, Any]]:
    """The report's items in order; row n of logits is that of rows_to_score's row n."""
    for item, logits in zip(items, logits_of_rows, strict=True):
        if len(logits) != len(item.tokens) - 1:
            raise ServerError(
                f"the server gave logits at {len(logits)} positions of LAMBADA's item "
                f"{item.index}, which has {len(item.tokens) - 1}"
            )
        predictions = logits[-item.target_length :]  # [T, vocab]
        needed = [predictions.max(axis=-1), predictions[:, item.tokens[-item.target_length :]]]
        if not all(np.isfinite(values).all() for values in needed):
            raise ServerError(
                f"the server's logits of LAMBADA's item {item.index} are not numbers: the model's "
                "values leave the range of its data_type"
            )
        yield score_item(item, logits)


def rows_to_score(items: Iterable[Item]) -> Iterator[tuple[int, ...]]:
    """Iterate over the tokens that the model must read to judge the items: all but the last."""
    return (item.tokens[:-1] for item in items)


def fitting(items: Sequence[Item], positions: int | None) -> list[Item]:
    """The items without what a model of so many positions cannot read: their beginnings.

    As lm-evaluation-harness does it; raises ConfigError where a last word alone is too long.
    """
    if positions is None:
        return list(items)
    problems = Problems("LAMBADA's items in the model's positions")
    for item in items:
        if item.target_length > positions:
            problems.add(f"item {item.index} has a last word of too many tokens", got=item.target)
    problems.raise_if_any(ConfigError)
    return [dataclasses.replace(item, tokens=item.tokens[-positions - 1 :]) for item in items]


def max_positions_of(folder: Path) -> int | None:
    """Return the size of the model's table of positions, by its config.ini; None without a
    table."""
    config = read_model_ini(folder)
    if not config.has_section("gpt") or not config["gpt"].getboolean(
        "has_positional_encoding", True
    ):
        return None
    if config.get("extension", "position_embedding", fallback="learned") != "learned":
        return None
    return config["gpt"].getint("max_pos_seq_len")


def summarise_lambada(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """The task's figures; the perplexity's interval comes from the mean log-likelihood's."""
    mean, half_width = mean_95(np.array([item["log_likelihood"] for item in items]))
    low = high = None
    if half_width is not None:
        low, high = math.exp(-mean - half_width), math.exp(-mean + half_width)
    return {
        "accuracy": fraction(
            [item["correct"] for item in items],
            "last words of which every token is the likeliest",
        ),
        "perplexity": Metric(
            math.exp(-mean), low, high, False, "exp of minus the last words' mean log-likelihood"
        ),
        "last_token_accuracy": fraction(
            [item["last_token_correct"] for item in items],
            "texts whose last token is the likeliest after the others",
        ),
    }


def run_lambada(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Measure the items of settings.data_file, settings.batch_size of them in flight."""
    texts = read_passages(Path(settings.data_file), settings.limit)
    passages = fitting(make_items(texts, model.tokenizer.encode), max_positions_of(model.folder))
    items: list[dict[str, Any]] = []

    def send(first: int) -> Iterator[dict[str, Any]]:
        left = passages[first:]
        return score_items(left, model.model.score(rows_to_score(left), settings.batch_size))

    for item in model.continued(send):
        items.append(item)
        progress(len(items), len(passages))
    return TaskResult(summarise_lambada(items), items)


TEMPLATE = "{text}"
# Texts that are asked together before the reference computes, which is not the server's time.
PART = 64


def read_encoder_texts(settings: TaskSettings) -> list[str]:
    """The first `limit` lines; raises ConfigError that names every empty one."""
    lines = read_lines(settings.data_file, f"evaluate.tasks.{settings.name}.data_file")
    problems = Problems(f"the texts in {settings.data_file}")
    texts = []
    for number, line in numbered(lines, settings.limit):
        if not line.strip():
            problems.add(f"line {number} is empty")
        texts.append(line)
    require_items(texts, problems)
    return texts


def compare_states(served: States, reference: States) -> dict[str, float]:
    """One item's agreement.

    cosine_similarity:   of the states of the token for which it is smallest
    largest_difference:  between two elements
    relative_difference: the norm of all differences over the norm of the reference
    """
    served_states, reference_states = (
        served.astype(np.float64),
        reference.astype(np.float64),
    )  # [T, hidden]
    norms = np.linalg.norm(served_states, axis=-1) * np.linalg.norm(
        reference_states, axis=-1
    )  # [T]
    cosines = (served_states * reference_states).sum(axis=-1) / np.maximum(
        norms, np.finfo(np.float64).tiny
    )
    differences = served_states - reference_states
    return {
        "cosine_similarity": float(cosines.min()),
        "largest_difference": float(np.abs(differences).max()),
        "relative_difference": float(
            np.linalg.norm(differences) / np.linalg.norm(reference_states)
        ),
    }


def summarise_states(items: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """The means over the items, and the largest difference of all of them."""

    def mean(name: str, meaning: str) -> Metric:
        return average([item[name] for item in items], False, meaning)

    max_difference = max(item["largest_difference"] for item in items)
    return {
        "cosine_similarity": mean(
            "cosine_similarity", "mean over the texts of the smallest cosine of a token's states"
        ),
        "relative_difference": mean(
            "relative_difference", "mean over the texts of |served - reference| / |reference|"
        ),
        "largest_difference": Metric(
            max_difference, None, None, False, "largest difference of an element of a state"
        ),
    }


def run_encode(
    settings: TaskSettings, model: EvaluatedModel, progress: ProgressCallback
) -> TaskResult:
    """Encode the texts of settings.data_file, settings.batch_size of them in flight."""
    from launcher_scripts.evaluation.tasks.transformers_model import TransformersEncoder

    texts = read_encoder_texts(settings)
    reference = TransformersEncoder(Path(str(settings.reference)))
    fields = [{"text": text} for text in texts]
    rows = [
        replace(
            row_of(model, prompt, settings.generation, ()),
            output_len=0,
            decoder_input_ids=(),
            return_hidden_state=True,
        )
        for prompt in prompts_of(settings, TEMPLATE, fields, "text")
    ]

    def parts(first: int) -> Iterator[list[dict[str, float]]]:
        """The agreement of PART texts, and of the next ones, from a part's number on."""
        for begin in range(first * PART, len(rows), PART):
            part, served = rows[begin : begin + PART], []
            for states in model.model.hidden_states(part, settings.batch_size):
                served.append(states)
                progress(begin + len(served), len(rows))
            yield [_agreement(*pair, reference.states) for pair in zip(part, served, strict=True)]

    agreements = itertools.chain.from_iterable(model.continued(parts))
    items: list[dict[str, Any]] = [
        {"index": index, "text": text, "tokens": len(row.input_ids), **agreement}
        for index, (row, text, agreement) in enumerate(zip(rows, texts, agreements, strict=True))
    ]
    return TaskResult(summarise_states(items), items)


def _agreement(
    row: GenerateRequest, served: States, states_of: Callable[[GenerateRequest], States]
) -> dict[str, float]:
    expected = states_of(row)
    if expected.shape != served.shape:
        label = "the served model and the reference have states of other sizes"
        sizes = f"{served.shape} and {expected.shape}"
        raise ConfigError(problem(label, got=sizes, change=REFERENCE_KEY))
    return compare_states(served, expected)
