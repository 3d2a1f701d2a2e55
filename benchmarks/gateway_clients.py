"""Clients of one process that stream completions from a gateway, each one request at a time.

    python3 -m benchmarks.gateway_clients URL MODEL --clients 16 --seconds 8 ...

Prints one JSON list for each request: when it was asked, and the time of each event that brings
text, with the tokens that had come by then. The usage at the end counts tokens; events are taken to
bring equally many. Lengths are drawn from the two ranges, prompts are random ids; greedy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import random
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

Record = list[Any]  # asked, [(time, tokens)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="as the gateway's ready line says it")
    parser.add_argument("model")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="until the last is asked")
    parser.add_argument("--input", type=int, nargs=2, required=True)
    parser.add_argument("--output", type=int, nargs=2, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args(argv)
    lines: queue.SimpleQueue[Record] = queue.SimpleQueue()
    end = time.time() + arguments.seconds
    threads = [
        threading.Thread(target=_work, args=(arguments, number, end, lines))
        for number in range(arguments.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while not lines.empty():
        print(json.dumps(lines.get()))
    return 0


def _work(
    arguments: argparse.Namespace, number: int, end: float, lines: queue.SimpleQueue[Record]
) -> None:
    draw = random.Random(1000 * arguments.seed + number)
    url = urlsplit(arguments.url)
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port)
    while time.time() < end:
        length = draw.randint(*arguments.input)
        ids = np.random.default_rng(draw.getrandbits(32)).integers(1, arguments.vocab, length)
        body = {
            "model": arguments.model,
            "prompt": ids.tolist(),
            "max_tokens": draw.randint(*arguments.output),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = time.time()
        connection.request("POST", url.path + "/completions", json.dumps(body))
        lines.put([asked, _streamed(connection.getresponse())])
    connection.close()


def _streamed(response: http.client.HTTPResponse) -> list[tuple[float, float]]:
    """(time, tokens by then) of every event. Raises RuntimeError for an answer that failed."""
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()}")
    times, tokens = [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        if event["choices"]:
            times.append(time.time())
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return [(at, tokens * (place + 1) / len(times)) for place, at in enumerate(times)]


if __name__ == "__main__":
    sys.exit(main())
