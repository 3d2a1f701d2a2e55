"""The ways over HTTP: the gateway's completions and Triton's generate extension.

Both stream server-sent events. Tokens that arrive in one read came together.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp

from launcher_scripts.evaluation.load.plan import LoadRequest
from launcher_scripts.evaluation.load.tokens import TokenRequest

_READ_BYTES = 1 << 20


class Refused(Exception):
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
        """What each read brings: the objects of its whole events."""
        async with self._session.post(url, json=body) as response:
            await _check(response)
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                found = [
                    json.loads(line[6:])
                    for line in lines
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]")
                ]
                for event in found:
                    if "error" in event:
                        raise Refused(str(event["error"]))
                if found:
                    yield found

    async def _whole(self, url: str, body: Any) -> Any:
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
            yield int((await self._whole(self._url, body))["usage"]["completion_tokens"])
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
        self._urls = [f"http://{each}/v2/models/{model}/{action}" for each in addresses]
        self._tokens, self._stream, self._asked = tokens, stream, 0

    async def ask(self, request: LoadRequest) -> AsyncGenerator[int, None]:
        tensors = self._tokens.tensors(request)
        body = {name: array[0].tolist() for name, array in tensors.items()}
        url = self._urls[self._asked % len(self._urls)]
        self._asked += 1
        if not self._stream:
            yield self._tokens.generated(await self._whole(url, body), request)
            return
        async for events in self._events(url, body):
            yield self._tokens.generated(events[-1], request)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise Refused(f"{response.status}: {(await response.text())[:500]}")
