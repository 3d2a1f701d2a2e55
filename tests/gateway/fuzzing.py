"""Seeded requests that nobody would send, as bytes for a socket, and how they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher_scripts.gateway.responses_schemas import ResponsesBody
from launcher_scripts.gateway.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ROUTES = [*BODIES, "/v1/embeddings", "/v1/models", "/tokenizer_info", "/health", "/ready"]
ROUTES += [
    "/servers",
    "/clients",
    "/metrics",
    "/version",
    "/",
    "/docs",
    "/openapi.json",
    "/ping",
    "/load",
]
ROUTES += ["/v1/completions/render", "/v1/chat/completions/render"]
PATHS = ["/v1/models/%00", "/v1/models/../../etc/passwd", "//v1//completions", "/v1/completions/"]
PATHS += ["/%ff%fe", "/v1/models/" + "a" * 3000, "*", "http://other/v1/models", "/?" + "x=1&" * 999]
TYPES = ["text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "\x7f/é"]
BOMB = gzip.compress(b"[" * (1 << 20))
TEXTS = [
    "",
    "Hello",
    " the people",
    "\0",
    "\ud800",
    "🤖👩‍👩‍👧",
    "ﷺ" * 40,
    "\ufeffa",
    "\u202eabc",
    "{{7*7}}",
]
TEXTS += [
    "<|endoftext|>",
    "<|im_end|>",
    "a" * 5000,
    "\r\n\r\ndata: x",
    "e\u0301" * 30,
    "日本語",
    "'\"\\",
]
NUMBERS = [0, 1, 2, 3, 7, 40, -1, -3, 1 << 31, (1 << 31) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
NUMBERS += [10**400, 0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 490, 491]
SCHEMAS = [{}, {"type": "object"}, {"type": "integer"}, {"$ref": "#"}, {"type": "x"}, {"enum": []}]
SCHEMAS += [{"anyOf": [{"$ref": "#"}, {"$ref": "#/a"}]}, {"type": "string", "pattern": "(a*)*b"}]
SCHEMAS += [
    {"type": "array", "minItems": 1 << 40},
    {"maxLength": -1},
    {"type": "string", "format": "x"},
]
MESSAGES = [[{"role": "user", "content": text}] for text in ("Hello", "", "\ud800", "a" * 900)]
MESSAGES += [[], [{}], [{"role": "x" * 65}], [{"role": "user", "content": [{"type": "image_url"}]}]]
MESSAGES += [[{"role": "assistant", "tool_calls": [{}]}], [{"role": "user", "content": None}]]
# What a parameter could be, so that some requests get as far as the engine.
LIKELY: dict[str, Sequence[Any]] = {
    "model": ["gpt", "plain", "t5", "other", "", "gpt\n"],
    "prompt": ["Hello", "", ["One", "Two"], [5, 6, 7], [[5], [6, 7]], [490, 491], [[]], *TEXTS],
    "messages": MESSAGES,
    "max_tokens": [0, 1, 3, 8, 30, 95, 96],
    "max_completion_tokens": [0, 1, 3, 8],
    "input": ["Hello", "", [], [{}], *MESSAGES[:4], [{"type": "function_call"}]],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_schema", "schema": {}}}, {}],
    "tool_choice": ["auto", "none", "required", {"type": "function", "name": "f"}, {}],
    "max_output_tokens": [0, 1, 8],
    "tokens": [[], [5, 6], [491], list(range(491)), [(1 << 31) - 1]],
    "n": [1, 2, 3, 8, 128],
    "best_of": [1, 2, 4],
    "stop": ["a", [], ["e", "\n"], "\ud800", [""], ["a"] * 65, "é"],
    "logit_bias": [{}, {"5": 100}, {"490": -100}, {"491": 1}, {"-1": 1}, {"٣": 1}, {"0": -100}],
    "response_format": [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}]
    + [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS],
    "guided_json": SCHEMAS,
    "guided_regex": ["a+", "(", "(a*)*b", "[a-z]{1,100000}", "\\p{L}", "(?=a)", "\0", "x{0}"],
    "guided_choice": [["yes", "no"], [""], ["a"] * 1025, ["\ud800"], ["a", "ab", "abc"]],
    "guided_grammar": ["start: A", 'root ::= "a" root | "b"', "root ::= b", "a" * 16385],
    "structured_outputs": [{}, {"json": "{}"}, {"json": {}, "regex": "a"}, {"grammar": "("}],
    "stream": [True, True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {"x": 1}],
    "timeout": [0.001, 0.05, 1, 5],
    "logprobs": [True, False, 0, 3, 20, 21],
    "tools": [[], [{}], [{"type": "function", "function": {"name": "f"}}]],
    "chat_template_kwargs": [{}, {"messages": 1}, {"raise_exception": 1}, {"a": {"b": []}}],
    "user": ["", "me", "x" * 513],
}
LIKELY |= dict.fromkeys(("temperature", "top_p", "min_p"), (0, 0.3, 1.0, 1))
LIKELY |= dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 0.5, 2))
LIKELY |= dict.fromkeys(("use_beam_search", "echo", "ignore_eos"), (True, False))
USUAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "gpt", "prompt": "Hello", "max_tokens": 5},
    "/v1/chat/completions": {"model": "gpt", "messages": MESSAGES[0], "max_tokens": 5},
    "/v1/responses": {"model": "gpt", "input": "Hello", "max_output_tokens": 5},
    "/tokenize": {"model": "gpt", "prompt": "Hello"},
    "/detokenize": {"model": "gpt", "tokens": [5, 6]},
}


@dataclass(frozen=True)
class Fuzzed:
    """What one connection carries.

    parts:  written one after the other, with a pause between them
    closes: the connection is closed after them, without reading
    reads:  bytes to read before it is closed; None: all that comes
    whole:  False: the gateway may go on waiting for the rest, and need not answer
    """

    parts: Sequence[bytes]
    closes: bool = False
    reads: int | None = None
    full: bool = True


class Fuzzer:
    """Request number i of a seed is the same in every run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def request(self, number: int) -> Fuzzed:
        """One of all kinds."""
        self._random = random.Random(self._seed * 1_000_003 + number)
        kinds: list[tuple[Callable[[], Fuzzed], int]] = [
            (self._parameters, 50),
            (self._bytes, 15),
            (self._http, 20),
            (self._leaving, 15),
        ]
        makes, weights = zip(*kinds, strict=True)
        make: Callable[[], Fuzzed] = self._random.choices(makes, weights)[0]
        return make()

    def _parameters(self) -> Fuzzed:
        path = self._random.choice(list(BODIES))
        return Fuzzed([_message(path, self._json(self._body(path)))])

    def _bytes(self) -> Fuzzed:
        """A body that is not JSON, or hardly."""
        path = self._random.choice(list(BODIES))
        body = self._json(self._body(path))
        place = self._random.randrange(len(body))
        deep = self._random.choice([100, 10_000, 100_000])
        choices = [
            body[:place],
            body[:place] + self._random.randbytes(3) + body[place:],
            body + body,
            b"\xef\xbb\xbf" + body,
            json.dumps(USUAL[path]).encode("utf-16"),
            b"[" * deep,
            b'{"a":' * deep,
            b'{"prompt":' + b"[" * deep + b"]" * deep + b"}",
            b'{"model": "gpt", "prompt": "a", "seed": ' + b"9" * deep + b"}",
            self._random.randbytes(self._random.randrange(400)),
            b" " * deep + body,
            b'"' + b"\\ud83d" * 100 + b'"',
            b"x" * (1 << 20) + b"y",
        ]
        return Fuzzed([_message(path, self._random.choice(choices))])

    def _http(self) -> Fuzzed:
        """A method, a header or a line that does not belong there."""
        choose = self._random.choice
        path = choose(list(BODIES))
        body = self._json(USUAL[path])
        size = len(body)
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)
        chunked = ["Transfer-Encoding: chunked"]
        kinds: list[Callable[[], bytes]] = [
            lambda: _message(choose(ROUTES), body, choose(["GET", "PUT", "DELETE", "HEAD", "X"])),
            lambda: _message(choose(PATHS), body, choose(["GET", "POST", "OPTIONS"])),
            lambda: _message(path, body, headers=[f"Content-Type: {choose(TYPES)}"]),
            lambda: _message(path, gzip.compress(body), headers=["Content-Encoding: gzip"]),
            lambda: _message(path, BOMB, headers=["Content-Encoding: gzip"]),
            lambda: _message(path, body, headers=[f"X-Request-Id: {choose(['a', 'b' * 200])}"]),
            lambda: _message(path, body, headers=[f"Authorization: {choose(['x', 'Basic é'])}"]),
            lambda: _message(path, body, headers=["X-Long: " + "a" * choose([1000, 70_000])]),
            lambda: _message(path, body, headers=["X-Many: 1"] * 3000),
            lambda: _message(path, body, headers=["Expect: 100-continue"]),
            lambda: _message(path, chunks, headers=chunked),
            lambda: _message(path, body, version=choose(["1.0", "0.9"])),
            lambda: (
                _message(path, body).replace(b"Connection: close\r\n", b"") + _message(path, body)
            ),
        ]
        cut: list[Callable[[], bytes]] = [
            lambda: _message(path, body, headers=[f"Content-Length: {choose([size + 1, -1])}"]),
            lambda: _message(path, body, headers=[f"Content-Length: {1 << 70}"]),
            lambda: _message(path, choose([b"zz\r\n", b"-1\r\n", chunks[:9]]), headers=chunked),
            lambda: _message(path, body, headers=["Upgrade: websocket", "Connection: Upgrade"]),
            lambda: _message(path, body, version=choose(["2.0", "x"])),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01",
            lambda: self._random.randbytes(200),
        ]
        if self._random.random() < 0.3:
            return Fuzzed([choose(cut)()], full=False)
        return Fuzzed([choose(kinds)()])

    def _leaving(self) -> Fuzzed:
        """A client that goes at some point, or that is slow."""
        path = self._random.choice(["/v1/completions", "/v1/chat/completions"])
        body = {**USUAL[path], "model": self._random.choice(["gpt", "plain"]), "max_tokens": 60}
        if path.endswith("/v1/completions") and self._random.random() < 0.3:
            body["model"] = "t5"
        body |= {"ignore_eos": True, "n": self._random.randrange(1, 5)}
        body["stream"] = self._random.random() < 0.7
        message = _message(path, self._json(body))
        place = self._random.randrange(len(message))
        return self._random.choice(
            [
                Fuzzed([message[:place]], closes=True),
                Fuzzed([message], closes=True),
                Fuzzed([message], reads=self._random.randrange(1, 2000)),
                Fuzzed([message], reads=self._random.randrange(1, 2000)),
                Fuzzed([message[:place], message[place:]]),
            ]
        )

    def _body(self, path: str) -> dict[str, Any]:
        """The usual body with up to four changes."""
        body = dict(USUAL[path])
        for _ in range(self._random.randrange(5)):
            name = self._random.choice([*BODIES[path].model_fields, "unknown", *LIKELY, *body])
            likely = LIKELY.get(name)
            if likely is not None and self._random.random() < 0.7:
                body[name] = self._random.choice(likely)
            elif self._random.random() < 0.1:
                body.pop(name, None)
            else:
                body[name] = self._value(3)
        return body

    def _value(self, depth: int) -> Any:
        kind = self._random.randrange(6 if depth else 4)
        inner = range(self._random.randrange(4))
        if kind < 2:
            return self._random.choice(NUMBERS)
        if kind == 2:
            return self._random.choice([None, True, False])
        if kind == 3:
            return self._random.choice(TEXTS)
        if kind == 4:
            return [self._value(depth - 1) for _ in inner]
        names = ["role", "content", "type", "text", "5", "schema", *TEXTS]
        return {self._random.choice(names): self._value(depth - 1) for _ in inner}

    def _json(self, body: dict[str, Any]) -> bytes:
        """Escaped, or as UTF-8; in this a lone half of a pair is three bytes that are none."""
        plain = self._random.random() < 0.5
        return json.dumps(body, ensure_ascii=not plain).encode("utf-8", "surrogatepass")


def _message(
    path: str,
    body: bytes,
    method: str = "POST",
    headers: Sequence[str] = ("Content-Type: application/json",),
    version: str = "1.1",
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", "Connection: close", *headers]
    if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def send(port: int, request: Fuzzed, seconds: float) -> bytes:
    """Everything that comes back, as far as the request reads it.

    Raises TimeoutError when a whole request's answer has not ended after so many seconds.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()

    async def exchange() -> None:
        for number, part in enumerate(request.parts):
            if number:
                await asyncio.sleep(0.02)
            writer.write(part)
            with contextlib.suppress(ConnectionError):  # the gateway need not read all of it
                await writer.drain()
        while not request.closes and (request.reads is None or len(received) < request.reads):
            if not (part := await reader.read(1 << 16)):
                return
            received.extend(part)

    try:
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(exchange(), seconds if request.full else 0.3)
    except asyncio.TimeoutError:  # TimeoutError itself since Python 3.11
        if request.full:
            raise TimeoutError(f"no end of the answer within {seconds} s") from None
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(received)
