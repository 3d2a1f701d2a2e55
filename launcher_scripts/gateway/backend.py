"""The engine as the gateway sees it: its interface, merged streams, and replicas."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from launcher_scripts.common.files import block_digests
from launcher_scripts.contract.requests import SLEEPS
from launcher_scripts.gateway.api_errors import ServerLost, timed_out, unavailable

SLEEP_SECONDS = 5  # after which a client may ask a model that sleeps again


@dataclass(frozen=True)
class ServedLoRA:
    """An adapter that was added to a running model.

    path:   on the servers
    number: the gateway's own; a server has another one
    """

    name: str
    path: str
    number: int

    @property
    def loading(self) -> dict[str, str]:
        """The operation of a server that loads it."""
        return {"operation": "load_lora", "name": self.name, "path": self.path}


@dataclass(frozen=True)
class RowRequest:
    """One row to generate.

    prompt_ids:       of an encoder-decoder the encoder's input
    decoder_ids:      what the decoder of an encoder-decoder is given; (): its start token
    top_k:            0: of the whole vocabulary
    presence_penalty, frequency_penalty: for generated tokens, as OpenAI means them
    end_id:           the token that ends the row; None: none does
    stop_ids:         further tokens that do
    beam_width:       2 or more: a beam search, which has no log-probabilities
    grammar:          what the text has to be, the bytes of guided_grammar; None: anything
    grammar_parameter: of the client's request, where it says so
    client:           whose it is, so that a server can share its compilers among clients
    cache_salt:       prompts share keys and values with those of the same salt
    lora_adapter:     the number of one; None: none
    added_lora:       the adapter, if it was added while the model was served
    num_speculative_tokens: how many tokens a step may try at once (drafts)
    log_probs:        how many of the likeliest tokens come with each generated one; None: nothing,
                      0: the log-probability of the token alone
    prompt_log_probs: the same for the prompt's tokens
    timeout:          seconds
    full:             nothing is shown before all of it is there: it may be begun again
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    decoder_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    min_tokens: int = 0
    end_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    beam_width: int = 1
    length_penalty: float = 1.0
    grammar: bytes | None = None
    grammar_parameter: str = "response_format"
    client: str = ""
    cache_salt: int = 0
    lora_adapter: int | None = None
    added_lora: ServedLoRA | None = None
    num_speculative_tokens: int = 0
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    timeout: float | None = None
    full: bool = False


@dataclass(frozen=True)
class TokenLogProb:
    """log p of one token by the unmodified logits; `top` has the likeliest (id, log p)."""

    token_id: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RowWeights(NamedTuple):
    """The weights of a row that has ended: their system_fingerprint, None where it is not known.

    mixed:   the row began with others, and went on with these
    version: the trainer's name of them, where it has one
    """

    fingerprint: str | None
    mixed: bool
    version: str | None = None


class Increment(NamedTuple):
    """New tokens of a row.

    token_ids:        generated, the end token included
    log_probs:        of these tokens, where asked for
    prompt_log_probs: of the prompt's tokens, None for the first; in one increment, where asked for
    finished:         nothing comes after this one
    beams:            the ids of a beam search's hypotheses, best first, in its last increment; it
                      has no token_ids
    begins_again:     what has come so far does not count: another server begins the row again
    num_cached_tokens: prompt tokens that were in the server's prefix cache; in the first increment
    states:           of an encoder alone: float32 [prompt tokens, hidden]
    weights:          in the last increment of a row that has others than those of the server's
                      start
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb | None, ...] | None = None
    finished: bool = False
    beams: tuple[tuple[int, ...], ...] = ()
    begins_again: bool = False
    num_cached_tokens: int = 0
    states: Any = None
    weights: RowWeights | None = None


class Backend(Protocol):
    """Generates rows of one model."""

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prompts that begin alike are computed once."""
        ...

    @property
    def digests(self) -> Mapping[str, Any] | None:
        """Return those of the weights, as DigestChain.values has them; None: those of the start."""
        ...

    def generate(self, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """An async generator; the row is given up when it is closed.

        Raises ApiError for what the engine refuses, ServerLost when it is gone.
        """
        ...


class ServerBackend(Backend, Protocol):
    """A Backend that is one server."""

    @property
    def sleeping(self) -> bool:
        """Return whether the model has neither weights nor cache until it is woken up."""
        ...

    async def operate(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Have an operation done by the model's server; its reply."""
        ...


Item = TypeVar("Item")
# What a stream may be ahead of who reads them all.
_AHEAD = 64


def merged(
    streams: Sequence[AsyncGenerator[Item, None]], seconds: float | None = None
) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come.

    The first error of a stream is raised, and all are closed then, as they are when this generator
    is closed. Raises ApiError when `seconds` are over.
    """
    if len(streams) == 1 and seconds is None:
        return streams[0]
    return _merged(streams, seconds)


async def _merged(
    streams: Sequence[AsyncGenerator[Item, None]], seconds: float | None
) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(_AHEAD)

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    deadline = None if seconds is None else time.monotonic() + seconds
    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            came = await _next(queue, deadline, seconds)
            if isinstance(came, BaseException):
                raise came
            if came is None:
                running -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(queue: asyncio.Queue[Item], deadline: float | None, seconds: float | None) -> Item:
    if deadline is None:
        return await queue.get()
    try:
        return await asyncio.wait_for(queue.get(), deadline - time.monotonic())
    except asyncio.TimeoutError:
        raise timed_out(seconds or 0.0) from None


_BLOCK_TOKENS = 64
_MAX_BLOCKS = 1 << 14  # a million tokens; the cache of a server holds no more of most models


class SentPrompts:
    """The newest blocks of prompts that one server was given: what its prefix cache may hold."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, None] = {}  # the oldest first

    def tokens(self, digests: Sequence[bytes]) -> int:
        """Return the number of tokens at the beginning of a prompt that it was sent before."""
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
    backends: Mapping[str, ServerBackend] = field(default_factory=dict)
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

    def serves(self, model: str) -> bool:
        """Return whether it has the model, be it that this sleeps."""
        return self.healthy and not self.leaving and model in self.backends

    def takes(self, model: str) -> bool:
        """Return whether it may be given rows of the model."""
        return self.serves(model) and not self.backends[model].sleeping

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
        has_started = False
        while (replica := self._choice(tried, digests)) is not None:
            tried.add(replica)
            replica.sent.add(digests)
            if has_started:
                yield Increment(begins_again=True)
                has_started = False
            try:
                async with aclosing(replica.generate(self._model, request)) as increments:
                    async for increment in increments:
                        has_started = True
                        yield increment
                return
            except ServerLost as error:
                if has_started and not request.full:
                    raise
                lost = error
        if lost is None and any(server.serves(self._model) for server in self._servers):
            raise unavailable(SLEEPS, SLEEP_SECONDS)
        raise lost or unavailable(f"no server of {self._model} is healthy")

    @property
    def shares_prefixes(self) -> bool:
        """Return whether the servers compute prompts that begin alike once."""
        backends = (server.backends.get(self._model) for server in self._servers)
        return any(backend is not None and backend.shares_prefixes for backend in backends)

    @property
    def digests(self) -> Mapping[str, Any] | None:
        """Return those of the weights that one of the servers got since its start."""
        backends = [server.backends.get(self._model) for server in self._servers]
        return next((item.digests for item in backends if item is not None and item.digests), None)

    def _choice(self, tried: set[Replica], digests: Sequence[bytes]) -> Replica | None:
        servers = [s for s in self._servers if s.takes(self._model) and s not in tried]
        if not servers:
            return None
        replica = min(
            servers, key=lambda s: (s.outstanding_tokens - s.sent.tokens(digests), s.last_turn)
        )
        replica.last_turn = next(self._turns)
        return replica


def prompt_digests(
    ids: Sequence[int], model: str, salt: int, adapter: int | None = None
) -> tuple[bytes, ...]:
    """Return the digests of a prompt's blocks; other models, salts and LoRA adapters have other
    digests."""
    return tuple(block_digests(ids, _BLOCK_TOKENS, f"{model} {salt} {adapter}".encode()))
