"""Requests as the tensors of the serving contract, and its answers as outputs.

Names, types and defaults come from contracts.py; a tensor whose rows all have the contract's
default is left out, so a server of the original understands everything but the extensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.connection import NUMPY_TYPES
from launcher_scripts.common.errors import RequestError, lookup, problem
from launcher_scripts.contract.contracts import CONTRACTS, Contract
from launcher_scripts.contract.requests import (
    NO_TASK,
    NO_TOKEN,
    PROMPT_LOG_PROBS,
    REQUEST_FIELDS,
    SAMPLING_FIELDS,
    TASK_FIELDS,
    TOKEN_LOG_PROBS,
    WORD_FIELDS,
    Beam,
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
    PromptType,
)
from launcher_scripts.contract.tensors import Tensor

_DEFAULTS = {
    tensor.name: tensor.default for contract in CONTRACTS.values() for tensor in contract.inputs
}
_VALUES = {
    **{name: attrgetter(f"sampling.{field}") for name, field in SAMPLING_FIELDS.items()},
    **{name: attrgetter(field) for name, field in REQUEST_FIELDS.items()},
}
States = NDArray[np.float32]  # [tokens, hidden] of an encoder


def request_tensors(
    rows: Sequence[GenerateRequest], model_type: str = "GPT"
) -> dict[str, NDArray[Any]]:
    """The input tensors of one request of several rows, each [rows, ...].

    Raises RequestError when some rows leave a value to the checkpoint (None) and others do not,
    and when a row asks for what the contract of its model has no tensor for.
    """
    contract = lookup(CONTRACTS, model_type, "model_type")
    require = partial(_require, contract, model_type)
    lengths = np.array([[len(row.input_ids)] for row in rows], dtype=np.uint32)  # [B, 1]
    output_lens = np.array([[row.output_len] for row in rows], dtype=np.uint32)
    tensors: dict[str, NDArray[Any]] = {
        "input_ids": _padded([row.input_ids for row in rows], 0),
        contract.lengths: lengths,
    }
    if contract.output_len is not None:
        tensors[contract.output_len] = output_lens + (lengths if contract.counts_prompts else 0)
        if any(row.return_hidden_state for row in rows):
            require("return_hidden_state")
    elif output_lens.any():
        raise RequestError(problem("this model generates no tokens", got=model_type))
    for name, value_of in _VALUES.items():
        values = [value_of(row) for row in rows]
        if all(value == _DEFAULTS[name] for value in values):
            continue
        require(name)
        tensors[name] = _column(contract.by_name[name], values)
    for name, field in WORD_FIELDS.items():
        words = [getattr(row, field) for row in rows]
        if any(words):
            tensors[name] = word_lists(words)
    if any(row.logit_bias for row in rows):
        tensors.update(bias_tensors(rows))
    if any(row.guided_grammar for row in rows):
        tensors["guided_grammar"] = grammar_tensor(rows)
    if any(row.decoder_input_ids for row in rows):
        require("decoder_input_ids")
        forced = [row.decoder_input_ids for row in rows]
        tensors["decoder_input_ids"] = _padded(forced, NO_TOKEN)
    for name, field in TASK_FIELDS.items():
        tasks = [getattr(row, field) for row in rows]
        if any(task is not None for task in tasks):
            require(name)
            numbers = [NO_TASK if task is None else task for task in tasks]
            tensors[name] = np.array(numbers, dtype=np.int32)[:, None]
    if any(row.prompt_embedding is not None for row in rows):
        require("request_prompt_embedding")
        local = prompt_tensors(rows)
        tensors.update({name: array for name, array in local.items() if name in contract.by_name})
    return tensors


def _padded(rows: Sequence[Sequence[int]], filler: int) -> NDArray[np.uint32]:
    """UINT32 [rows, longest]"""
    padded = np.full((len(rows), max(map(len, rows))), filler, dtype=np.uint32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def prompt_tensors(rows: Sequence[GenerateRequest]) -> dict[str, NDArray[Any]]:
    """The rows' own prompts; rows without one have the type 0.

    The embeddings keep their type, which must be the one the model computes in.
    """
    local = [row.prompt_embedding for row in rows if row.prompt_embedding is not None]
    longest = max(len(table) for table in local)
    embeddings = np.zeros((len(rows), longest, local[0].shape[1]), dtype=local[0].dtype)
    lengths = np.zeros((len(rows), 1), dtype=np.uint32)
    types = np.zeros((len(rows), 1), dtype=np.uint32)
    for index, row in enumerate(rows):
        if row.prompt_embedding is not None:
            lengths[index] = len(row.prompt_embedding)
            embeddings[index, : len(row.prompt_embedding)] = row.prompt_embedding
            types[index] = PromptType.SOFT if row.soft_prompt else PromptType.TABLE
    return {
        "request_prompt_embedding": embeddings,
        "request_prompt_lengths": lengths,
        "request_prompt_type": types,
    }


def _require(contract: Contract, model_type: str, tensor: str) -> None:
    if tensor not in contract.by_name:
        raise RequestError(
            problem(f"a model of type {model_type} has no input for this", got=tensor)
        )


def _column(tensor: Tensor, values: Sequence[Any]) -> NDArray[Any]:
    """One value per row, [B, 1]."""
    if any(value is None for value in values):
        message = f"either all rows of a request say {tensor.name} or none"
        raise RequestError(problem(message, got=list(values)))
    return np.array(values, dtype=NUMPY_TYPES[tensor.dtype])[:, None]


def word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Words of every row as the contract packs them, INT32 [B, 2, longest].

    [:, 0] holds the ids of all words one after another, padded with 0; [:, 1] where each word
    ends, padded with -1.
    """
    longest = max(1, *(sum(len(word) for word in words) for words in rows))
    packed = np.zeros((len(rows), 2, longest), dtype=np.int32)
    packed[:, 1] = -1
    for index, words in enumerate(rows):
        ids = [token for word in words for token in word]
        packed[index, 0, : len(ids)] = ids
        packed[index, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def bias_tensors(rows: Sequence[GenerateRequest]) -> dict[str, NDArray[Any]]:
    """The rows' biases, ids and values each [rows, longest]; the id -1 fills up."""
    longest = max(len(row.logit_bias) for row in rows)
    ids = np.full((len(rows), longest), -1, dtype=np.int32)
    values = np.zeros((len(rows), longest), dtype=np.float32)
    for index, row in enumerate(rows):
        for position, (token, value) in enumerate(row.logit_bias):
            ids[index, position], values[index, position] = token, value
    return {"logit_bias_ids": ids, "logit_bias_values": values}


def grammar_tensor(rows: Sequence[GenerateRequest]) -> NDArray[np.uint8]:
    """The rows' grammars as UTF-8, UINT8 [rows, longest]; zeros fill up."""
    texts = [(row.guided_grammar or "").encode() for row in rows]
    packed = np.zeros((len(rows), max(map(len, texts))), dtype=np.uint8)
    for target, text in zip(packed, texts, strict=True):
        target[: len(text)] = list(text)
    return packed


def output_names(rows: Sequence[GenerateRequest], model_type: str = "GPT") -> tuple[str, ...]:
    """The output tensors that these rows need."""
    contract = lookup(CONTRACTS, model_type, "model_type")
    if contract.encoder_only:
        return ("output_hidden_state",)
    names = ["output_ids", "sequence_length"]
    if contract.returns_prompts:
        names.append("response_input_lengths")
    if any(row.return_log_probs for row in rows):
        names += ["cum_log_probs", "output_log_probs"]
    if any(row.return_context_logits for row in rows):
        names.append("context_logits")
    if any(row.return_context_embeddings for row in rows):
        names.append("context_embeddings")
    names += list(TOKEN_LOG_PROBS)[: _tensors_of(max(row.num_log_probs for row in rows))]
    names += list(PROMPT_LOG_PROBS)[: _tensors_of(max(row.num_prompt_log_probs for row in rows))]
    return tuple(names)


def _tensors_of(count: int) -> int:
    """Return the number of tensors of ModelLogProbs with the `count` most likely tokens."""
    return 0 if count < 0 else 2 if count == 0 else 4


def row_outputs(
    rows: Sequence[GenerateRequest], tensors: Mapping[str, NDArray[Any]]
) -> list[GenerateOutput]:
    """The answer to `rows`, one output each.

    tensors: output_ids [B, beam, time], sequence_length [B, beam], cum_log_probs [B, beam],
             output_log_probs [B, beam, generated], context_logits [B, longest prompt, vocab],
             context_embeddings [B, beam, hidden], MODEL_LOG_PROBS of contract/tensors.py,
             response_input_lengths [B, beam] where output_ids starts with the prompt; of an
             encoder alone output_hidden_state [B, longest row, hidden]
    """
    if "output_hidden_state" in tensors:
        states = tensors["output_hidden_state"].astype(np.float32)
        return [
            GenerateOutput((), hidden_state=states[index, : len(row.input_ids)])
            for index, row in enumerate(rows)
        ]
    outputs = []
    starts = tensors.get("response_input_lengths")
    for index, row in enumerate(rows):
        prompt = 0 if starts is None else int(starts[index, 0])
        width = row.sampling.beam_width if row.output_len else 1
        beams = tuple(_beam(row, tensors, index, beam, prompt) for beam in range(width))
        logits = embeddings = None
        read = row.input_ids if starts is not None else row.decoder_input_ids
        if row.return_context_logits:
            logits = tensors["context_logits"][index, : len(read)]
        if row.return_context_embeddings:
            embeddings = tensors["context_embeddings"][index, 0]
        best = beams[0]
        outputs.append(
            GenerateOutput(
                output_ids=best.output_ids,
                cum_log_probs=best.cum_log_probs,
                output_log_probs=best.output_log_probs,
                context_logits=logits,
                context_embeddings=embeddings,
                token_log_probs=_log_probs(
                    tensors,
                    TOKEN_LOG_PROBS,
                    (index, 0),
                    len(best.output_ids),
                    row.num_log_probs,
                ),
                prompt_log_probs=_log_probs(
                    tensors, PROMPT_LOG_PROBS, (index,), max(1, len(read)), row.num_prompt_log_probs
                ),
                beams=beams if width > 1 else (),
            )
        )
    return outputs


def _log_probs(
    tensors: Mapping[str, NDArray[Any]],
    fields: Mapping[str, str],
    index: tuple[int, ...],
    tokens: int,
    count: int,
) -> ModelLogProbs | None:
    """Return the log-probabilities of the first `tokens` tokens at `index`, with the `count` most
    likely; None below 0."""
    if count < 0:
        return None
    local, ranks, *tops = (
        tensors[name][index][:tokens] for name in list(fields)[: _tensors_of(count)]
    )
    ids, values = tops or (np.zeros((len(local), 0)),) * 2
    return ModelLogProbs(local, ranks, ids[:, :count], values[:, :count])


def _beam(
    row: GenerateRequest,
    tensors: Mapping[str, NDArray[Any]],
    index: int,
    beam: int,
    prompt: int,
) -> Beam:
    """One hypothesis of row `index`, whose output_ids begin with `prompt` ids of the prompt."""
    end = int(tensors["sequence_length"][index, beam])
    ids = tuple(int(token) for token in tensors["output_ids"][index, beam, prompt:end])
    if not row.return_log_probs:
        return Beam(ids)
    per_token = tensors["output_log_probs"][index, beam, : end - prompt]
    total = float(tensors["cum_log_probs"][index, beam])
    return Beam(ids, total, tuple(float(value) for value in per_token))
