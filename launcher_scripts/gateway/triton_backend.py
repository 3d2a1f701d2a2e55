"""The engine behind a tritonserver: rows as requests to its token model, over gRPC.

A model that was exported with decoupled=True answers as tokens come, one with whole answers gives
one increment. Every row has a gRPC call of its own, so that giving it up is cancelling the call.
The tokens of plain rows come in a stream that they share; see shared_stream.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from launcher_scripts.clients.async_connection import ServerFailure, TritonServer
from launcher_scripts.clients.connection import NUMPY_TYPES, is_decoupled
from launcher_scripts.clients.remote import parameter
from launcher_scripts.contract.requests import (
    CLIENT_PARAMETER,
    OPERATION_PARAMETER,
    PROMPT_LOG_PROBS,
    SLEEPS,
    TOKEN_LOG_PROBS,
    EndCode,
)
from launcher_scripts.contract.tensors import NUM_CACHED_TOKENS
from launcher_scripts.gateway.api_errors import (
    ApiError,
    ContextOverflow,
    ServerLost,
    bad_request,
    timed_out,
    unavailable,
    unsupported,
)
from launcher_scripts.gateway.backend import (
    SLEEP_SECONDS,
    Increment,
    RowRequest,
    RowWeights,
    ServedLoRA,
    TokenLogProb,
)
from launcher_scripts.gateway.shared_stream import (
    FAILURES,
    OUTPUTS,
    NoStream,
    SharedStreamReader,
    StreamLost,
)

# An id that no vocabulary has, for rows that no token ends.
NO_END_ID = (1 << 31) - 1
# What the token model writes before its errors in a stream, where Triton gives them no status.
_ERROR_CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")
_DELTA_HEAD = 4
_STATES = "output_hidden_state"
_OPENING = RowRequest("", (0,), 1)  # what opens a shared stream: Triton wants the model's tensors
# What a server says in a stream that is being stopped, without a status; and what gRPC itself says
# of a call whose connection breaks while the request is written.
_LOST = (
    "has no available versions",
    "Server is stopping",
    "Server not ready",
    "Internal error from Core",
)
# Tensor of the token model -> the request's parameter. Other tensors have its name.
_PARAMETERS = {
    "input_ids": "prompt",
    "request_output_len": "max_tokens",
    "max_output_len": "max_tokens",
    "min_length": "min_tokens",
    "stop_words_list": "stop_token_ids",
    "beam_width": "n",
    "len_penalty": "length_penalty",
    "frequency_penalty": "frequency_penalty",
    "output_presence_penalty": "presence_penalty",
    "min_p": "min_p",
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "echo",
    "lora_task_id": "model",
    "num_speculative_tokens": "num_speculative_tokens",
}
# The number of tokens that a model has positions or a cache for, at the end of its refusal.
_CAPACITY = re.compile(r"(?:has|which holds) (\d+)(?: positions)?$", re.MULTILINE)


class TritonBackend:
    """One token model of one server."""

    def __init__(self, server: TritonServer, config: Mapping[str, Any]) -> None:
        """config: the model's config.pbtxt as JSON"""
        self.address = server.address
        self._server = server
        self._name = str(config["name"])
        self._streams = is_decoupled(config)
        outputs = {spec["name"] for spec in config.get("output", ())}
        self._encodes = _STATES in outputs
        caching = parameter(config, "enable_prefix_caching")
        self.shares_prefixes = (caching or "0").strip() == "1"
        self._counts_cached = self.shares_prefixes and NUM_CACHED_TOKENS.name in outputs
        self._shared = SharedStreamReader(server, self._name, lambda: self._tensors(_OPENING))
        self._running = 0  # rows
        self._loras: dict[ServedLoRA, int] = {}  # their numbers at this server
        self._loading = asyncio.Lock()
        self.digests: Mapping[str, Any] | None = None
        self.sleeping = False
        self._digests: dict[int, Mapping[str, Any]] = {}  # by the version of the weights
        self._types = {
            spec["name"]: NUMPY_TYPES[spec["data_type"].removeprefix("TYPE_")]
            for spec in config["input"]
            if spec["data_type"].removeprefix("TYPE_") in NUMPY_TYPES
        }

    async def generate(self, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """See Backend."""
        more: dict[str, Any] = {"request_id": request.request_id}
        if request.timeout is not None:
            more["timeout"] = max(1, int(request.timeout * 1e6))
        if request.grammar is not None:
            more["parameters"] = {CLIENT_PARAMETER: request.client}
        if self._encodes:
            yield await self._encode(request, more)
            return
        if request.added_lora is not None:
            number = await self._lora_number(request.added_lora)
            request = replace(request, lora_adapter=number)
        tensors, row = self._tensors(request), _Row(request, self._counts_cached)
        self._running += 1
        try:
            if not self._streams:
                arrays = await self._server.infer(self._name, tensors, row.outputs, **more)
                increment = row.increment(arrays)
                yield increment._replace(weights=await self._weights(row.end_code))
                return
            # A lone row has nobody to share with.
            if row.is_plain and self._running > 1 and self._shared.is_open():
                with contextlib.suppress(NoStream):
                    async with aclosing(self._shared.generate(tensors, **more)) as result:
                        async for delta in result:
                            end = delta.finished
                            yield Increment(
                                tuple(delta.ids),
                                finished=bool(end),
                                num_cached_tokens=delta.num_cached_tokens,
                                weights=await self._weights(end) if end else None,
                            )
                    return
            async with aclosing(
                self._server.stream(self._name, tensors, row.outputs, **more)
            ) as responses:
                async for arrays in responses:
                    if not arrays:
                        continue
                    increment = row.increment(arrays)
                    if row.finished:
                        # Whoever gets this asks for no more: a call that is about to end must not
                        # look as if it were given up. Nor does its row need the server any more.
                        with contextlib.suppress(*FAILURES):
                            async for _ in responses:
                                pass
                        increment = increment._replace(weights=await self._weights(row.end_code))
                    yield increment
        except StreamLost as error:
            raise ServerLost(f"the server gave the request up: {error}") from error
        except FAILURES as error:
            raise self._failure(error, request) from error
        finally:
            self._running -= 1
        if not row.finished:
            raise ApiError(502, "the server ended the answer too early", code="incomplete")

    async def operate(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Have an operation done by the model's server; its reply, with an `error` if it failed.

        Raises ApiError where the server is lost, or knows of no operations.
        """
        parameters = {OPERATION_PARAMETER: json.dumps(operation)}
        reply: dict[str, Any] = {}
        try:
            if self._streams:
                stream = self._server.stream(
                    self._name, self._tensors(_OPENING), OUTPUTS, parameters=parameters
                )
                async with aclosing(stream) as responses:
                    async for arrays in responses:
                        if arrays:
                            reply = _reply(arrays)
            else:
                arrays = await self._server.infer(
                    self._name, self._tensors(_OPENING), OUTPUTS, parameters=parameters
                )
                reply = _reply(arrays)
        except FAILURES as error:
            raise self._failure(error, _OPENING) from error
        if "digests" in reply:
            self.digests = reply["digests"] if reply["version"] else None
            self._digests[int(reply["version"])] = reply["digests"] or {}
        self.sleeping = bool(reply.get("sleeping", self.sleeping))
        return reply

    async def _lora_number(self, lora: ServedLoRA) -> int:
        """Return the server's number of an adapter. One that has started again gets it again."""
        async with self._loading:
            if lora not in self._loras:
                reply = await self.operate(lora.loading)
                if "error" in reply:
                    raise unavailable(f"the server has no adapter {lora.name}: {reply['error']}")
                self._loras[lora] = int(reply["number"])
            return self._loras[lora]

    async def _weights(self, code: int) -> RowWeights | None:
        """Return the weights of a row that ended with this code."""
        if code <= 1:
            return None
        version, mixed = EndCode.read(code)
        if version not in self._digests:
            with contextlib.suppress(ApiError):
                await self.operate({"operation": "weights"})
        digests = self._digests.get(version, {})
        return RowWeights(digests.get("system_fingerprint"), mixed, digests.get("weights_version"))

    async def _encode(self, request: RowRequest, more: Mapping[str, Any]) -> Increment:
        """Return the states of an encoder. Raises ApiError."""
        values = {"input_ids": request.prompt_ids, "sequence_length": len(request.prompt_ids)}
        tensors = {name: self._array(name, value) for name, value in values.items()}
        try:
            if not self._streams:
                arrays = await self._server.infer(self._name, tensors, [_STATES], **more)
            else:
                stream = self._server.stream(self._name, tensors, [_STATES], **more)
                async with aclosing(stream) as responses:
                    arrays = {k: v async for response in responses for k, v in response.items()}
        except FAILURES as error:
            raise self._failure(error, request) from error
        return Increment(finished=True, states=arrays[_STATES][0].astype(np.float32))

    def _tensors(self, request: RowRequest) -> dict[str, Any]:
        """The request as the tensors that the model declares. Raises ApiError for missing ones."""
        count = len(request.prompt_ids)
        gpt = "input_lengths" in self._types
        values: dict[str, Any] = {
            "input_ids": request.prompt_ids or (0,),  # Triton refuses empty tensors
            "input_lengths" if gpt else "sequence_length": count,
            "request_output_len" if gpt else "max_output_len": request.max_tokens,
            "end_id": NO_END_ID if request.end_id is None else request.end_id,
            "is_return_progress": True,
            **_sampling(request),
        }
        if request.decoder_ids:
            values["decoder_input_ids"] = request.decoder_ids
        if request.stop_ids:
            indices = range(1, len(request.stop_ids) + 1)
            values["stop_words_list"] = [request.stop_ids, indices]
        if "cache_salt" not in self._types:  # such a model shares nothing
            values.pop("cache_salt", None)
        missing = [name for name in values if name not in self._types]
        parameters = _parameters(request)
        for name in missing:
            if name in parameters:
                raise unsupported(
                    parameters[name],
                    f"{self._name} was exported without the input {name}: export it again, or "
                    "write its config.pbtxt again with prepare_triton_model_config",
                )
        if missing:
            raise bad_request(f"{self._name} has no input {missing[0]}")
        return {name: self._array(name, value) for name, value in values.items()}

    def _array(self, name: str, value: Any) -> Any:
        """One row of a tensor: [1, ...]."""
        array = np.asarray(value, dtype=self._types[name])
        return array.reshape(1, *(array.shape or (1,)))

    def _failure(self, error: ServerFailure | grpc.RpcError, request: RowRequest) -> ApiError:
        """Return the client's error for an error of the transport."""
        if isinstance(error, ServerFailure):
            status, message = str(error.status()), str(error.message())
            if error.status() is None:  # what the token model does not name is Triton's own
                code, colon, detail = message.partition(": ")
                named = colon and code in _ERROR_CODES
                status, message = (code, detail) if named else ("UNAVAILABLE", message)
        else:
            status, message = str(error.code()), str(error.details())
        if request.timeout is not None and "timeout is over" in message:
            return timed_out(request.timeout)
        if SLEEPS in message:  # another gateway has had it do so
            return unavailable(message, SLEEP_SECONDS)
        if "INVALID_ARG" in status:
            return _refusal(message, request)
        if "UNAVAILABLE" in status or any(words in message for words in _LOST):
            return ServerLost(f"the server takes no requests now: {message}")
        if "CANCELLED" in status:
            return ServerLost(f"the server gave the request up: {message}")
        return ApiError(500, f"the server failed: {message}", code="server_error")


def _parameters(request: RowRequest) -> dict[str, str]:
    """Tensor -> the client's parameter that it comes from."""
    return _PARAMETERS | {"guided_grammar": request.grammar_parameter}


def _refusal(message: str, request: RowRequest) -> ApiError:
    """The token model's refusal, in the words of the client's request."""
    parameters = _parameters(request)
    named = re.search(rf"\b({'|'.join(parameters)})\b", message)
    if named is None:
        return bad_request(message)
    param = parameters[named[1]]
    message = message.replace(named[1], param)
    if (capacity := _CAPACITY.search(message)) is None:
        return bad_request(message, param)
    max_len, prompt_len = int(capacity[1]), len(request.prompt_ids)
    if prompt_len + request.max_tokens > max_len:
        return ContextOverflow.of_tokens(max_len, prompt_len, request.max_tokens, "prompt", param)
    return bad_request(message, param, "context_length_exceeded")  # of several beams


class _Row:
    """The responses to one row's request as increments.

    is_plain: whether its tokens are all that is asked for
    """

    def __init__(self, request: RowRequest, counts_cached: bool) -> None:
        """counts_cached: whether the model has the output num_cached_tokens"""
        self.finished = False
        self.end_code = 0
        self._request = request
        self._has_prompt = request.prompt_log_probs is None
        self.outputs = [
            *OUTPUTS,
            *_log_prob_outputs(TOKEN_LOG_PROBS, request.log_probs),
            *_log_prob_outputs(PROMPT_LOG_PROBS, request.prompt_log_probs),
        ]
        self.is_plain = request.beam_width == 1 and self.outputs == OUTPUTS
        if counts_cached:
            self.outputs.append(NUM_CACHED_TOKENS.name)

    def increment(self, arrays: Mapping[str, Any]) -> Increment:
        """Return the increment of a response. `news` is [1, beam, 4 + n]; see
        contract/tensors.py."""
        delta = arrays["news"][0]
        self.end_code = int(delta[0, 3])
        self.finished = self.end_code > 0
        prompt = self._prompt_log_probs(arrays)
        counts = arrays.get(NUM_CACHED_TOKENS.name)
        cached = 0 if counts is None else int(counts[0, 0])
        if self._request.beam_width > 1:
            beams = tuple(map(_new_ids, delta)) if self.finished else ()
            return Increment(
                prompt_log_probs=prompt,
                finished=self.finished,
                beams=beams,
                num_cached_tokens=cached,
            )
        ids = _new_ids(delta[0])
        return Increment(
            token_ids=ids,
            log_probs=self._log_probs(arrays, ids),
            prompt_log_probs=prompt,
            finished=self.finished,
            num_cached_tokens=cached,
        )

    def _log_probs(self, arrays: Mapping[str, Any], ids: Sequence[int]) -> tuple[TokenLogProb, ...]:
        """Return the log-probabilities of the response's tokens, outputs [1, 1, n] and [1, 1, n,
        K]."""
        if self._request.log_probs is None:
            return ()
        outputs = {
            name: arrays[name][0, 0, : len(ids)] for name in TOKEN_LOG_PROBS if name in arrays
        }
        return _entries(ids, *map(outputs.get, TOKEN_LOG_PROBS))

    def _prompt_log_probs(
        self, arrays: Mapping[str, Any]
    ) -> tuple[TokenLogProb | None, ...] | None:
        """Once: [1, prompt], [1, prompt, K]; the first token has none."""
        if self._has_prompt or "prompt_log_probs" not in arrays:
            return None
        self._has_prompt = True
        ids = self._request.prompt_ids
        if not ids:
            return ()
        outputs = {name: arrays[name][0] for name in PROMPT_LOG_PROBS if name in arrays}
        return (None, *_entries(ids, *map(outputs.get, PROMPT_LOG_PROBS))[1:])


def _sampling(request: RowRequest) -> dict[str, Any]:
    """Return the request's values that differ from the model's defaults, by the names of the
    contract."""
    values: dict[str, Any] = {"random_seed": request.seed % (1 << 64)}
    if request.beam_width > 1:
        values |= {"beam_width": request.beam_width, "len_penalty": request.length_penalty}
    elif request.temperature == 0 or request.top_p == 0:
        values |= {"runtime_top_k": 1}
    else:
        values |= {
            "runtime_top_k": request.top_k,
            "runtime_top_p": request.top_p,
            "temperature": request.temperature,
        }
    if request.grammar is not None:
        values["guided_grammar"] = np.frombuffer(request.grammar, np.uint8)
    if request.logit_bias:
        values["logit_bias_ids"] = list(request.logit_bias)
        values["logit_bias_values"] = list(request.logit_bias.values())
    others = {
        "min_p": (request.min_p, 0.0),
        "repetition_penalty": (request.repetition_penalty, 1.0),
        "output_presence_penalty": (request.presence_penalty, 0.0),
        "frequency_penalty": (request.frequency_penalty, 0.0),
        "min_length": (request.min_tokens, 0),
        "num_log_probs": (request.log_probs, None),
        "num_prompt_log_probs": (request.prompt_log_probs, None),
        "cache_salt": (request.cache_salt, 0),
        "lora_task_id": (request.lora_adapter, None),
        "num_speculative_tokens": (request.num_speculative_tokens, 0),
    }
    return values | {name: value for name, (value, default) in others.items() if value != default}


def _log_prob_outputs(outputs: Mapping[str, str], count: int | None) -> list[str]:
    """Return the requested ones of `outputs`; without alternatives none of the log-probabilities.

    outputs: name -> field of ModelLogProbs;  count: of alternatives, None: no log-probabilities
    """
    if count is None:
        return []
    return [name for name, field in outputs.items() if count or field in ("log_probs", "ranks")]


def _new_ids(packed: Any) -> tuple[int, ...]:
    """The generated ids in one beam of `news`: total, prompt, first place, finished, ids."""
    total, prompt, offset = (int(number) for number in packed[:3])
    ids = packed[_DELTA_HEAD : _DELTA_HEAD + total - offset]
    return tuple(ids[max(0, prompt - offset) :].tolist())


def _reply(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to an operation; see OPERATION_PARAMETER."""
    content: dict[str, Any] = json.loads(bytes(arrays["news"].reshape(-1).tolist()))
    return content


def _entries(
    ids: Sequence[int], log_probs: Any, ranks: Any, top_ids: Any, top_log_probs: Any
) -> tuple[TokenLogProb, ...]:
    """Arrays [tokens] and [tokens, K] by token, as TOKEN_LOG_PROBS has them; top_* None: K is 0."""
    tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(ids)
    if top_ids is not None:
        tops = [
            tuple(zip(*pair, strict=True))
            for pair in zip(top_ids.tolist(), top_log_probs.tolist(), strict=True)
        ]
    columns = zip(ids, log_probs.tolist(), ranks.tolist(), tops, strict=True)
    return tuple(
        TokenLogProb(token, value, rank, tuple(top)) for token, value, rank, top in columns
    )
