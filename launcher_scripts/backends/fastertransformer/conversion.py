"""GPT: the contract's tensors to rows for the engine, and the engine's answers back to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer.row_values import (
    beam_axis,
    context_embeddings,
    context_logits,
    log_probs,
    row_values,
    token_ids,
    trimmed,
)
from launcher_scripts.engine.prompts import real_ids
from launcher_scripts.protocol import GenerateOutput, GenerateRequest


def to_requests(tensors: Mapping[str, Tensor]) -> list[GenerateRequest]:
    """One row per batch item of a request's tensors (those that were sent).

    Shapes: input_ids [B, M], request_prompt_embedding [B, virtual tokens, hidden], word lists
    [B, 2, n] or [2, n] for all rows, everything else [B] or [B, 1]. Raises RequestError that names
    every wrong tensor.
    """
    ids = token_ids(tensors, "input_ids")
    names = ("input_lengths", "request_output_len")
    values = row_values(tensors, ids.shape[0], names, typed_prompts=True)
    prompts = trimmed("input_ids", ids, "input_lengths", values.columns["input_lengths"])
    return [
        GenerateRequest(
            input_ids=prompt,
            output_len=values.columns["request_output_len"][row],
            **values.generation(row),
        )
        for row, prompt in enumerate(prompts)
    ]


def to_tensors(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[GenerateOutput],
    width: int,
    default_end_id: int,
    prompt_start_id: int,
) -> dict[str, Tensor]:
    """The answer's tensors, batch axis first and a beam axis as wide as the widest row second.

    output_ids [B, beam, width + longest output]: prompt, then what was generated, then the row's
    end id; the hypotheses of a row best first. A row with fewer has sequence_length 0 in the rest.
    `width` is the number of columns of the request's input_ids. Virtual tokens, in rows with a
    prompt the ids from `prompt_start_id` on, are left out everywhere.
    """
    prompts = [real_ids(request, prompt_start_id) for request in requests]
    width -= max(len(request.input_ids) for request in requests) - max(map(len, prompts))
    longest = max(request.output_len for request in requests)
    beams = beam_axis(outputs)
    ids = torch.empty(len(requests), beams, width + longest, dtype=torch.int64)
    lengths = torch.zeros(len(requests), beams, dtype=torch.int64)
    for row, (request, prompt, output) in enumerate(zip(requests, prompts, outputs, strict=True)):
        ids[row] = default_end_id if request.end_id is None else request.end_id
        for beam, hypothesis in enumerate(output.hypotheses):
            text = (*prompt, *hypothesis.output_ids)
            ids[row, beam, : len(text)] = torch.tensor(text)
            lengths[row, beam] = len(text)
    tensors = {
        "output_ids": ids.to(torch.uint32),
        "sequence_length": lengths.to(torch.uint32),
        "response_input_lengths": torch.tensor(
            [[len(prompt)] * beams for prompt in prompts], dtype=torch.int32
        ),
    }
    if any(request.return_log_probs for request in requests):
        tensors.update(log_probs(outputs, longest))
    if any(output.context_logits is not None for output in outputs):
        tensors["context_logits"] = context_logits(outputs)
    if any(output.context_embeddings is not None for output in outputs):
        tensors["context_embeddings"] = context_embeddings(outputs, beams)
    return tensors
