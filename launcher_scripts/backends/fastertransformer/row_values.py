"""Values per row from a request's tensors, and the answers' tensors that families share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer.learned_values import learned_values
from launcher_scripts.common.errors import Problems, RequestError, problem
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.protocol import (
    GUIDED_GRAMMAR,
    GenerateOutput,
    GenerateRequest,
    SamplingParameters,
)

# contract tensor -> field of SamplingParameters
SAMPLING_FIELDS = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "output_presence_penalty": "output_presence_penalty",
    "min_p": "min_p",
    "min_length": "min_length",
    "random_seed": "random_seed",
    "top_p_decay": "top_p_decay",
    "top_p_min": "top_p_min",
    "top_p_reset_ids": "top_p_reset_id",
    "beam_width": "beam_width",
    "len_penalty": "len_penalty",
    "beam_search_diversity_rate": "beam_search_diversity_rate",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
_DEFAULTS = {tensor.name: tensor.default for row in CONTRACTS.values() for tensor in row.inputs}


@dataclass(frozen=True)
class RowValues:
    """Every value of every row: name -> one per row; words as tuples of ids, biases as pairs of an
    id and its value, grammars as JSON texts.

    learned: every row's fields of a GenerateRequest that are about prompts and IA3
    """

    columns: Mapping[str, Sequence[Any]]
    bad_words: Sequence[tuple[tuple[int, ...], ...]]
    stop_words: Sequence[tuple[tuple[int, ...], ...]]
    biases: Sequence[tuple[tuple[int, float], ...]]
    grammars: Sequence[str | None]
    learned: Sequence[dict[str, Any]]

    def generation(self, row: int) -> dict[str, Any]:
        """The fields of a GenerateRequest that mean the same in every family."""
        columns = self.columns
        return {
            "sampling": SamplingParameters(
                **{field: columns[name][row] for name, field in SAMPLING_FIELDS.items()}
            ),
            "start_id": columns["start_id"][row],
            "end_id": columns["end_id"][row],
            "bad_words": self.bad_words[row],
            "stop_words": self.stop_words[row],
            "logit_bias": self.biases[row],
            "guided_grammar": self.grammars[row],
            "return_log_probs": columns["is_return_log_probs"][row],
            "num_log_probs": columns["num_log_probs"][row],
            "num_prompt_log_probs": columns["num_prompt_log_probs"][row],
            "return_context_logits": columns["is_return_context_logits"][row],
            "return_context_embeddings": columns["is_return_context_embeddings"][row],
            **self.learned[row],
        }


def row_values(
    tensors: Mapping[str, Tensor], rows: int, names: Iterable[str], *, typed_prompts: bool = False
) -> RowValues:
    """The values of `rows` rows called `names`, and those that every generating family takes.

    typed_prompts: the model takes request_prompt_type

    Shapes: word lists [B, 2, n] or [2, n] for all rows, biases and grammars [B, n] or [n] for all
    rows, everything else [B] or [B, 1]. Raises RequestError that names every wrong tensor.
    """
    problems = Problems("the request")
    columns = {
        name: _column(tensors, name, rows, problems) for name in (*names, *_GENERATION_NAMES)
    }
    bad, stop = (
        _words(tensors.get(name), name, rows, problems)
        for name in ("bad_words_list", "stop_words_list")
    )
    biases = _biases(tensors, rows, problems)
    grammars = _grammars(tensors.get(GUIDED_GRAMMAR.name), rows, problems)
    learned = learned_values(tensors, rows, problems, typed=typed_prompts)
    problems.raise_if_any(RequestError)
    return RowValues(columns, bad, stop, biases, grammars, learned)


def trimmed(
    name: str, ids: Tensor, lengths_name: str, lengths: Sequence[int]
) -> list[tuple[int, ...]]:
    """The first lengths[b] ids of every row of ids [B, M]."""
    problems = Problems("the request")
    for length in lengths:
        if not 0 <= length <= ids.shape[1]:
            problems.add(
                f"{lengths_name} must be within {name}",
                got=length,
                choices=(f"0-{ids.shape[1]}",),
            )
    problems.raise_if_any(RequestError)
    return [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]


def token_ids(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of ids [B, M] as int64."""
    ids = tensors[name].long()
    if ids.dim() != 2:
        raise RequestError(problem(f"{name} must be [batch, time]", got=list(ids.shape)))
    return ids


def beam_axis(outputs: Sequence[GenerateOutput]) -> int:
    """How many hypotheses the widest row has."""
    return max(len(output.hypotheses) for output in outputs)


def end_ids(requests: Sequence[GenerateRequest], default: int) -> np.ndarray:
    """The id that ends each row, int64 [B]; `default` for those that name none."""
    return np.array([default if each.end_id is None else each.end_id for each in requests])


def write_ids(ids: np.ndarray, start: int, output: GenerateOutput) -> None:
    """Write what a row generated into its ids [beam, time], from the column `start` on."""
    for beam, hypothesis in enumerate(output.hypotheses):
        ids[beam, start : start + len(hypothesis.output_ids)] = hypothesis.output_ids


def log_probs(
    outputs: Sequence[GenerateOutput], longest: int, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Of every hypothesis, [B, beam] and, if wanted, [B, beam, longest]; 0 where there is none."""
    beams = beam_axis(outputs)
    sums = np.zeros((len(outputs), beams), dtype=np.float32)
    for row, output in enumerate(outputs):
        for beam, hypothesis in enumerate(output.hypotheses):
            sums[row, beam] = hypothesis.cum_log_probs or 0.0
    tensors = {"cum_log_probs": torch.from_numpy(sums)}
    if "output_log_probs" in wanted:
        per_token = np.zeros((len(outputs), beams, longest), dtype=np.float32)
        for row, output in enumerate(outputs):
            for beam, hypothesis in enumerate(output.hypotheses):
                values = hypothesis.output_log_probs
                per_token[row, beam, : len(values)] = values
        tensors["output_log_probs"] = torch.from_numpy(per_token)
    return tensors


def context_embeddings(outputs: Sequence[GenerateOutput], beams: int) -> Tensor:
    """Float32 [B, beams, hidden], the same for all beams; zeros for rows not asked."""
    given = [output.context_embeddings for output in outputs]
    size = next(total.shape[0] for total in given if total is not None)
    rows = [torch.zeros(size) if total is None else total for total in given]
    return torch.stack(rows)[:, None].expand(-1, beams, -1).contiguous()


def context_logits(outputs: Sequence[GenerateOutput]) -> Tensor:
    """Float32 [B, longest prompt, vocab], zeros after a row's prompt and for rows not asked."""
    given = [output.context_logits for output in outputs if output.context_logits is not None]
    longest = max(logits.shape[0] for logits in given)
    whole = torch.zeros(len(outputs), longest, given[0].shape[1])
    for row, output in enumerate(outputs):
        if output.context_logits is not None:
            whole[row, : output.context_logits.shape[0]] = output.context_logits
    return whole


def _unsigned(value: Any) -> int:
    """A 64-bit seed, which arrived as the signed number of the same bits."""
    return int(value) & ((1 << 64) - 1)


def _optional_id(value: Any) -> int | None:
    return None if value is None else int(value)


# contract tensor -> what makes its value from a number (or from its default)
_PER_ROW: dict[str, Callable[[Any], Any]] = {
    "input_lengths": int,
    "sequence_length": int,
    "request_output_len": int,
    "max_output_len": int,
    "is_return_attentions": bool,
    "runtime_top_k": int,
    "runtime_top_p": float,
    "temperature": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "output_presence_penalty": float,
    "min_p": float,
    "num_log_probs": int,
    "num_prompt_log_probs": int,
    "min_length": int,
    "random_seed": _unsigned,
    "top_p_decay": float,
    "top_p_min": float,
    "top_p_reset_ids": _optional_id,
    "beam_width": int,
    "len_penalty": float,
    "beam_search_diversity_rate": float,
    "no_repeat_ngram_size": int,
    "start_id": _optional_id,
    "end_id": _optional_id,
    "is_return_log_probs": bool,
    "is_return_context_logits": bool,
    "is_return_context_embeddings": bool,
}


_GENERATION_NAMES = (
    *SAMPLING_FIELDS,
    "start_id",
    "end_id",
    "num_log_probs",
    "num_prompt_log_probs",
    "is_return_log_probs",
    "is_return_context_logits",
    "is_return_context_embeddings",
)


def _column(tensors: Mapping[str, Tensor], name: str, rows: int, problems: Problems) -> list[Any]:
    """One value per row of a tensor, or its default."""
    convert = _PER_ROW[name]
    tensor = tensors.get(name)
    if tensor is None:
        return [convert(_DEFAULTS[name])] * rows
    values = tensor.reshape(-1)
    if values.numel() != rows:
        problems.add(
            f"{name} needs one value per row of input_ids, [{rows}]", got=list(tensor.shape)
        )
        return []
    if not values.is_floating_point():
        values = values.long()
    return [convert(value) for value in values.tolist()]


def _words(
    tensor: Tensor | None, name: str, rows: int, problems: Problems
) -> list[tuple[tuple[int, ...], ...]]:
    """The words of every row from [B, 2, n]: ids, and the end offsets up to the first negative.

    An end offset of 0 ends a word without ids, which is left out: old tools send it for no words.
    """
    if tensor is None:
        return [()] * rows
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
) -> list[tuple[tuple[int, float], ...]]:
    """The biases of every row from ids and values [B, n]; -1 among the ids pads."""
    names = ("logit_bias_ids", "logit_bias_values")
    there = [tensors[name] for name in names if name in tensors]
    if not there:
        return [()] * rows
    shapes = [list(tensor.shape) for tensor in there]
    if len(there) == 1 or shapes[0] != shapes[1]:
        problems.add(f"{' and '.join(names)} must come together, in one shape", got=shapes)
        return []
    ids, values = (each.expand(rows, -1) if each.dim() == 1 else each for each in there)
    if ids.dim() != 2 or ids.shape[0] != rows:
        problems.add(f"{' and '.join(names)} must be [{rows}, n]", got=shapes[0])
        return []
    return [
        tuple((token, value) for token, value in zip(*pair, strict=True) if token != -1)
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _grammars(tensor: Tensor | None, rows: int, problems: Problems) -> list[str | None]:
    """The grammar of every row from UTF-8 [B, n] with zeros behind it; None where it is empty."""
    if tensor is None:
        return [None] * rows
    name = GUIDED_GRAMMAR.name
    given = tensor.expand(rows, -1) if tensor.dim() == 1 else tensor
    if given.dim() != 2 or given.shape[0] != rows:
        problems.add(f"{name} must be [{rows}, n]", got=list(tensor.shape))
        return []
    texts = []
    for row in given.tolist():
        try:
            texts.append(bytes(row).rstrip(b"\0").decode() or None)
        except ValueError as error:
            problems.add(f"{name} is no UTF-8: {error}")
    return texts
