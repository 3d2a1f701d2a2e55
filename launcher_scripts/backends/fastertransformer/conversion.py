"""GPT: the contract's tensors to rows for the engine, and the engine's answers back to tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer.model_log_probs import model_log_probs
from launcher_scripts.backends.fastertransformer.row_values import (
    beam_axis,
    context_embeddings,
    context_logits,
    end_ids,
    log_probs,
    row_values,
    token_ids,
    trimmed,
    write_ids,
)
from launcher_scripts.contract.protocol import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.prompts import real_ids


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
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The answer's tensors, batch axis first and a beam axis as wide as the widest row second.

    Of output_ids, log-probabilities and context_logits only those that are `wanted`.

    output_ids [B, beam, width + longest output]: prompt, then what was generated, then the row's
    end id; the hypotheses of a row best first. A row with fewer has sequence_length 0 in the rest.
    `width` is the number of columns of the request's input_ids. Virtual tokens, in rows with a
    prompt the ids from `prompt_start_id` on, are left out everywhere.
    """
    prompts = [real_ids(request, prompt_start_id) for request in requests]
    width -= max(len(request.input_ids) for request in requests) - max(map(len, prompts))
    longest = max(request.output_len for request in requests)
    beams = beam_axis(outputs)
    lengths = np.zeros((len(requests), beams), dtype=np.uint32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for beam, hypothesis in enumerate(output.hypotheses):
            lengths[row, beam] = len(prompt) + len(hypothesis.output_ids)
    starts = np.array([[len(prompt)] * beams for prompt in prompts], dtype=np.int32)
    tensors = {
        "sequence_length": torch.from_numpy(lengths),
        "response_input_lengths": torch.from_numpy(starts),
    }
    if "output_ids" in wanted:
        ids = np.empty((len(requests), beams, width + longest), dtype=np.uint32)
        ids[:] = end_ids(requests, default_end_id).astype(np.uint32)[:, None, None]
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids[row, : len(output.hypotheses), : len(prompt)] = prompt
            write_ids(ids[row], len(prompt), output)
        tensors["output_ids"] = torch.from_numpy(ids)
    if any(request.return_log_probs for request in requests):
        tensors.update(log_probs(outputs, longest, wanted))
    tensors.update(model_log_probs(outputs, longest, wanted))
    if "context_logits" in wanted and any(each.context_logits is not None for each in outputs):
        tensors["context_logits"] = context_logits(outputs)
    if any(output.context_embeddings is not None for output in outputs):
        tensors["context_embeddings"] = context_embeddings(outputs, beams)
    return tensors
