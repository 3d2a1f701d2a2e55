"""Encoding: an encoder's hidden states beside those of transformers on the same token ids.

data_file has a text a line; reference is the folder of the original, in Hugging Face's format,
whose encoder transformers runs in float32. An item is compared token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.config.evaluation import TaskSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.served.tensors import States
from launcher_scripts.evaluation.tasks.prompts import (
    numbered,
    prompts_of,
    read_lines,
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
)

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
