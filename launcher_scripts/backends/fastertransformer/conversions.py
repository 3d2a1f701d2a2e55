"""How each model_type turns tensors into rows and answers back into tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher_scripts.backends.fastertransformer import conversion, conversion_agm, conversion_t5
from launcher_scripts.contract.protocol import GenerateOutput, GenerateRequest
from launcher_scripts.engine.core.prompts import real_ids

Answers = Sequence[GenerateOutput]
Requests = Sequence[GenerateRequest]


@dataclass(frozen=True)
class Shape:
    """What an answer's tensors depend on besides rows and outputs.

    width:           columns of the request's input_ids
    end_id:          the model's, for rows that name none
    dtype:           the model's compute type
    prompt_start_id: the model's first id that is a virtual token in rows with a prompt
    wanted:          the tensors that the client asked for
    """

    width: int
    end_id: int
    dtype: torch.dtype
    prompt_start_id: int
    wanted: Collection[str]


@dataclass(frozen=True)
class Conversion:
    """A row of CONVERSIONS.

    prompts: of each row, what its output_ids begin with
    """

    to_requests: Callable[[Mapping[str, Tensor]], list[GenerateRequest]]
    to_tensors: Callable[[Requests, Answers, Shape], dict[str, Tensor]]
    prompts: Callable[[Requests, Shape], list[Sequence[int]]]


def _gpt(requests: Requests, outputs: Answers, shape: Shape) -> dict[str, Tensor]:
    return conversion.to_tensors(
        requests, outputs, shape.width, shape.end_id, shape.prompt_start_id, shape.wanted
    )


def _t5(requests: Requests, outputs: Answers, shape: Shape) -> dict[str, Tensor]:
    return conversion_t5.to_tensors(requests, outputs, shape.end_id, shape.wanted)


def _t5_encoder(requests: Requests, outputs: Answers, shape: Shape) -> dict[str, Tensor]:
    return conversion_t5.to_encoder_tensors(requests, outputs, shape.width, shape.dtype)


def _agm(requests: Requests, outputs: Answers, shape: Shape) -> dict[str, Tensor]:
    return conversion_agm.to_tensors(requests, outputs, shape.end_id, shape.wanted)


def _real_prompts(requests: Requests, shape: Shape) -> list[Sequence[int]]:
    return [real_ids(request, shape.prompt_start_id) for request in requests]


def _whole_prompts(requests: Requests, _: Shape) -> list[Sequence[int]]:
    return [request.input_ids for request in requests]


def _no_prompts(requests: Requests, _: Shape) -> list[Sequence[int]]:
    return [()] * len(requests)


# model_type -> its conversion
CONVERSIONS = {
    "GPT": Conversion(conversion.to_requests, _gpt, _real_prompts),
    "T5": Conversion(conversion_t5.to_requests, _t5, _no_prompts),
    "T5-Encoder": Conversion(conversion_t5.to_encoder_requests, _t5_encoder, _no_prompts),
    "Agm": Conversion(conversion_agm.to_requests, _agm, _whole_prompts),
    "BART": Conversion(conversion_t5.to_requests, _t5, _no_prompts),
}
