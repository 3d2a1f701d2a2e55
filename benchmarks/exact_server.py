"""A server of OpenAI's completions whose every token takes a known time: what load tests must find.

    python3 -m benchmarks.exact_server [--first-ms 100] [--next-ms 10]

It prints `ready: http://127.0.0.1:PORT/v1`. Every request is served at once, whatever the others
do, so N clients get N times the tokens of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

MODEL = "exact"
FIRST = web.AppKey("first", float)
NEXT = web.AppKey("next", float)


async def completions(request: web.Request) -> web.StreamResponse:
    """Tokens at first, first + next, first + 2 next ... seconds after the request came."""
    start = asyncio.get_running_loop().time()
    body = await request.json()
    prompt = body["prompt"]
    read = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    count = int(body["max_tokens"])
    for token in range(count):
        due = start + request.app[FIRST] + token * request.app[NEXT]
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        choice = {"index": 0, "text": " a", "finish_reason": None}
        await response.write(_event([choice], _usage(read, token + 1)))
    last = {"index": 0, "text": "", "finish_reason": "length"}
    await response.write(_event([last], _usage(read, count)) + b"data: [DONE]\n\n")
    return response


def _usage(read: int, generated: int) -> dict[str, int]:
    counts = {"prompt_tokens": read, "completion_tokens": generated}
    return {**counts, "total_tokens": read + generated}


def _event(choices: list[dict[str, Any]], usage: dict[str, int]) -> bytes:
    event = {"id": "e", "object": "text_completion", "created": 0, "model": MODEL}
    return b"data: " + json.dumps({**event, "choices": choices, "usage": usage}).encode() + b"\n\n"


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def health(_: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def exact_server(first: float, following: float) -> AsyncGenerator[str, None]:
    """Its address, http://host:port/v1. Times in seconds."""
    app = web.Application()
    app[FIRST], app[NEXT] = first, following
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def _serve(arguments: argparse.Namespace) -> None:
    async with exact_server(arguments.first_ms / 1e3, arguments.next_ms / 1e3) as address:
        print(f"ready: {address}", flush=True)
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--next-ms", type=float, default=10.0)
    asyncio.run(_serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
