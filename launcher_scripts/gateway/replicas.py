"""The servers of one model as one: who gets a row, and what becomes of it when its server fails."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from launcher_scripts.common.digests import block_digests
from launcher_scripts.gateway.api_errors import ServerLost, unavailable
from launcher_scripts.gateway.backend import Backend, Increment, RowRequest

_BLOCK_TOKENS = 64
_MAX_BLOCKS = 1 << 14  # a million tokens; the cache of a server holds no more of most models


class SentPrompts:
    """The newest blocks of prompts that one server was given: what its prefix cache may hold."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, None] = {}  # the oldest first

    def tokens(self, digests: Sequence[bytes]) -> int:
        """How many tokens at the beginning of a prompt it was given before."""
        count = len(digests)
        while count and digests[count - 1] not in self._blocks:
            count -= 1
        return _BLOCK_TOKENS * count

    def add(self, digests: Sequence[bytes]) -> None:
        """The server gets a prompt with such blocks."""
        for digest in digests:
            self._blocks.pop(digest, None)
            self._blocks[digest] = None
        while len(self._blocks) > _MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


@dataclass(eq=False)
class Replica:
    """One server, and what it has to do.

    backends:           model -> its backend at this server
    healthy:            it gets new rows
    leaving:            it is no longer among the gateway's servers, but has rows to end
    running:            rows
    outstanding_tokens: of the running rows: those of the prompts, and those that are asked for and
                        have not come
    cache_use:          share of its key/value caches that belongs to rows, 0 to 1; None: not known
    metrics_address:    host:port or unix:PATH of its metrics; None: they cannot be read here
    sent:               prompts of the models that share what prompts have in common
    on_failure:         called when it has failed a row: from then on it is not healthy
    """

    address: str
    backends: Mapping[str, Backend] = field(default_factory=dict)
    healthy: bool = False
    leaving: bool = False
    running: int = 0
    outstanding_tokens: int = 0
    cache_use: float | None = None
    metrics_address: str | None = None
    last_turn: int = 0
    sent: SentPrompts = field(default_factory=SentPrompts)
    on_failure: Callable[[], None] = lambda: None

    def facts(self) -> dict[str, Any]:
        """Its entry of /servers."""
        return {
            "address": self.address,
            "healthy": self.healthy and not self.leaving,
            "running": self.running,
            "outstanding_tokens": self.outstanding_tokens,
            "cache_use": self.cache_use,
            "models": sorted(self.backends),
        }

    def takes(self, model: str) -> bool:
        """Whether it may be given rows of the model."""
        return self.healthy and not self.leaving and model in self.backends

    async def generate(self, model: str, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """The row's increments, counted. Raises ServerLost when the server fails."""
        left = len(request.prompt_ids) + request.max_tokens * request.beam_width
        self.running += 1
        self.outstanding_tokens += left
        backend = self.backends[model]
        try:
            async with aclosing(backend.generate(request)) as increments:
                async for increment in increments:
                    came = min(left, len(increment.token_ids))
                    left -= came
                    self.outstanding_tokens -= came
                    yield increment
        except ServerLost:
            if self.backends.get(model) is backend:  # else it has failed and recovered since
                self.healthy = False
                self.sent = SentPrompts()
                self.on_failure()
            raise
        finally:
            self.running -= 1
            self.outstanding_tokens -= left


class Replicas:
    """A Backend: rows of one model go where the fewest tokens are outstanding, ties by turn. Tokens
    of the prompt that a server was given before, and need not compute again, are taken off.

    A row whose server fails is sent to every other healthy server, once to each. One that had
    begun, and whose beginning may have been shown, ends with the error.
    """

    def __init__(self, model: str, servers: Sequence[Replica]) -> None:
        """servers: of all models; its owner may change it at any time"""
        self._model = model
        self._servers = servers
        self._turns = itertools.count(1)

    async def generate(self, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """See Backend. Raises ApiError(503) where no server is healthy."""
        tried: set[Replica] = set()
        digests: tuple[bytes, ...] = ()
        if self.shares_prefixes:
            salts = request.cache_salt, request.lora_adapter
            digests = prompt_digests(request.prompt_ids, self._model, *salts)
        lost: ServerLost | None = None
        begun = False
        while (chosen := self._choice(tried, digests)) is not None:
            tried.add(chosen)
            chosen.sent.add(digests)
            if begun:
                yield Increment(begins_again=True)
                begun = False
            try:
                async with aclosing(chosen.generate(self._model, request)) as increments:
                    async for increment in increments:
                        begun = True
                        yield increment
                return
            except ServerLost as error:
                if begun and not request.whole:
                    raise
                lost = error
        raise lost or unavailable(f"no server of {self._model} is healthy")

    @property
    def shares_prefixes(self) -> bool:
        """Whether the servers compute prompts that begin alike once."""
        backends = (server.backends.get(self._model) for server in self._servers)
        return any(backend is not None and backend.shares_prefixes for backend in backends)

    def _choice(self, tried: set[Replica], digests: Sequence[bytes]) -> Replica | None:
        servers = [s for s in self._servers if s.takes(self._model) and s not in tried]
        if not servers:
            return None
        chosen = min(
            servers, key=lambda s: (s.outstanding_tokens - s.sent.tokens(digests), s.last_turn)
        )
        chosen.last_turn = next(self._turns)
        return chosen


def prompt_digests(
    ids: Sequence[int], model: str, salt: int, adapter: int | None = None
) -> tuple[bytes, ...]:
    """Of a prompt's blocks; texts of other models, salts and LoRA adapters have others."""
    return tuple(block_digests(ids, _BLOCK_TOKENS, f"{model} {salt} {adapter}".encode()))
