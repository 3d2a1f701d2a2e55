"""The engine's answers as tensors of the contract, for every model_type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.contract.requests import (
    PROMPT_LOG_PROBS,
    TOKEN_LOG_PROBS,
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
)
from launcher_scripts.engine.core.requests import real_ids

Outputs = Sequence[GenerateOutput]
Requests = Sequence[GenerateRequest]


@dataclass(frozen=True)
class Shape:
    """Properties that the tensors of a response depend on, besides rows and outputs.

    padding:         columns of the request behind those of its longest row
    end_id:          the model's, for rows that name none
    dtype:           the model's compute type
    prompt_start_id: the model's first id that is a virtual token in rows with a prompt
    requested:       the tensors that the client asked for
    increments:      the axis `generated` of log-probabilities has the tokens of one response
    """

    padding: int
    end_id: int
    dtype: torch.dtype
    prompt_start_id: int
    requested: Collection[str]
    increments: bool = False


def gpt_tensors(requests: Requests, outputs: Outputs, shape: Shape) -> dict[str, Tensor]:
    """The answer's tensors, batch axis first and a beam axis as wide as the widest row second.

    Of output_ids, log-probabilities and context_logits only those that are wanted.

    output_ids [B, beam, longest prompt + padding + longest output]: prompt, then what was
    generated, then the row's end id; the hypotheses of a row best first. A row with fewer has
    sequence_length 0 in the rest. Virtual tokens, in rows with a prompt the ids from
    prompt_start_id on, are left out everywhere.
    """
    prompts = [real_ids(request, shape.prompt_start_id) for request in requests]
    width = shape.padding + max(map(len, prompts))
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
    if "output_ids" in shape.requested:
        ids = np.empty((len(requests), beams, width + longest), dtype=np.uint32)
        ids[:] = end_ids(requests, shape.end_id).astype(np.uint32)[:, None, None]
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids[row, : len(output.hypotheses), : len(prompt)] = prompt
            write_ids(ids[row], len(prompt), output)
        tensors["output_ids"] = torch.from_numpy(ids)
    tensors.update(scores(requests, outputs, longest, shape))
    if any(output.context_embeddings is not None for output in outputs):
        tensors["context_embeddings"] = context_embeddings(outputs, beams)
    return tensors


def t5_tensors(requests: Requests, outputs: Outputs, shape: Shape) -> dict[str, Tensor]:
    """The answer's tensors, batch axis first and a beam axis as wide as the widest row second.

    Of output_ids, log-probabilities and context_logits only those that are wanted.

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
    if "output_ids" in shape.requested:
        ids = np.zeros((len(requests), beams, width), dtype=np.int32)
        ends = end_ids(requests, shape.end_id).astype(np.int32)
        for row, output in enumerate(outputs):
            if not output.beams:
                ids[row, 0, :longest] = ends[row]
            write_ids(ids[row], 0, output)
        tensors["output_ids"] = torch.from_numpy(ids)
    tensors.update(scores(requests, outputs, width, shape))
    return tensors


def encoder_tensors(requests: Requests, outputs: Outputs, shape: Shape) -> dict[str, Tensor]:
    """The answer's tensors in shape.dtype, zeros after a row's tokens and for rows not asked.

    output_hidden_state [B, width, hidden], output_attentions [B, layers, heads, width, width]: as
    wide as the request
    """
    states, dtype = [output.hidden_state for output in outputs], shape.dtype
    width = shape.padding + max(map(len, states))
    hidden = torch.zeros(len(outputs), width, states[0].shape[1], dtype=dtype)
    for row, state in enumerate(states):
        hidden[row, : state.shape[0]] = state
    tensors = {"output_hidden_state": hidden}
    requested = [output.attentions for output in outputs if output.attentions is not None]
    if any(request.return_attentions for request in requests):
        sizes = (len(outputs), *requested[0].shape[:2], width, width)
        tensors["output_attentions"] = attentions = torch.zeros(sizes, dtype=dtype)
        for row, output in enumerate(outputs):
            if output.attentions is not None:
                size = output.attentions.shape[-1]
                attentions[row, :, :, :size, :size] = output.attentions
    return tensors


def agm_tensors(requests: Requests, outputs: Outputs, shape: Shape) -> dict[str, Tensor]:
    """The answer's tensors as for a GPT, output_ids [B, beams, largest max_output_len]."""
    tensors = gpt_tensors(requests, outputs, replace(shape, padding=0))
    if "output_ids" in tensors:
        prompts = [real_ids(request, shape.prompt_start_id) for request in requests]
        pairs = zip(prompts, requests, strict=True)
        total_len = max(len(prompt) + request.output_len for prompt, request in pairs)
        tensors["output_ids"] = tensors["output_ids"][..., : max(1, total_len)]
    for name in {"output_ids", "sequence_length"} & tensors.keys():
        tensors[name] = tensors[name].to(torch.int32).contiguous()
    return tensors


# model_type -> how its answers become tensors
ANSWER_TENSORS: dict[str, Callable[[Requests, Outputs, Shape], dict[str, Tensor]]] = {
    "GPT": gpt_tensors,
    "T5": t5_tensors,
    "T5-Encoder": encoder_tensors,
    "Agm": agm_tensors,
    "BART": t5_tensors,
}


def beam_axis(outputs: Outputs) -> int:
    """Number of hypotheses of the widest row."""
    return max(len(output.hypotheses) for output in outputs)


def end_ids(requests: Requests, default: int) -> NDArray[Any]:
    """The id that ends each row, int64 [B]; `default` for those that name none."""
    return np.array([default if request.end_id is None else request.end_id for request in requests])


def write_ids(ids: NDArray[Any], start: int, output: GenerateOutput) -> None:
    """Write what a row generated into its ids [beam, time], from the column `start` on."""
    for beam, hypothesis in enumerate(output.hypotheses):
        ids[beam, start : start + len(hypothesis.output_ids)] = hypothesis.output_ids


def scores(requests: Requests, outputs: Outputs, longest: int, shape: Shape) -> dict[str, Tensor]:
    """Log-probabilities and context_logits that rows have asked for and that are wanted.

    longest: tokens in the axis of what was generated, without increments
    """
    requested = shape.requested
    if shape.increments:
        longest = max(1, *map(_num_log_probs, outputs))
    tensors = log_prob_tensors(outputs, longest, requested)
    if any(request.return_log_probs for request in requests):
        tensors.update(log_probs(outputs, longest, requested))
    if "context_logits" in requested:
        tensors.update(context_logits(outputs))
    return tensors


def _num_log_probs(output: GenerateOutput) -> int:
    """Tokens whose log-probabilities the output has."""
    scores = output.token_log_probs
    return max(len(output.output_log_probs), 0 if scores is None else len(scores.log_probs))


def log_probs(outputs: Outputs, longest: int, requested: Collection[str]) -> dict[str, Tensor]:
    """Log-probabilities of every hypothesis, [B, beam] and, if wanted, [B, beam, longest]; 0 for
    padding."""
    beams = beam_axis(outputs)
    sums = np.zeros((len(outputs), beams), dtype=np.float32)
    for row, output in enumerate(outputs):
        for beam, hypothesis in enumerate(output.hypotheses):
            sums[row, beam] = hypothesis.cum_log_probs or 0.0
    tensors = {"cum_log_probs": torch.from_numpy(sums)}
    if "output_log_probs" in requested:
        per_token = np.zeros((len(outputs), beams, longest), dtype=np.float32)
        for row, output in enumerate(outputs):
            for beam, hypothesis in enumerate(output.hypotheses):
                values = hypothesis.output_log_probs
                per_token[row, beam, : len(values)] = values
        tensors["output_log_probs"] = torch.from_numpy(per_token)
    return tensors


def context_embeddings(outputs: Outputs, beams: int) -> Tensor:
    """Float32 [B, beams, hidden], the same for all beams; zeros for rows not asked."""
    embeddings = [output.context_embeddings for output in outputs]
    size = next(total.shape[0] for total in embeddings if total is not None)
    rows = [torch.zeros(size) if total is None else total for total in embeddings]
    return torch.stack(rows)[:, None].expand(-1, beams, -1).contiguous()


def context_logits(outputs: Outputs) -> dict[str, Tensor]:
    """Float32 [B, longest prompt, vocab], zeros after a row's prompt and for rows not asked.

    Nothing where no row was asked.
    """
    values = [output.context_logits for output in outputs if output.context_logits is not None]
    if not values:
        return {}
    longest = max(logits.shape[0] for logits in values)
    padded = torch.zeros(len(outputs), longest, values[0].shape[1])
    for row, output in enumerate(outputs):
        if output.context_logits is not None:
            padded[row, : output.context_logits.shape[0]] = output.context_logits
    return {"context_logits": padded}


def log_prob_tensors(
    outputs: Outputs, longest: int, requested: Collection[str]
) -> dict[str, Tensor]:
    """Log-probabilities of generated tokens [B, beam, longest] and of prompts [B, longest prompt],
    each with [..., K] of the most likely tokens; only `requested` ones that any row requests.

    0 after a row's tokens, for rows not asked, and beyond a row's own K. Only the first of the
    beams has any: a beam search has none.
    """
    rows = {
        at: output.token_log_probs for at, output in enumerate(outputs) if output.token_log_probs
    }
    generated = _filled(rows, (len(outputs), longest), TOKEN_LOG_PROBS, requested)
    for name, tensor in generated.items():
        generated[name] = tensor.new_zeros(len(outputs), beam_axis(outputs), *tensor.shape[1:])
        generated[name][:, 0] = tensor
    rows = {
        at: output.prompt_log_probs for at, output in enumerate(outputs) if output.prompt_log_probs
    }
    shape = (len(outputs), max([1, *(len(row.log_probs) for row in rows.values())]))
    return {**generated, **_filled(rows, shape, PROMPT_LOG_PROBS, requested)}


def _filled(
    rows: Mapping[int, ModelLogProbs],
    shape: tuple[int, int],
    fields: Mapping[str, str],
    requested: Collection[str],
) -> dict[str, Tensor]:
    """The rows' fields in tensors of `shape`, [B, tokens] or, with the K likeliest, [B, tokens, K];
    without these where K is 0.
    """
    filled = {}
    for name, field in fields.items():
        values = {at: getattr(output, field) for at, output in rows.items() if name in requested}
        sizes = [value.shape[1:].numel() for value in values.values()]
        if not any(sizes):
            continue
        some = next(iter(values.values()))
        padded = some.new_zeros(*shape, *([max(sizes)] if some.dim() == 2 else []))
        for at, local in values.items():
            index = (at, *map(slice, local.shape))
            padded[index] = local
        filled[name] = padded
    return filled


def news(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[GenerateOutput],
    before: Sequence[int],
    finished: Sequence[int],
) -> torch.Tensor:
    """The tensor `news` of a response: INT32 [B, beam, 4 + n].

    Of every beam: how many tokens it has, how many of them are the prompt, the place of the first
    id that follows here, the EndCode where no more will come, else 0; then the ids from that place
    on, then zeros.
    A beam whose tokens are all news begins with its prompt; one that a row does not have has none.

    prompts: of each row, what its output_ids begin with
    before:  of each row, how many generated tokens the earlier responses held
    finished: of each row, the EndCode's number where no more tokens will come, else 0
    """
    rows = []
    for prompt, output, count, end in zip(prompts, outputs, before, finished, strict=True):
        start = len(prompt) + count if count else 0
        rows.append(
            [
                (
                    len(prompt) + len(beam.output_ids),
                    len(prompt),
                    start,
                    end,
                    *(() if count else prompt),
                    *beam.output_ids[count:],
                )
                for beam in output.hypotheses
            ]
        )
    beams = max(map(len, rows))
    packed = torch.zeros(
        len(rows), beams, max(len(beam) for row in rows for beam in row), dtype=torch.int32
    )
    values = packed.numpy()
    for number, row in enumerate(rows):
        values[number, :, 3] = finished[number]
        for beam, ids in enumerate(row):
            values[number, beam, : len(ids)] = ids
    return packed
