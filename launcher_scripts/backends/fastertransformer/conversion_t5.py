"""T5: the contract's tensors to rows for the engine, and the engine's answers back to tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer.model_log_probs import model_log_probs
from launcher_scripts.backends.fastertransformer.row_values import (
    beam_axis,
    context_logits,
    end_ids,
    log_probs,
    row_values,
    token_ids,
    trimmed,
    write_ids,
)
from launcher_scripts.common.errors import RequestError, problem
from launcher_scripts.contract.protocol import GenerateOutput, GenerateRequest

NO_TOKEN = (1 << 32) - 1


def to_requests(tensors: Mapping[str, Tensor]) -> list[GenerateRequest]:
    """One row per batch item of a request's tensors (those that were sent).

    Shapes: input_ids [B, M], decoder_input_ids [B, T], word lists [B, 2, n] or [2, n] for all
    rows, everything else [B] or [B, 1]. Raises RequestError that names every wrong tensor.
    """
    ids = token_ids(tensors, "input_ids")
    values = row_values(tensors, ids.shape[0], ("sequence_length", "max_output_len"))
    sources = trimmed("input_ids", ids, "sequence_length", values.columns["sequence_length"])
    forced = _decoder_ids(tensors, ids.shape[0])
    return [
        GenerateRequest(
            input_ids=source,
            output_len=values.columns["max_output_len"][row],
            decoder_input_ids=forced[row],
            **values.generation(row),
        )
        for row, source in enumerate(sources)
    ]


def to_tensors(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[GenerateOutput],
    default_end_id: int,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The answer's tensors, batch axis first and a beam axis as wide as the widest row second.

    Of output_ids, log-probabilities and context_logits only those that are `wanted`.

    output_ids [B, beam, most tokens asked for]: what was generated, without a beam search the row's
    end id up to the longest row's end, then 0; the hypotheses of a row best first. A row with fewer
    has sequence_length 0 in the rest.
    """
    width = max(1, *(request.output_len for request in requests))
    longest = max(len(output.output_ids) for output in outputs)
    beams = beam_axis(outputs)
    lengths = np.zeros((len(requests), beams), dtype=np.int32)
    for row, output in enumerate(outputs):
        for beam, hypothesis in enumerate(output.hypotheses):
            lengths[row, beam] = len(hypothesis.output_ids)
    tensors = {"sequence_length": torch.from_numpy(lengths)}
    if "output_ids" in wanted:
        ids = np.zeros((len(requests), beams, width), dtype=np.int32)
        ends = end_ids(requests, default_end_id).astype(np.int32)
        for row, output in enumerate(outputs):
            if not output.beams:
                ids[row, 0, :longest] = ends[row]
            write_ids(ids[row], 0, output)
        tensors["output_ids"] = torch.from_numpy(ids)
    if any(request.return_log_probs for request in requests):
        tensors.update(log_probs(outputs, width, wanted))
    tensors.update(model_log_probs(outputs, width, wanted))
    if "context_logits" in wanted and any(each.context_logits is not None for each in outputs):
        tensors["context_logits"] = context_logits(outputs)
    return tensors


def to_encoder_requests(tensors: Mapping[str, Tensor]) -> list[GenerateRequest]:
    """One row per batch item: input_ids [B, M], everything else [B] or [B, 1]."""
    ids = token_ids(tensors, "input_ids")
    values = row_values(tensors, ids.shape[0], ("sequence_length", "is_return_attentions"))
    sources = trimmed("input_ids", ids, "sequence_length", values.columns["sequence_length"])
    return [
        GenerateRequest(
            input_ids=source,
            output_len=0,
            return_hidden_state=True,
            return_attentions=values.columns["is_return_attentions"][row],
            **values.learned[row],
        )
        for row, source in enumerate(sources)
    ]


def to_encoder_tensors(
    requests: Sequence[GenerateRequest],
    outputs: Sequence[GenerateOutput],
    width: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The answer's tensors in `dtype`, zeros after a row's tokens and for rows not asked.

    output_hidden_state [B, width, hidden], output_attentions [B, layers, heads, width, width];
    `width` is the number of columns of the request's input_ids.
    """
    states = [output.hidden_state for output in outputs]
    hidden = torch.zeros(len(outputs), width, states[0].shape[1], dtype=dtype)
    for row, state in enumerate(states):
        hidden[row, : state.shape[0]] = state
    tensors = {"output_hidden_state": hidden}
    asked = [output.attentions for output in outputs if output.attentions is not None]
    if any(request.return_attentions for request in requests):
        shape = (len(outputs), *asked[0].shape[:2], width, width)
        tensors["output_attentions"] = attentions = torch.zeros(shape, dtype=dtype)
        for row, output in enumerate(outputs):
            if output.attentions is not None:
                size = output.attentions.shape[-1]
                attentions[row, :, :, :size, :size] = output.attentions
    return tensors


def _decoder_ids(tensors: Mapping[str, Tensor], rows: int) -> list[tuple[int, ...]]:
    """Every row's decoder_input_ids without its padding."""
    if "decoder_input_ids" not in tensors:
        return [()] * rows
    ids = token_ids(tensors, "decoder_input_ids")
    if ids.shape[0] != rows:
        raise RequestError(
            problem(
                "decoder_input_ids needs one row per row of input_ids",
                got=ids.shape[0],
                choices=(rows,),
            )
        )
    lengths = ids.shape[1] - (ids == NO_TOKEN).flip(1).long().cumprod(1).sum(1)
    return [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]
