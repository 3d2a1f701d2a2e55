"""The tensors of the agm model of one fork of the FasterTransformer backend."""

from __future__ import annotations

from launcher_scripts.contract.protocol import (
    GPT_INPUTS,
    GPT_OUTPUTS,
    Tensor,
    array,
    scalar,
)

# What the other models take and Agm does not.
_ABSENT = (
    "input_ids",
    "input_lengths",
    "request_output_len",
    "is_return_context_embeddings",
    "prompt_learning_task_name_ids",
    "request_prompt_embedding",
    "request_prompt_lengths",
    "request_prompt_type",
    "ia3_tasks",
)
_INTEGERS = ("output_ids", "sequence_length")

AGM_INPUTS = (
    array("input_ids", "UINT32", (-1,), "prompt token ids, right-padded", optional=False),
    scalar("sequence_length", "UINT32", None, "prompt length of the row", optional=False),
    scalar("max_output_len", "UINT32", None, "most tokens, the prompt's included", optional=False),
    *(tensor for tensor in GPT_INPUTS if tensor.name not in _ABSENT),
)


def _typed(tensor: Tensor) -> Tensor:
    dtype = "INT32" if tensor.name in _INTEGERS else tensor.dtype
    return array(tensor.name, dtype, tensor.dims, tensor.meaning, extension=tensor.extension)


AGM_OUTPUTS = tuple(_typed(tensor) for tensor in GPT_OUTPUTS if tensor.name != "context_embeddings")
