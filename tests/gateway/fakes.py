"""An engine that answers as a test says, and the gateway's application before it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.backend import Backend, Increment, Replica, RowRequest, TokenLogProb
from launcher_scripts.gateway.middleware import Keys
from launcher_scripts.gateway.served_model import ChatTemplate, ServedModel
from launcher_scripts.gateway.service import uvicorn_config
from tests.processes import wait_for

SETTINGS = GatewaySettings(("no file of a server",))
TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
GPT2 = load_tokenizer(TOKENIZERS / "gpt2bpe")
END_ID = GPT2.end_id
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def log_prob(token_id: int, top: int) -> TokenLogProb:
    """Made of the id, so that a test can tell where it came from."""
    alternatives = [(token_id + place, -0.5 - place) for place in range(top)]
    return TokenLogProb(token_id, -0.5 - token_id / 1000, 1, tuple(alternatives))


@dataclass(eq=False)
class FakeBackend:
    """Answers every row with ids, an end token after them unless told.

    waits:   rows stay before their second increment
    at_once: tokens in an increment
    cached:  prompt tokens in the cache
    """

    ids: Callable[[RowRequest], Sequence[int]] = lambda _: GPT2.encode(" some words to say")
    error: Exception | None = None
    waits: bool = False
    at_once: int = 1
    cached: Callable[[RowRequest], int] = lambda _: 0
    shares_prefixes: bool = False
    digests: Mapping[str, Any] | None = None
    sleeping: bool = False
    reply: Mapping[str, Any] = field(default_factory=dict)
    operations: list[Mapping[str, Any]] = field(default_factory=list)
    requests: list[RowRequest] = field(default_factory=list)
    running: int = 0

    async def operate(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        self.operations.append(operation)
        return dict(self.reply)

    async def generate(self, request: RowRequest) -> AsyncIterator[Increment]:
        self.requests.append(request)
        self.running += 1
        try:
            if self.error is not None:
                raise self.error
            async for increment in self._increments(request):
                yield increment
        finally:
            self.running -= 1

    async def _increments(self, request: RowRequest) -> AsyncIterator[Increment]:
        ends = () if request.end_id is None else (request.end_id,)
        ids = (*self.ids(request), *ends)[: request.max_tokens]
        prompt = None
        if request.prompt_log_probs is not None:
            top = request.prompt_log_probs
            later = tuple(log_prob(each, top) for each in request.prompt_ids[1:])
            prompt = (None, *later) if request.prompt_ids else ()
        if request.beam_width > 1:
            beams = tuple(tuple(ids[: len(ids) - beam]) for beam in range(request.beam_width))
            yield Increment(finished=True, beams=beams)
            return
        if not ids:
            yield Increment(prompt_log_probs=prompt, finished=True)
        for place in range(0, len(ids), self.at_once):
            if place and self.waits:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            part = tuple(ids[place : place + self.at_once])
            last = place + len(part) == len(ids)
            found = self._log_probs(request, part)
            yield Increment(
                part,
                found,
                None if place else prompt,
                finished=last,
                num_cached_tokens=0 if place else self.cached(request),
            )

    @staticmethod
    def _log_probs(request: RowRequest, ids: Sequence[int]) -> tuple[TokenLogProb, ...]:
        if request.log_probs is None:
            return ()
        return tuple(log_prob(each, request.log_probs) for each in ids)


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; a hang is the whole test's timeout."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


def saying(text: str) -> FakeBackend:
    """Every answer is this text."""
    return FakeBackend(lambda _: GPT2.encode(text))


def served(backend: Backend, name: str = "tiny", **more: Any) -> ServedModel:
    """A model with the small GPT-2 vocabulary."""
    values = {
        "tokenizer": GPT2,
        "end_ids": (END_ID,),
        "max_len": 64,
        "template": ChatTemplate({"default": CHATML}, {}),
        "created": 1,
    }
    return ServedModel(name, backend, **{**values, **more})


def client_of(
    *models: ServedModel,
    keys: dict[str, str] | None = None,
    replicas: Sequence[Replica] | None = None,
    **settings: Any,
) -> TestClient:
    """A client of the application; `client.app.state.gateway` is the Gateway.

    replicas: None: one server that is healthy
    """
    if replicas is None:
        backends = {model.name: model.backend for model in models}
        replicas = [Replica("node0:8001", backends, healthy=True)]
    return TestClient(make_app(models, replace(SETTINGS, **settings), Keys(keys or {}), replicas))


@contextmanager
def listening(app: Starlette, **settings: Any) -> Iterator[str]:
    """The address at which the application answers, in a thread, with the gateway's settings."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        server = uvicorn.Server(uvicorn_config(app, replace(SETTINGS, **settings)))
        thread = threading.Thread(target=server.run, args=([own],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"http://127.0.0.1:{own.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(60)
