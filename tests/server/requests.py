"""Requests as any client of Triton would send them, over HTTP or gRPC."""

from __future__ import annotations

import importlib
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

TYPES = {
    "u1": "UINT8",
    "u4": "UINT32",
    "u8": "UINT64",
    "i4": "INT32",
    "f2": "FP16",
    "f4": "FP32",
    "b1": "BOOL",
    "O": "BYTES",
}
NUMPY_TYPES = {
    "random_seed": np.uint64,
    "cache_salt": np.uint64,
    "temperature": np.float32,
    "runtime_top_p": np.float32,
    "repetition_penalty": np.float32,
    "len_penalty": np.float32,
    "is_return_log_probs": np.bool_,
    "is_return_context_logits": np.bool_,
    "is_return_prompt": np.bool_,
    "is_return_attentions": np.bool_,
    "is_return_context_embeddings": np.bool_,
    "min_p": np.float32,
    "frequency_penalty": np.float32,
    "output_presence_penalty": np.float32,
    "num_log_probs": np.int32,
    "num_prompt_log_probs": np.int32,
    "guided_grammar": np.uint8,
    "logit_bias_ids": np.int32,
    "logit_bias_values": np.float32,
    "bad_words_list": np.int32,
    "stop_words_list": np.int32,
    "ia3_tasks": np.int32,
}


class Client:
    """tritonclient over one of its two transports, with plain values for tensors."""

    def __init__(self, ready: dict[str, Any], transport: str) -> None:
        self._module = importlib.import_module(f"tritonclient.{transport}")
        self._client = self._module.InferenceServerClient(ready[transport])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def infer(
        self,
        model: str,
        outputs: Sequence[str] | None = None,
        sequence: dict[str, Any] | None = None,
        **tensors: np.ndarray,
    ) -> dict[str, np.ndarray]:
        inputs = infer_inputs(self._module, tensors)
        wanted = outputs and [self._module.InferRequestedOutput(name) for name in outputs]
        result = (
            self._client.infer(
                model, inputs, outputs=wanted, client_timeout=300, **(sequence or {})
            )
            if (self._module.__name__.endswith("grpc"))
            else self._client.infer(model, inputs, outputs=wanted, **(sequence or {}))
        )
        return arrays(result)


class Stream:
    """One gRPC stream: what is sent, and the responses in the order of their coming."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self._module = importlib.import_module("tritonclient.grpc")
        self._client = self._module.InferenceServerClient(ready["grpc"])
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()
        self._client.close()

    def send(self, model: str, sequence: dict[str, Any] | None = None, **tensors: Any) -> None:
        self._client.async_stream_infer(
            model,
            infer_inputs(self._module, tensors),
            enable_empty_final_response=True,
            **(sequence or {}),
        )

    def next(self) -> tuple[dict[str, np.ndarray], bool]:
        """The next response and whether it is its request's last; raises the server's error."""
        result, error = self._responses.get(timeout=300)
        if error is not None:
            raise error
        parameters = result.get_response().parameters
        return arrays(result), parameters["triton_final_response"].bool_param

    def ask(self, model: str, **tensors: Any) -> list[dict[str, np.ndarray]]:
        """All responses of one request, but for an empty last one."""
        self.send(model, **tensors)
        responses = []
        last = False
        while not last:
            response, last = self.next()
            if response or not last:
                responses.append(response)
        return responses

    def cancel(self) -> None:
        """Leave, and say so to the server."""
        self._client.stop_stream(cancel_requests=True)


def infer_inputs(module: Any, tensors: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, value in tensors.items():
        kind = TYPES["O" if value.dtype == object else value.dtype.str[1:]]
        inputs.append(module.InferInput(name, list(value.shape), kind))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def arrays(result: Any) -> dict[str, np.ndarray]:
    """The tensors of a response by name."""
    answer = result.get_response()
    names = (
        [output["name"] for output in answer["outputs"]]
        if isinstance(answer, dict)
        else [output.name for output in answer.outputs]
    )
    return {name: result.as_numpy(name) for name in names}


def ids_request(rows: Sequence[Sequence[int]], output_len: int, **more: Any) -> dict[str, Any]:
    """Tensors of one request; every further value is given to each row."""
    width = max(map(len, rows))
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    tensors = {
        "input_ids": np.array(padded, np.uint32),
        "input_lengths": np.array([[len(row)] for row in rows], np.uint32),
        "request_output_len": np.full((len(rows), 1), output_len, np.uint32),
    }
    for name, value in more.items():
        row = np.atleast_1d(np.asarray(value, NUMPY_TYPES.get(name, np.uint32)))
        tensors[name] = np.stack([row] * len(rows))
    return tensors


def t5_request(rows: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    """The same for an encoder-decoder, whose max_output_len is one of the further values."""
    tensors = ids_request(rows, 0, **more)
    del tensors["request_output_len"]
    tensors["sequence_length"] = tensors.pop("input_lengths")
    return tensors


def text_rows(*texts: str) -> np.ndarray:
    return np.array([[text.encode()] for text in texts], dtype=object)


def generated(answer: dict[str, np.ndarray], row: int = 0) -> list[int]:
    """The generated ids of one row's first beam."""
    start = int(answer["response_input_lengths"][row, 0])
    end = int(answer["sequence_length"][row, 0])
    return answer["output_ids"][row, 0, start:end].tolist()
