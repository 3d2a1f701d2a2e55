"""Clients of one process that ask a model behind Triton, each one request at a time.

    python3 -m benchmarks.stream_clients ADDRESS MODEL --clients 16 --seconds 8 [--streams] ...

Prints one JSON list for each request: when it was asked, and the time and the number of tokens of
each response. Lengths are drawn from the two ranges, ids at random; greedy. Only sequence_length is
asked for, as a client does that counts tokens; with --ids the ids, too.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

NAMES = {
    "gpt": ("input_ids", "input_lengths", "request_output_len"),
    "t5": ("input_ids", "sequence_length", "max_output_len"),
}
Response = tuple[float, int]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("--family", choices=NAMES, default="gpt")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="until the last is asked")
    parser.add_argument("--input", type=int, nargs=2, required=True)
    parser.add_argument("--output", type=int, nargs=2, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--streams", action="store_true", help="the model is decoupled")
    parser.add_argument("--ids", action="store_true", help="ask for output_ids, too")
    arguments = parser.parse_args(argv)
    lines: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
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
    arguments: argparse.Namespace, number: int, end: float, lines: queue.SimpleQueue[list[Any]]
) -> None:
    draw = random.Random(1000 * arguments.seed + number)
    outputs = ["sequence_length", *(["output_ids"] if arguments.ids else [])]
    wanted = [grpc.InferRequestedOutput(name) for name in outputs]
    client = grpc.InferenceServerClient(arguments.address)
    asker = Streaming(client) if arguments.streams else Whole(client)
    while time.time() < end:
        length = draw.randint(*arguments.input)
        ids = np.random.default_rng(draw.getrandbits(32)).integers(1, arguments.vocab, (1, length))
        inputs = request_inputs(arguments.family, ids, draw.randint(*arguments.output))
        asked = time.time()
        before = length if arguments.family == "gpt" else 0
        responses = asker.ask(arguments.model, inputs, wanted)
        lines.put([asked, [(at, tokens - before) for at, tokens in responses]])
    asker.close()


class Whole:
    """Asks for whole answers."""

    def __init__(self, client: grpc.InferenceServerClient) -> None:
        self._client = client

    def ask(self, model: str, inputs: list[Any], outputs: list[Any]) -> list[Response]:
        result = self._client.infer(model, inputs, outputs=outputs)
        return [(time.time(), _tokens(result))]

    def close(self) -> None:
        self._client.close()


class Streaming:
    """Asks over a stream of its own."""

    def __init__(self, client: grpc.InferenceServerClient) -> None:
        self._client = client
        self._came: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self._came.put((time.time(), result, error)))

    def ask(self, model: str, inputs: list[Any], outputs: list[Any]) -> list[Response]:
        self.begin(model, inputs, outputs)
        responses, last = [], False
        while not last:
            response, last = self.next()
            responses.append(response)
        return responses

    def begin(self, model: str, inputs: list[Any], outputs: list[Any]) -> None:
        self._client.async_stream_infer(model, inputs, outputs=outputs)

    def next(self) -> tuple[Response, bool]:
        """The next response, and whether it is the last."""
        at, result, error = self._came.get()
        if error is not None:
            raise error
        last = result.get_response().parameters["triton_final_response"].bool_param
        return (at, _tokens(result)), last

    def leave(self) -> None:
        """Cancel what is asked."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def _tokens(result: Any) -> int:
    return int(result.as_numpy("sequence_length").reshape(-1)[0])


def request_inputs(family: str, ids: np.ndarray, output_len: int) -> list[grpc.InferInput]:
    """A request of one row, ids [1, length]."""
    values = (ids, [[ids.shape[1]]], [[output_len]])
    inputs = []
    for name, value in zip(NAMES[family], values, strict=True):
        array = np.array(value, np.uint32)
        inputs.append(grpc.InferInput(name, list(array.shape), "UINT32"))
        inputs[-1].set_data_from_numpy(array)
    return inputs


if __name__ == "__main__":
    sys.exit(main())
