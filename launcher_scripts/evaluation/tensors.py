"""Requests as the tensors of the serving contract, and its answers as outputs.

Names, types and defaults come from contracts.py; a tensor whose rows all have the contract's
default is left out, so a server of the original understands everything but the extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.connection import NUMPY_TYPES
from launcher_scripts.common.errors import RequestError, lookup, problem
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.protocol import (
    Beam,
    GenerateOutput,
    GenerateRequest,
    ModelLogProbs,
    Tensor,
)

NO_TOKEN = (1 << 32) - 1  # fills up decoder_input_ids

_ROW_VALUES: dict[str, Callable[[GenerateRequest], Any]] = {
    "runtime_top_k": lambda row: row.sampling.top_k,
    "runtime_top_p": lambda row: row.sampling.top_p,
    "beam_search_diversity_rate": lambda row: row.sampling.beam_search_diversity_rate,
    "temperature": lambda row: row.sampling.temperature,
    "len_penalty": lambda row: row.sampling.len_penalty,
    "repetition_penalty": lambda row: row.sampling.repetition_penalty,
    "presence_penalty": lambda row: row.sampling.presence_penalty,
    "min_length": lambda row: row.sampling.min_length,
    "random_seed": lambda row: row.sampling.random_seed,
    "top_p_decay": lambda row: row.sampling.top_p_decay,
    "top_p_min": lambda row: row.sampling.top_p_min,
    "top_p_reset_ids": lambda row: row.sampling.top_p_reset_id,
    "frequency_penalty": lambda row: row.sampling.frequency_penalty,
    "output_presence_penalty": lambda row: row.sampling.output_presence_penalty,
    "min_p": lambda row: row.sampling.min_p,
    "num_log_probs": lambda row: row.num_log_probs,
    "num_prompt_log_probs": lambda row: row.num_prompt_log_probs,
    "beam_width": lambda row: row.sampling.beam_width,
    "no_repeat_ngram_size": lambda row: row.sampling.no_repeat_ngram_size,
    "prompt_learning_task_name_ids": lambda row: row.prompt_task,
    "start_id": lambda row: row.start_id,
    "end_id": lambda row: row.end_id,
    "is_return_log_probs": lambda row: row.return_log_probs,
    "is_return_context_logits": lambda row: row.return_context_logits,
    "is_return_context_embeddings": lambda row: row.return_context_embeddings,
    "is_return_attentions": lambda row: row.return_attentions,
}

_ROW_WORDS: dict[str, Callable[[GenerateRequest], tuple[tuple[int, ...], ...]]] = {
    "bad_words_list": lambda row: row.bad_words,
    "stop_words_list": lambda row: row.stop_words,
}

_DEFAULTS = {
    tensor.name: tensor.default for contract in CONTRACTS.values() for tensor in contract.inputs
}

# What ModelLogProbs holds of generated tokens, and of the prompt's.
_GENERATED = ("token_log_probs", "token_ranks", "top_log_prob_ids", "top_log_probs")
_OF_PROMPT = ("prompt_log_probs", "prompt_ranks", "prompt_top_ids", "prompt_top_log_probs")

# request_prompt_type: embeddings in front of input_ids, or rows that ids of input_ids name.
SOFT_PROMPT, PROMPT_TABLE = 1, 3


@dataclass(frozen=True)
class Names:
    """The tensors of a model_type that its rows are made of.

    lengths, output_len: names that the families spell differently
    known:               every input by its name
    prompt_returned:     whether output_ids starts with the prompt
    prompt_counts:       whether output_len includes the prompt's tokens
    """

    model_type: str
    lengths: str
    output_len: str
    known: Mapping[str, Tensor]
    prompt_returned: bool
    prompt_counts: bool


def names_of(model_type: str) -> Names:
    """The names in the contract of `model_type`."""
    contract = lookup(CONTRACTS, model_type, "model_type")
    known = {tensor.name: tensor for tensor in contract.inputs}
    lengths = next(name for name in ("input_lengths", "sequence_length") if name in known)
    lens = [name for name in ("request_output_len", "max_output_len") if name in known]
    if not lens:
        raise RequestError(problem("this model generates no tokens", got=model_type))
    returned = any(tensor.name == "response_input_lengths" for tensor in contract.outputs)
    return Names(model_type, lengths, lens[0], known, returned, contract.counts_prompts)


def request_tensors(
    rows: Sequence[GenerateRequest], model_type: str = "GPT"
) -> dict[str, NDArray[Any]]:
    """The input tensors of one request of several rows, each [rows, ...].

    Raises RequestError when some rows leave a value to the checkpoint (None) and others do not,
    and when a row asks for what the contract of its model has no tensor for.
    """
    names = names_of(model_type)
    if any(row.return_hidden_state for row in rows):
        _require(names, "return_hidden_state")
    lengths = np.array([[len(row.input_ids)] for row in rows], dtype=np.uint32)  # [B, 1]
    output_lens = np.array([[row.output_len] for row in rows], dtype=np.uint32)
    tensors: dict[str, NDArray[Any]] = {
        "input_ids": _padded([row.input_ids for row in rows], 0),
        names.lengths: lengths,
        names.output_len: output_lens + lengths if names.prompt_counts else output_lens,
    }
    for name, value_of in _ROW_VALUES.items():
        column = _column(names.known.get(name), name, [value_of(row) for row in rows], names)
        if column is not None:
            tensors[name] = column
    for name, words_of in _ROW_WORDS.items():
        words = [words_of(row) for row in rows]
        if any(words):
            tensors[name] = word_lists(words)
    if any(row.logit_bias for row in rows):
        tensors.update(bias_tensors(rows))
    if any(row.guided_grammar for row in rows):
        tensors["guided_grammar"] = grammar_tensor(rows)
    if any(row.decoder_input_ids for row in rows):
        _require(names, "decoder_input_ids")
        forced = [row.decoder_input_ids for row in rows]
        tensors["decoder_input_ids"] = _padded(forced, NO_TOKEN)
    if any(row.ia3_task is not None for row in rows):
        _require(names, "ia3_tasks")
        tasks = [-1 if row.ia3_task is None else row.ia3_task for row in rows]
        tensors["ia3_tasks"] = np.array(tasks, dtype=np.int32)[:, None]
    if any(row.prompt_embedding is not None for row in rows):
        _require(names, "request_prompt_embedding")
        own = prompt_tensors(rows)
        tensors.update({name: array for name, array in own.items() if name in names.known})
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
    own = [row.prompt_embedding for row in rows if row.prompt_embedding is not None]
    longest = max(len(table) for table in own)
    embeddings = np.zeros((len(rows), longest, own[0].shape[1]), dtype=own[0].dtype)
    lengths = np.zeros((len(rows), 1), dtype=np.uint32)
    types = np.zeros((len(rows), 1), dtype=np.uint32)
    for index, row in enumerate(rows):
        if row.prompt_embedding is not None:
            lengths[index] = len(row.prompt_embedding)
            embeddings[index, : len(row.prompt_embedding)] = row.prompt_embedding
            types[index] = SOFT_PROMPT if row.soft_prompt else PROMPT_TABLE
    return {
        "request_prompt_embedding": embeddings,
        "request_prompt_lengths": lengths,
        "request_prompt_type": types,
    }


def _require(names: Names, tensor: str) -> None:
    if tensor not in names.known:
        raise RequestError(
            problem(f"a model of type {names.model_type} has no input for this", got=tensor)
        )


def _column(
    tensor: Tensor | None, name: str, values: Sequence[Any], names: Names
) -> NDArray[Any] | None:
    """One value per row, [B, 1]; None when all have the contract's default."""
    if tensor is None:
        if any(value != _DEFAULTS[name] for value in values):
            _require(names, name)
        return None
    if all(value == tensor.default for value in values):
        return None
    if any(value is None for value in values):
        raise RequestError(
            problem(f"either all rows of a request say {name} or none", got=list(values))
        )
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
        for place, (token, value) in enumerate(row.logit_bias):
            ids[index, place], values[index, place] = token, value
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
    names = ["output_ids", "sequence_length"]
    if names_of(model_type).prompt_returned:
        names.append("response_input_lengths")
    if any(row.return_log_probs for row in rows):
        names += ["cum_log_probs", "output_log_probs"]
    if any(row.return_context_logits for row in rows):
        names.append("context_logits")
    if any(row.return_context_embeddings for row in rows):
        names.append("context_embeddings")
    names += _GENERATED[: _tensors_of(max(row.num_log_probs for row in rows))]
    names += _OF_PROMPT[: _tensors_of(max(row.num_prompt_log_probs for row in rows))]
    return tuple(names)


def _tensors_of(count: int) -> int:
    """How many of the tensors of ModelLogProbs there are with the `count` likeliest tokens."""
    return 0 if count < 0 else 2 if count == 0 else 4


def row_outputs(
    rows: Sequence[GenerateRequest], tensors: Mapping[str, NDArray[Any]]
) -> list[GenerateOutput]:
    """The answer to `rows`, one output each.

    tensors: output_ids [B, beam, time], sequence_length [B, beam], cum_log_probs [B, beam],
             output_log_probs [B, beam, generated], context_logits [B, longest prompt, vocab],
             context_embeddings [B, beam, hidden], MODEL_LOG_PROBS of protocol.py,
             response_input_lengths [B, beam] where output_ids starts with the prompt
    """
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
        outputs.append(
            GenerateOutput(
                output_ids=beams[0].output_ids,
                cum_log_probs=beams[0].cum_log_probs,
                output_log_probs=beams[0].output_log_probs,
                context_logits=logits,
                context_embeddings=embeddings,
                token_log_probs=_log_probs(
                    tensors, _GENERATED, (index, 0), len(beams[0].output_ids), row.num_log_probs
                ),
                prompt_log_probs=_log_probs(
                    tensors, _OF_PROMPT, (index,), max(1, len(read)), row.num_prompt_log_probs
                ),
                beams=beams if width > 1 else (),
            )
        )
    return outputs


def _log_probs(
    tensors: Mapping[str, NDArray[Any]],
    names: Sequence[str],
    place: tuple[int, ...],
    tokens: int,
    count: int,
) -> ModelLogProbs | None:
    """Those of the first `tokens` tokens at `place`, with the `count` likeliest; None below 0."""
    if count < 0:
        return None
    own, ranks, *tops = (tensors[name][place][:tokens] for name in names[: _tensors_of(count)])
    ids, values = tops or (np.zeros((len(own), 0)),) * 2
    return ModelLogProbs(own, ranks, ids[:, :count], values[:, :count])


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
