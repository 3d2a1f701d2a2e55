"""The ways to a served model: everything that a client process has to know to open one.

The gateway's completions and Triton's generate extension go over HTTP and stream server-sent
events; tokens that arrive in one read came together. The third way is Triton's gRPC.
"""

from __future__ import annotations

import itertools
import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from launcher_scripts.clients.async_connection import TritonServer
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.contract_tensors import request_tensors
from launcher_scripts.config.security import ClientTls
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.evaluation.load.driver import LoadRequest

# An id that no vocabulary has, so that no token ends an answer.
NO_END_ID = (1 << 31) - 1
OUTPUTS = ("sequence_length",)
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenRequest:
    """Requests to one served model. model_type: as its config.pbtxt has it."""

    model_name: str
    model_type: str

    def tensors(self, request: LoadRequest) -> Tensors:
        row = GenerateRequest(request.prompt_ids, request.output_len, end_id=NO_END_ID)
        return request_tensors([row], self.model_type)

    def generated(self, answer: Mapping[str, Any], request: LoadRequest) -> int:
        """The tokens generated so far, of an answer with `sequence_length`."""
        total = int(np.ravel(answer["sequence_length"])[0])
        prompt = CONTRACTS[self.model_type].returns_prompts
        return total - len(request.prompt_ids) if prompt else total


class Rejected(Exception):
    """The server answered with an error; its words."""


class _HttpPath:
    """A pool of connections without a limit; the run's own timeout ends requests."""

    def __init__(self, headers: Mapping[str, str] | None = None, ca: str | None = None) -> None:
        context: Any = True if ca is None else ssl.create_default_context(cafile=ca)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def _events(self, url: str, body: Any) -> AsyncGenerator[list[Any], None]:
        """Iterate over the objects of the complete events in each read."""
        async with self._session.post(url, json=body) as response:
            await _check(response)
            unparsed = b""
            async for data in response.content.iter_any():
                *lines, unparsed = (unparsed + data).split(b"\n")
                objects = [
                    json.loads(line[6:])
                    for line in lines
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]")
                ]
                for event in objects:
                    if "error" in event:
                        raise Rejected(str(event["error"]))
                if objects:
                    yield objects

    async def _full(self, url: str, body: Any) -> Any:
        async with self._session.post(url, json=body) as response:
            await _check(response)
            return await response.json()


class GatewayPath(_HttpPath):
    """POST /v1/completions with token ids, greedily; no end token ends the answer."""

    def __init__(
        self, url: str, model_name: str, *, stream: bool, api_key: str | None, ca: str | None
    ) -> None:
        super().__init__({"Authorization": f"Bearer {api_key}"} if api_key else None, ca)
        self._url, self._model_name, self._stream = f"{url}/completions", model_name, stream

    async def ask(self, request: LoadRequest) -> AsyncGenerator[int, None]:
        body: dict[str, Any] = {
            "model": self._model_name,
            "prompt": request.prompt_ids,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        if not self._stream:
            yield int((await self._full(self._url, body))["usage"]["completion_tokens"])
            return
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream": True, "stream_options": usage}
        async for events in self._events(self._url, body):
            counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
            if counts:
                yield int(counts[-1])


class TritonHttpPath(_HttpPath):
    """POST generate_stream, or generate for a model that gives whole answers, in turn to servers.

    A client of this extension cannot choose outputs: every response holds all ids so far.
    """

    def __init__(self, addresses: Sequence[str], tokens: TokenRequest, *, stream: bool) -> None:
        super().__init__()
        action = "generate_stream" if stream else "generate"
        model = tokens.model_name
        urls = [f"http://{address}/v2/models/{model}/{action}" for address in addresses]
        self._urls = itertools.cycle(urls)
        self._tokens, self._stream = tokens, stream

    async def ask(self, request: LoadRequest) -> AsyncGenerator[int, None]:
        tensors = self._tokens.tensors(request)
        body = {name: array[0].tolist() for name, array in tensors.items()}
        url = next(self._urls)
        if not self._stream:
            yield self._tokens.generated(await self._full(url, body), request)
            return
        async for events in self._events(url, body):
            yield self._tokens.generated(events[-1], request)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise Rejected(f"{response.status}: {(await response.text())[:500]}")


class GrpcPath:
    """One connection to each server, which take turns."""

    def __init__(
        self,
        addresses: Sequence[str],
        tokens: TokenRequest,
        *,
        stream: bool,
        tls: ClientTls | None,
    ) -> None:
        self._servers = [TritonServer(address, tls) for address in addresses]
        self._turns = itertools.cycle(self._servers)
        self._tokens, self._stream = tokens, stream

    async def ask(self, request: LoadRequest) -> AsyncGenerator[int, None]:
        server = next(self._turns)
        name, tensors = self._tokens.model_name, self._tokens.tensors(request)
        if not self._stream:
            yield self._tokens.generated(await server.infer(name, tensors, OUTPUTS), request)
            return
        async for answer in server.stream(name, tensors, OUTPUTS):
            if answer:
                yield self._tokens.generated(answer, request)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


Path = GatewayPath | GrpcPath | TritonHttpPath


@dataclass(frozen=True)
class LoadTarget:
    """One path to one model.

    addresses: host:port of each server, or the gateway's http://host:port/v1
    stream:    answers are read as they come; of Triton's paths: the model is decoupled
    """

    path: str
    addresses: tuple[str, ...]
    tokens: TokenRequest
    stream: bool
    api_key: str | None = None
    tls: ClientTls | None = None

    def open(self) -> Path:
        """To be called, used and closed in one event loop."""
        if self.path == "gateway":
            return GatewayPath(
                self.addresses[0],
                self.tokens.model_name,
                stream=self.stream,
                api_key=self.api_key,
                ca=None if self.tls is None else self.tls.ca,
            )
        if self.path == "grpc":
            return GrpcPath(self.addresses, self.tokens, stream=self.stream, tls=self.tls)
        return TritonHttpPath(self.addresses, self.tokens, stream=self.stream)
