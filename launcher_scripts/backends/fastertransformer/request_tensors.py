"""The tensors of a request as rows for the engine, by the contract of the model's type."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from launcher_scripts.common.errors import Problems, RequestError, problem
from launcher_scripts.contract.contracts import Contract
from launcher_scripts.contract.requests import (
    NO_TASK,
    NO_TOKEN,
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    TASK_FIELDS,
    WORD_FIELDS,
    GenerateRequest,
    PromptType,
    SamplingParameters,
)
from launcher_scripts.contract.tensors import GUIDED_GRAMMAR
from launcher_scripts.contract.tensors import Tensor as Spec

_FIELDS = {**SAMPLING_FIELDS, **REQUEST_FIELDS, **TASK_FIELDS}

EMBEDDING, LENGTHS, TYPE = (
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
)
PROMPT_TYPES = {
    PromptType.NONE: "none",
    PromptType.SOFT: "soft prompt, in front of input_ids",
    PromptType.TABLE: "p-tuning and prompt tuning: ids from prompt_learning_start_id on are its "
    "rows",
}


def to_requests(contract: Contract, tensors: Mapping[str, Tensor]) -> list[GenerateRequest]:
    """One row per batch item of a request's tensors (those that were sent).

    Shapes: input_ids [B, M], decoder_input_ids [B, T], request_prompt_embedding [B, virtual
    tokens, hidden], word lists [B, 2, n] or [2, n] for all rows, biases and grammars [B, n] or [n]
    for all rows, everything else [B] or [B, 1]. Raises RequestError that names every wrong tensor.
    """
    ids = _ids(tensors, "input_ids")
    rows = ids.shape[0]
    problems = Problems("the request")
    columns = {
        name: _column(contract.by_name[name], tensor, problems, rows)
        for name, tensor in tensors.items()
        if name in _FIELDS or name in (contract.lengths, contract.output_len)
    }
    fields = {
        **{field: columns[name] for name, field in REQUEST_FIELDS.items() if name in columns},
        **{
            field: _words(tensors[name], name, rows, problems)
            for name, field in WORD_FIELDS.items()
            if name in tensors
        },
        **_biases(tensors, rows, problems),
        **_grammars(tensors, rows, problems),
        **_tasks(columns),
        **_prompts(tensors, contract, problems, rows),
    }
    problems.raise_if_any(RequestError)
    inputs = _trimmed(ids, contract.lengths, columns[contract.lengths])
    fields |= {
        "input_ids": inputs,
        "output_len": _output_lens(contract, columns, inputs),
        "return_hidden_state": [contract.encoder_only] * rows,
        **_decoder_ids(tensors, rows),
    }
    sampling = {field: columns[name] for name, field in SAMPLING_FIELDS.items() if name in columns}
    return [
        GenerateRequest(
            **{field: values[row] for field, values in fields.items()},
            sampling=SamplingParameters(
                **{field: values[row] for field, values in sampling.items()}
            ),
        )
        for row in range(rows)
    ]


def padding(tensors: Mapping[str, Tensor], rows: Sequence[GenerateRequest]) -> int:
    """Columns of a request's input_ids [B, M] behind those of its longest row."""
    return tensors["input_ids"].shape[1] - max(len(row.input_ids) for row in rows)


def _ids(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of ids [B, M]."""
    ids = tensors[name]
    if ids.dim() != 2:
        raise RequestError(problem(f"{name} must be [batch, time]", got=list(ids.shape)))
    return ids


def _trimmed(ids: Tensor, name: str, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """The first lengths[b] of every row of input_ids [B, M]."""
    problems = Problems("the request")
    for length in lengths:
        if not 0 <= length <= ids.shape[1]:
            choices = (f"0-{ids.shape[1]}",)
            problems.add(f"{name} must be within input_ids", got=length, choices=choices)
    problems.raise_if_any(RequestError)
    return [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]


def _output_lens(
    contract: Contract, columns: Mapping[str, Sequence[int]], inputs: Sequence[tuple[int, ...]]
) -> list[int]:
    """Number of tokens that each row is to generate."""
    name = contract.output_len
    if name is None:
        return [0] * len(inputs)
    if not contract.counts_prompts:
        return list(columns[name])
    problems = Problems("the request")
    for prompt, total in zip(inputs, columns[name], strict=True):
        if total < len(prompt):
            choices = [f"at least {len(prompt)}"]
            problems.add(f"{name} counts the prompt's tokens, too", got=total, choices=choices)
    problems.raise_if_any(RequestError)
    return [total - len(prompt) for prompt, total in zip(inputs, columns[name], strict=True)]


def _decoder_ids(tensors: Mapping[str, Tensor], rows: int) -> dict[str, list[tuple[int, ...]]]:
    """The field of every row's decoder_input_ids without their padding, where they were sent."""
    name = "decoder_input_ids"
    if name not in tensors:
        return {}
    ids = _ids(tensors, name).long()
    if ids.shape[0] != rows:
        message = f"{name} needs one row per row of input_ids"
        raise RequestError(problem(message, got=ids.shape[0], choices=(rows,)))
    lengths = ids.shape[1] - (ids == NO_TOKEN).flip(1).long().cumprod(1).sum(1)
    return {name: [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]}


def _column(spec: Spec, tensor: Tensor, problems: Problems, rows: int) -> list[Any]:
    """One value per row of a tensor."""
    values = (tensor if tensor.dim() == 1 else tensor.reshape(-1)).tolist()
    if len(values) != rows:
        message = f"{spec.name} needs one value per row of input_ids, [{rows}]"
        problems.add(message, got=list(tensor.shape))
        return [None] * rows
    return [spec.value(value) for value in values]


def _words(
    tensor: Tensor, name: str, rows: int, problems: Problems
) -> list[tuple[tuple[int, ...], ...]]:
    """The words of every row from [B, 2, n]: ids, and the end offsets up to the first negative.

    An end offset of 0 ends a word without ids, which is left out: old tools send it for no words.
    """
    lists = tensor.long()
    if lists.dim() == 2:
        lists = lists.expand(rows, *lists.shape)
    if lists.dim() != 3 or lists.shape[:2] != (rows, 2):
        problems.add(f"{name} must be [{rows}, 2, n]: ids, end offsets", got=list(tensor.shape))
        return []
    words = []
    for ids, offsets in lists.tolist():
        ends = offsets[: next((i for i, end in enumerate(offsets) if end < 0), len(offsets))]
        ends = list(itertools.dropwhile(lambda end: end == 0, ends))
        bounds = [0, *ends]
        if ends != sorted(set(ends)) or (ends and ends[-1] > len(ids)):
            problems.add(f"{name} needs ascending end offsets within its {len(ids)} ids", got=ends)
            continue
        spans = itertools.pairwise(bounds)
        words.append(tuple(tuple(ids[start:end]) for start, end in spans))
    return words


def _biases(
    tensors: Mapping[str, Tensor], rows: int, problems: Problems
) -> dict[str, list[tuple[tuple[int, float], ...]]]:
    """The field of every row's biases from ids and values [B, n]; -1 among the ids pads."""
    names = ("logit_bias_ids", "logit_bias_values")
    present = [tensors[name] for name in names if name in tensors]
    if not present:
        return {}
    shapes = [list(tensor.shape) for tensor in present]
    if len(present) == 1 or shapes[0] != shapes[1]:
        problems.add(f"{' and '.join(names)} must come together, in one shape", got=shapes)
        return {}
    ids, values = (tensor.expand(rows, -1) if tensor.dim() == 1 else tensor for tensor in present)
    if ids.dim() != 2 or ids.shape[0] != rows:
        problems.add(f"{' and '.join(names)} must be [{rows}, n]", got=shapes[0])
        return {}
    biases = [
        tuple((token, value) for token, value in zip(*pair, strict=True) if token != -1)
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return {"logit_bias": biases}


def _grammars(
    tensors: Mapping[str, Tensor], rows: int, problems: Problems
) -> dict[str, list[str | None]]:
    """The field of every row's grammar from UTF-8 [B, n] with zeros behind it; empty: None."""
    name = GUIDED_GRAMMAR.name
    if name not in tensors:
        return {}
    tensor = tensors[name]
    rows_of_text = tensor.expand(rows, -1) if tensor.dim() == 1 else tensor
    if rows_of_text.dim() != 2 or rows_of_text.shape[0] != rows:
        problems.add(f"{name} must be [{rows}, n]", got=list(tensor.shape))
        return {}
    texts = []
    for row in rows_of_text.numpy():
        try:
            texts.append(row.tobytes().rstrip(b"\0").decode() or None)
        except ValueError as error:
            problems.add(f"{name} is not UTF-8: {error}")
    return {"guided_grammar": texts}


def _tasks(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The fields of every row's GenerateRequest that name a task."""
    return {
        field: [None if task == NO_TASK else task for task in columns[name]]
        for name, field in TASK_FIELDS.items()
        if name in columns
    }


def _prompts(
    tensors: Mapping[str, Tensor], contract: Contract, problems: Problems, rows: int
) -> dict[str, list[Any]]:
    """The fields of every row's GenerateRequest that are about the row's own prompt."""
    if tensors.keys().isdisjoint((EMBEDDING, LENGTHS, TYPE)):
        return {}
    lengths, types = (
        _column(contract.by_name[name], tensors[name], problems, rows)
        if name in tensors
        else [None] * rows
        for name in (LENGTHS, TYPE)
    )
    if TYPE not in contract.by_name:  # a request's own embeddings are always a prompt table
        types = [PromptType.TABLE] * rows
    embeddings = _embeddings(tensors, lengths, types, problems)
    return {
        "prompt_embedding": embeddings,
        "soft_prompt": [
            embedding is not None and kind == PromptType.SOFT
            for kind, embedding in zip(types, embeddings, strict=True)
        ],
    }


def _embeddings(
    tensors: Mapping[str, Tensor],
    lengths: Sequence[int | None],
    types: Sequence[int | None],
    problems: Problems,
) -> list[Tensor | None]:
    """Every row's own prompt, float32 [virtual tokens, hidden]; None for rows without one."""
    embedding = tensors.get(EMBEDDING)
    rows = len(types)
    for kind in {*types} - {None, *PROMPT_TYPES}:
        problems.add(
            f"this {TYPE} is not supported",
            got=kind,
            choices=[f"{number:d} ({meaning})" for number, meaning in PROMPT_TYPES.items()],
        )
    if embedding is None:
        if any(lengths):
            problems.add(f"{LENGTHS} comes without {EMBEDDING}")
        return [None] * rows
    if LENGTHS not in tensors or None in types:
        problems.add(f"{EMBEDDING} needs {LENGTHS}" + (f" and {TYPE}" if None in types else ""))
        return [None] * rows
    if embedding.dim() != 3 or embedding.shape[0] != rows:
        problems.add(
            f"{EMBEDDING} must be [{rows}, virtual tokens, hidden size]", got=list(embedding.shape)
        )
        return [None] * rows
    result: list[Tensor | None] = []
    for row, (length, kind) in enumerate(zip(lengths, types, strict=True)):
        if length is None or not 0 <= length <= embedding.shape[1]:
            problems.add(
                f"{LENGTHS} must be within {EMBEDDING}",
                got=length,
                choices=[f"0-{embedding.shape[1]}"],
            )
        used = length and kind != PromptType.NONE
        result.append(embedding[row, :length].float().clone() if used else None)
    return result
