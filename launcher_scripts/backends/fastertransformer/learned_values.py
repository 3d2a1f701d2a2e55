"""What a request says of prompts and IA3, per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from launcher_scripts.common.errors import Problems

TASKS, IA3 = "prompt_learning_task_name_ids", "ia3_tasks"
EMBEDDING, LENGTHS, TYPE = (
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
)
# request_prompt_type
NO_PROMPT, SOFT_PROMPT, PREFIX_PROMPT, PROMPT_TABLE = range(4)
TYPES = {
    NO_PROMPT: "none",
    SOFT_PROMPT: "soft prompt, in front of input_ids",
    PROMPT_TABLE: "p-tuning and prompt tuning: ids from prompt_learning_start_id on are its rows",
}


def learned_values(
    tensors: Mapping[str, Tensor], rows: int, problems: Problems, *, typed: bool
) -> list[dict[str, Any]]:
    """The fields of every row's GenerateRequest that are about prompts and IA3.

    typed: the model takes request_prompt_type, and wants it with a request's own embeddings; else
    these are always a prompt table
    """
    tasks, ia3, lengths, types = (
        _column(tensors, name, rows, problems) for name in (TASKS, IA3, LENGTHS, TYPE)
    )
    if not typed:
        types = [PROMPT_TABLE] * rows
    embeddings = _embeddings(tensors, rows, lengths, types, problems)
    return [
        {
            "prompt_task": task,
            "prompt_embedding": embedding,
            "soft_prompt": embedding is not None and kind == SOFT_PROMPT,
            "ia3_task": None if ia3_task == -1 else ia3_task,
        }
        for task, ia3_task, kind, embedding in zip(tasks, ia3, types, embeddings, strict=True)
    ]


def _column(
    tensors: Mapping[str, Tensor], name: str, rows: int, problems: Problems
) -> list[int | None]:
    """One number per row, None where the tensor was not sent."""
    tensor = tensors.get(name)
    if tensor is None:
        return [None] * rows
    values: list[int | None] = tensor.reshape(-1).long().tolist()
    if len(values) != rows:
        problems.add(
            f"{name} needs one value per row of input_ids, [{rows}]", got=list(tensor.shape)
        )
        return [None] * rows
    return values


def _embeddings(
    tensors: Mapping[str, Tensor],
    rows: int,
    lengths: list[int | None],
    types: list[int | None],
    problems: Problems,
) -> list[Tensor | None]:
    """Every row's own prompt, float32 [virtual tokens, hidden]; None for rows without one."""
    given = tensors.get(EMBEDDING)
    for kind in {*types} - {None, *TYPES}:
        problems.add(
            f"this {TYPE} is not supported",
            got=kind,
            choices=[f"{number} ({meaning})" for number, meaning in TYPES.items()],
        )
    if given is None:
        if any(lengths):
            problems.add(f"{LENGTHS} comes without {EMBEDDING}")
        return [None] * rows
    if LENGTHS not in tensors or None in types:
        problems.add(f"{EMBEDDING} needs {LENGTHS}" + (f" and {TYPE}" if None in types else ""))
        return [None] * rows
    if given.dim() != 3 or given.shape[0] != rows:
        problems.add(
            f"{EMBEDDING} must be [{rows}, virtual tokens, hidden size]", got=list(given.shape)
        )
        return [None] * rows
    found: list[Tensor | None] = []
    for row, (length, kind) in enumerate(zip(lengths, types, strict=True)):
        if length is None or not 0 <= length <= given.shape[1]:
            problems.add(
                f"{LENGTHS} must be within {EMBEDDING}", got=length, choices=[f"0-{given.shape[1]}"]
            )
        used = length and kind != NO_PROMPT
        found.append(given[row, :length].float().clone() if used else None)
    return found
