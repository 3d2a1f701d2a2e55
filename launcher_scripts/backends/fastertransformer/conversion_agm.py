"""Agm: the contract's tensors to rows for the engine, and the engine's answers back to tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer import conversion
from launcher_scripts.backends.fastertransformer.row_values import row_values, token_ids, trimmed
from launcher_scripts.common.errors import Problems, RequestError
from launcher_scripts.contract.protocol import GenerateOutput, GenerateRequest


def to_requests(tensors: Mapping[str, Tensor]) -> list[GenerateRequest]:
    """One row per batch item of a request's tensors (those that were sent).

    Shapes as in conversion.to_requests; max_output_len counts the prompt's tokens, too. Raises
    RequestError that names every wrong tensor.
    """
    ids = token_ids(tensors, "input_ids")
    values = row_values(tensors, ids.shape[0], ("sequence_length", "max_output_len"))
    prompts = trimmed("input_ids", ids, "sequence_length", values.columns["sequence_length"])
    problems = Problems("the request")
    wholes = values.columns["max_output_len"]
    for prompt, whole in zip(prompts, wholes, strict=True):
        if whole < len(prompt):
            problems.add(
                "max_output_len counts the prompt's tokens, too",
                got=whole,
                choices=[f"at least {len(prompt)}"],
            )
    problems.raise_if_any(RequestError)
    return [
        GenerateRequest(
            input_ids=prompt,
            output_len=wholes[row] - len(prompt),
            **values.generation(row),
        )
        for row, prompt in enumerate(prompts)
    ]


def to_tensors(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[GenerateOutput],
    default_end_id: int,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The answer's tensors as for a GPT, output_ids [B, beams, largest max_output_len]."""
    whole = max(len(request.input_ids) + request.output_len for request in requests)
    width = max(len(request.input_ids) for request in requests)
    tensors = conversion.to_tensors(requests, outputs, width, default_end_id, 0, wanted)
    if "output_ids" in tensors:
        tensors["output_ids"] = tensors["output_ids"][..., : max(1, whole)]
    for name in {"output_ids", "sequence_length"} & tensors.keys():
        tensors[name] = tensors[name].to(torch.int32).contiguous()
    return tensors
