"""The rows of one request: what the engine is asked for each, and their answers as they come."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from launcher_scripts.common.json_schema import schemas_of, supported_schema
from launcher_scripts.common.tokenizer import TokenizationError
from launcher_scripts.contract.tensors import MAX_GRAMMAR_BYTES
from launcher_scripts.gateway.admission import Admission, ClientThreads, QueuedRow
from launcher_scripts.gateway.api_errors import ContextOverflow, bad_request, unsupported
from launcher_scripts.gateway.backend import Increment, RowRequest, RowWeights, merged
from launcher_scripts.gateway.reasoning import Reasoning, StopTexts
from launcher_scripts.gateway.row_text import (
    LogProbEntry,
    RowTextStream,
    TextIncrement,
    prompt_entries,
    token_texts,
)
from launcher_scripts.gateway.schemas import ChatBody, SamplingBody, StreamOptions
from launcher_scripts.gateway.served_model import ServedModel

_MAX_BEAMS = 64
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

# Of a row's request, to show.
_RENDERED = (
    *_DEFAULTS,
    *("max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    *("end_id", "stop_ids", "beam_width", "length_penalty", "grammar", "num_speculative_tokens"),
)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request. text: as it is echoed."""

    ids: tuple[int, ...]
    text: str


@dataclass(eq=False)
class RequestRecord:
    """The progress of a request, for its line in the log and for metrics.

    owner: whose key it has; None: there are no keys
    received, first_token: by time.monotonic()
    warnings: parts of the request without effect, for the header X-Warning
    cached_tokens: of the prompts, that the server had computed before
    cancelled: by a request of its client
    weights: of its last row that has others than those of the server's start
    """

    request_id: str
    client: str
    owner: str | None = None
    received: float = 0.0
    first_token: float | None = None
    model: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    body_size: int = 0
    warnings: list[str] = field(default_factory=list)
    cancelled: bool = False
    weights: RowWeights | None = None

    def usage(self) -> dict[str, Any]:
        """OpenAI's."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class RequestLimits:
    """One gateway's limits for all requests.

    threads:     for templates and tokenizers
    timeout:     seconds, unless a request says one
    chat_tokens: of a chat that does not say how many; the engine keeps room for all of them
    """

    admission: Admission
    threads: ClientThreads
    timeout: float | None = None
    chat_tokens: int = 1024


@dataclass(frozen=True)
class GenerationOptions:
    """Options that completions and chats have under different names.

    rows:      generated for every prompt; `n` of the body are shown
    log_probs: how many alternatives, None: no log-probabilities
    echo:      the answer begins with the prompt
    reasoning: what may be thought before a text that follows a grammar
    """

    max_tokens: int
    rows: int
    log_probs: int | None = None
    echo: bool = False
    reasoning: Reasoning | None = None


class Generation:
    """All rows of one request. A choice is one answer: prompt * options.rows + row."""

    def __init__(
        self,
        model: ServedModel,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        record: RequestRecord,
        limits: RequestLimits,
        grammar: tuple[str, bytes | None],
    ) -> None:
        """Raises ApiError where too many rows wait.

        grammar: the parameter that asks for it, and guided_grammar
        """
        self.model = model
        self.body = body
        self.prompts = tuple(prompts)
        self.options = options
        self.record = record
        self._timeout = body.timeout or limits.timeout
        self._grammar_parameter, self._grammar = grammar
        self._beams = body.use_beam_search and options.rows > 1
        self._tokens: Counter[int] = Counter()
        self._cached: Counter[int] = Counter()  # prompt tokens by row
        record.model = model.name
        record.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        rows = len(prompts) * (1 if self._beams else options.rows)
        self._slots = limits.admission.reserve(record.client, rows)
        self.threads = limits.threads.of(record.client)

    @classmethod
    async def of(
        cls,
        model: ServedModel,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        record: RequestRecord,
        limits: RequestLimits,
    ) -> Generation:
        """Check the body and its grammar, by a thread if it is long.

        Raises ApiError for what cannot be done, and where too many rows wait.
        """

        def check() -> tuple[str, bytes | None]:
            _check(model, body, prompts, options)
            return _grammar(body, options, record.warnings)

        grammar = await limits.threads.of(record.client).run_on_body(check, record.body_size)
        return cls(model, body, prompts, options, record, limits, grammar)

    async def pieces(self) -> AsyncGenerator[tuple[int, TextIncrement], None]:
        """(choice, piece) of all rows as they come.

        Raises ApiError when a row cannot be generated, or when the request's time is over; the
        other rows are given up then, and when the generator is closed.
        """
        rows = [
            self._row(number, request, slot)
            for number, (request, slot) in enumerate(
                zip(self.row_requests(), self._slots, strict=True)
            )
        ]
        try:
            async with aclosing(merged(rows, self._timeout)) as results:
                async for choice, piece in results:
                    if self.record.first_token is None:
                        self.record.first_token = time.monotonic()
                    self.record.generated_tokens += piece.tokens - self._tokens[choice]
                    self._tokens[choice] = piece.tokens
                    yield choice, piece
        except TokenizationError as error:
            raise bad_request(f"the answer cannot be shown: {error}") from error
        finally:
            self.abort()

    def row_requests(self) -> list[RowRequest]:
        """Return the engine's requests, one for each row."""
        values = self.body.seed
        seed = random.getrandbits(62) if values is None else values
        return [self._request(number, seed + number) for number in range(len(self._slots))]

    def rendered(self) -> list[dict[str, Any]]:
        """Return the prompts, and the sampling of the first row of each, as clients see them."""
        return [
            {
                "request_id": request.request_id,
                "model": self.model.name,
                "prompt": prompt.text,
                "token_ids": request.prompt_ids,
                "sampling_params": {name: getattr(request, name) for name in _RENDERED},
            }
            for prompt, request in zip(
                self.prompts, self.row_requests()[:: self._rows_per_prompt], strict=True
            )
        ]

    def abort(self) -> None:
        """Leave all places."""
        for slot in self._slots:
            slot.leave()

    def _prompt(self, number: int) -> Prompt:
        """The prompt of a row."""
        return self.prompts[number // self._rows_per_prompt]

    @property
    def _rows_per_prompt(self) -> int:
        return 1 if self._beams else self.options.rows

    def _count_cached(self, number: int, tokens: int) -> None:
        """Count a row's prompt tokens that were cached. A prompt's rows find what its first row
        computes, so those count that all of them found.
        """
        self._cached[number] = tokens
        rows = self._rows_per_prompt
        starts = range(0, len(self._slots), rows)
        self.record.cached_tokens = sum(
            min(self._cached[row] for row in range(start, start + rows)) for start in starts
        )

    def _request(self, number: int, seed: int) -> RowRequest:
        """Return the engine's request of a row."""
        body, model, options = self.body, self.model, self.options
        end_ids = () if body.ignore_eos else model.end_ids
        sampling: dict[str, Any] = {
            name: model.defaults.get(name, default) if (raw := getattr(body, name)) is None else raw
            for name, default in _DEFAULTS.items()
        }
        sampling["top_k"] = max(0, int(sampling["top_k"]))
        # The best of more rows than are shown are found by their log-probabilities.
        ranked = not self._beams and options.rows > body.n
        name = self.record.request_id
        return RowRequest(
            request_id=name if len(self._slots) == 1 else f"{name}-{number}",
            prompt_ids=self._prompt(number).ids,
            max_tokens=options.max_tokens,
            decoder_ids=model.special.decoder,
            **sampling,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias={int(token): value for token, value in body.logit_bias.items()},
            seed=seed,
            min_tokens=body.min_tokens,
            end_id=end_ids[0] if end_ids else None,
            stop_ids=tuple(dict.fromkeys((*end_ids[1:], *body.stop_token_ids))),
            beam_width=options.rows if self._beams else 1,
            length_penalty=body.length_penalty,
            grammar=self._grammar,
            grammar_parameter=self._grammar_parameter,
            client=hashlib.blake2b(self.record.client.encode(), digest_size=8).hexdigest(),
            cache_salt=_cache_salt(self.record.owner, body.cache_salt),
            lora_adapter=model.lora_adapter,
            added_lora=model.added_lora,
            num_speculative_tokens=body.num_speculative_tokens,
            log_probs=0 if ranked and options.log_probs is None else options.log_probs,
            prompt_log_probs=options.log_probs if options.echo else None,
            timeout=self._timeout,
            full=not body.stream,
        )

    async def _row(
        self, number: int, request: RowRequest, slot: QueuedRow
    ) -> AsyncGenerator[tuple[int, TextIncrement], None]:
        """The pieces of one row, or of all hypotheses of a beam search."""
        choice = number * (self.options.rows if self._beams else 1)
        async with slot.taken():
            if not request.max_tokens and request.prompt_log_probs is None:
                echo = self._prompt(number).text if self.options.echo else ""
                for beam in range(request.beam_width):
                    yield choice + beam, TextIncrement(echo, finish_reason="length")
                return
            streamed = _StreamedText(self, request, self._prompt(number))
            async with aclosing(self.model.backend.generate(request)) as increments:
                async for increment in increments:
                    if increment.num_cached_tokens or increment.begins_again:
                        self._count_cached(number, increment.num_cached_tokens)
                    if increment.weights is not None:
                        self.record.weights = increment.weights
                    if increment.begins_again:
                        streamed = _StreamedText(self, request, self._prompt(number))
                        yield choice, TextIncrement(begins_again=True)
                        continue
                    streamed.accept_prompt(increment)
                    if self._beams:
                        for beam, ids in enumerate(increment.beams):
                            yield choice + beam, streamed.hypothesis(ids)
                        continue
                    piece = streamed.next(increment)
                    yield choice, piece
                    if piece.finish_reason is not None:
                        return


class _StreamedText:
    """One row as the client sees it: the echoed prompt first."""

    def __init__(self, generation: Generation, request: RowRequest, prompt: Prompt) -> None:
        self._generation = generation
        self._request = request
        self._prompt = prompt
        self._echo = prompt.text if generation.options.echo else ""
        self._entries: tuple[LogProbEntry, ...] = ()
        self._text = self._new_text()

    def accept_prompt(self, increment: Increment) -> None:
        """Keep the prompt's log-probabilities for the beginning of the answer."""
        if increment.prompt_log_probs is not None:
            texts = token_texts(self._generation.model.tokenizer, ())
            self._entries = prompt_entries(texts, self._prompt.ids, increment.prompt_log_probs)

    def next(self, increment: Increment) -> TextIncrement:
        """The next piece; the first one begins with the echo."""
        piece = self._text.feed(increment)
        if self._echo or self._entries:
            parts = (self._echo + piece.parts[0], *piece.parts[1:]) if piece.parts else ()
            piece = piece._replace(
                text=self._echo + piece.text,
                entries=(*self._entries, *piece.entries),
                parts=parts,
            )
            self._echo, self._entries = "", ()
        return piece

    def hypothesis(self, ids: tuple[int, ...]) -> TextIncrement:
        """All of one hypothesis."""
        piece = self._new_text().feed(Increment(ids, finished=True))
        return piece._replace(text=self._echo + piece.text)

    def _new_text(self) -> RowTextStream:
        model, body, request = self._generation.model, self._generation.body, self._request
        return RowTextStream(
            token_texts(model.tokenizer, () if model.encodes else self._prompt.ids),
            StopTexts(list(body.stop), included=body.include_stop_str_in_output),
            request.end_id,
            request.stop_ids,
            max_tokens=request.max_tokens,
            min_tokens=body.min_tokens,
            offset=len(self._echo),
        )


def check_rows(prompts: int, rows: int, admission: Admission) -> None:
    """Raises ApiError for more answers than one client may have: `rows` for each prompt."""
    if prompts * rows > admission.max_rows:
        raise bad_request(
            f"a request has at most {admission.max_rows} answers; got {prompts} prompts "
            f"and {rows} for each",
            "prompt" if prompts > 1 else "n",
        )


def check_length(model: ServedModel, prompt_len: int, max_tokens: int, name: str) -> None:
    """Raises ApiError for tokens that the model has no positions for.

    name: the parameter that contains the prompt
    """
    needed = max(prompt_len, max_tokens) if model.encodes else prompt_len + max_tokens
    if model.max_len is not None and needed > model.max_len:
        param = name if prompt_len + (not model.encodes) > model.max_len else "max_tokens"
        raise ContextOverflow.of_tokens(model.max_len, prompt_len, max_tokens, name, param)


def _cache_salt(owner: str | None, salt: str | None) -> int:
    """Return the salt that separates the caches of keys and salts."""
    if owner is None and salt is None:
        return 0
    key_text = json.dumps((owner, salt)).encode()
    return int.from_bytes(hashlib.blake2b(key_text, digest_size=8).digest(), "big")


def _grammar(
    body: SamplingBody, options: GenerationOptions, warnings: list[str]
) -> tuple[str, bytes | None]:
    """The parameter that asks for a grammar, and guided_grammar.

    Raises ApiError for a long one, and for schemas that cannot be followed.
    """
    parameter, grammar = next(iter(body.grammars.items()), ("", None))
    if grammar is None:
        return parameter, None
    if options.reasoning is not None:
        grammar = {**grammar, "reasoning": options.reasoning.marks}
    text = json.dumps(grammar, ensure_ascii=False).encode()
    if len(text) > MAX_GRAMMAR_BYTES:
        raise bad_request(
            f"{parameter} is too long: got {len(text)} bytes as JSON, at most {MAX_GRAMMAR_BYTES}",
            parameter,
        )
    try:
        for schema in schemas_of(grammar):
            warnings += [f"{parameter}: {note}" for note in supported_schema(schema)[1]]
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{parameter}: {error}", parameter) from error
    return parameter, text


def _check(
    model: ServedModel, body: SamplingBody, prompts: Sequence[Prompt], options: GenerationOptions
) -> None:
    """Raises ApiError for options that contradict each other or the model."""
    if options.rows < body.n:
        raise bad_request(f"best_of must be at least n; got {options.rows} and {body.n}", "best_of")
    if body.stream and options.rows > body.n:
        raise bad_request("the best of several answers cannot be streamed", "best_of")
    if body.stream and body.use_beam_search:
        raise unsupported("stream", "a beam search cannot be streamed")
    if body.use_beam_search and options.log_probs is not None:
        raise unsupported("logprobs", "a beam search has no log-probabilities")
    if body.use_beam_search and options.rows > _MAX_BEAMS:
        raise bad_request(f"a beam search has at most {_MAX_BEAMS} beams; got {options.rows}", "n")
    if len(body.grammars) > 1:
        raise bad_request(
            "a text follows one of response_format, structured_outputs, guided_json and the like, "
            "and a tool_choice that asks for a call",
            "response_format",
        )
    if body.use_beam_search and body.grammars:
        raise unsupported("use_beam_search", "a beam search follows no grammar")
    if body.num_speculative_tokens and body.grammars:
        raise unsupported("num_speculative_tokens", "drafts of tokens follow no grammar")
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise bad_request("stream_options need stream", "stream_options")
    if options.echo and model.encodes:
        raise unsupported(
            "echo", f"{model.name} is an encoder-decoder: its prompt is not a beginning"
        )
    if body.min_tokens > options.max_tokens:
        raise bad_request(
            f"min_tokens is more than max_tokens; got {body.min_tokens} and {options.max_tokens}",
            "min_tokens",
        )
    for prompt in prompts:
        if model.encodes and not prompt.ids:
            raise bad_request("the prompt is empty, and the encoder needs a token", "prompt")
        name = "messages" if isinstance(body, ChatBody) else "prompt"
        check_length(model, len(prompt.ids), options.max_tokens, name)
