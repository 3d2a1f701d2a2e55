"""Time ten requests of token ids to a GPT, print what it generates and write it to triton_out.

Flags and printed lines are those of the FasterTransformer backend's tools/gpt/identity_test.py, of
sessions those of tools/interactive_text_generation/identity_test.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from launcher_scripts.clients.arguments import (
    PROMPTS,
    add_sampling_flags,
    add_server_flags,
    add_session_flags,
    connect_server,
    equal_rows,
    identity_prompts,
    in_session,
    no_words,
    run_client,
    sampling_tensors,
    session_server,
    steps,
)
from launcher_scripts.clients.connection import SequenceStep, Tensors
from launcher_scripts.clients.remote import RemoteServer, find_models
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import ServerError, problem

REQUESTS = 10
WARM_UP_REQUESTS = 2
GPT2_VOCAB_SIZE = 50257
OUTPUT_FILE = "triton_out"
INTERACTIVE = "One session of several requests to a model with interactive text generation."


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="identity_test", description=__doc__.partition("\n")[0])
    add_server_flags(parser)
    add_request_flags(parser)
    parser.add_argument(
        "-d",
        "--is_decoupled",
        action="store_true",
        help="the model streams: count its responses (over gRPC)",
    )
    flags = parser.parse_args(argv)
    if flags.is_decoupled:
        flags.protocol = "grpc"
    return run_client(time_requests, flags)


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for the request, and for its repetitions."""
    parser.add_argument("-r", "--random_start_ids", action="store_true", help="random prompts")
    parser.add_argument("-w", "--warm_up", action="store_true", help="ask twice before timing")
    parser.add_argument("-b", "--batch_size", type=int, default=8, help="rows, with -r [8]")
    add_sampling_flags(parser)
    length = len(PROMPTS[0])
    parser.add_argument(
        "-s",
        "--start_len",
        type=int,
        default=length,
        help=f"tokens of a prompt, with -r [{length}]",
    )
    parser.add_argument("-o", "--output_len", type=int, default=24, help="tokens to generate [24]")
    parser.add_argument("-n", "--num_runs", type=int, default=1, help="runs to average over [1]")
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=GPT2_VOCAB_SIZE,
        help=f"random ids are below it [{GPT2_VOCAB_SIZE}]",
    )


def request_of(flags: argparse.Namespace) -> Tensors:
    """The tensors of one request; start and end token are the checkpoint's own."""
    ids = identity_prompts(
        flags.random_start_ids, flags.batch_size, flags.start_len, flags.vocab_size
    )
    rows, length = ids.shape
    return {
        "input_ids": ids,
        **equal_rows(rows, input_lengths=length, request_output_len=flags.output_len),
        **sampling_tensors(flags, rows, log_probs=True),
        **no_words(rows),
    }


def time_requests(flags: argparse.Namespace) -> None:
    """Ask, print and time."""
    tensors = request_of(flags)
    with connect_server(flags) as server:
        model = find_models(server, flags.model).name

        def send() -> Tensors:
            if flags.is_decoupled:
                return streamed(server, model, tensors, flags.output_len)
            return server.infer(model, tensors)

        requests = [send] * REQUESTS
        time_runs(flags, requests, warm_up=WARM_UP_REQUESTS, timed_as=REQUESTS, delimiter=" ")


def streamed(server: RemoteServer, model: str, tensors: Tensors, output_len: int) -> Tensors:
    """The last response of a stream that must have one response per token."""
    responses = list(server.stream(model, tensors))
    if len(responses) != output_len:
        raise ServerError(
            problem(
                "Number of responses received doesnt match request_output_len",
                got=len(responses),
                choices=(output_len,),
            )
        )
    return responses[-1]


def time_runs(
    flags: argparse.Namespace,
    requests: Sequence[Callable[[], Tensors]],
    *,
    warm_up: int,
    timed_as: int,
    delimiter: str,
) -> None:
    """Send the requests of a run flags.num_runs times, print the answers and the mean time.

    warm_up:   how many of them are sent before, with flags.warm_up
    timed_as:  over how many the time of a run is divided
    delimiter: between the ids in triton_out
    """
    if flags.warm_up:
        print("[INFO] sending requests to warm up")
        send_requests(requests[:warm_up])
    latencies = []
    for _ in range(flags.num_runs):
        start = time.perf_counter()
        answers = send_requests(requests)
        latencies.append((time.perf_counter() - start) * 1000 / timed_as)
        print_answers(answers)
    write_rows(answers[-1], delimiter)
    print_latencies(latencies)


def send_requests(requests: Sequence[Callable[[], Tensors]]) -> list[Tensors]:
    """The answers of the requests, which are sent one after the other."""
    answers = []
    for send in requests:
        print("set request")
        answers.append(send())
        print("get request")
    return answers


def print_answers(answers: Sequence[Tensors]) -> None:
    """The output ids of every answer."""
    for answer in answers:
        print("wait result return 0000\n")
        print("wait result return 1111\n")
        print("get results\n")
        print("get results as output_ids\n")
        print("output_ids is received")
        print(answer["output_ids"].shape)
        print(answer["output_ids"])


def write_rows(answer: Tensors, delimiter: str) -> None:
    """The output ids as text, one line per sequence, into triton_out."""
    ids = answer["output_ids"]
    partial = Path(f"{OUTPUT_FILE}.partial")
    np.savetxt(partial, ids.reshape(-1, ids.shape[-1]), fmt="%u", delimiter=delimiter)
    partial.replace(OUTPUT_FILE)


def print_latencies(milliseconds: Sequence[float]) -> None:
    if len(milliseconds) > 1:
        print(list(milliseconds))
    print(f"[INFO] execution time: {statistics.mean(milliseconds)} ms")


def session_main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="interactive_identity_test", description=INTERACTIVE)
    add_server_flags(parser)
    add_request_flags(parser)
    add_session_flags(parser)
    return run_client(time_session, parser.parse_args(argv))


def time_session(flags: argparse.Namespace) -> None:
    """Ask, print and time: a session is one run, and every answer has the whole session's text."""
    with session_server(flags) as (server, models):
        request = request_of(flags)

        def send(step: SequenceStep, more: Tensors) -> Tensors:
            return server.infer(models.name, in_session({**request, **more}), step=step)

        session = [partial(send, *step) for step in steps(flags, len(request["input_ids"]))]
        time_runs(flags, session, warm_up=len(session), timed_as=1, delimiter=",")
