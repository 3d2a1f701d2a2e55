"""One session of several requests to a model with interactive text generation.

Flags and printed lines are those of the FasterTransformer backend's
tools/interactive_text_generation/identity_test.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from launcher_scripts.clients.arguments import (
    add_server_flags,
    add_session_flags,
    connect,
    run,
)
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.identity_test import (
    add_request_flags,
    print_answers,
    print_latencies,
    request_of,
    write_rows,
)
from launcher_scripts.clients.models import Models, find_models
from launcher_scripts.clients.remote import RemoteServer
from launcher_scripts.clients.sessions import (
    check_flags,
    first_tensors,
    in_session,
    require_sessions,
    steps,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="interactive_identity_test", description=__doc__.partition("\n")[0]
    )
    add_server_flags(parser)
    add_request_flags(parser)
    add_session_flags(parser)
    flags = parser.parse_args(argv)
    return run(lambda: test(flags))


def test(flags: argparse.Namespace) -> None:
    """Ask, print and time."""
    check_flags(flags)
    with connect(flags) as server:
        models = find_models(server, flags.model)
        require_sessions(models)
        if flags.warm_up:
            print("[INFO] sending requests to warm up")
            session(server, models, flags)
        latencies = []
        for _ in range(flags.num_runs):
            start = time.perf_counter()
            answers = session(server, models, flags)
            latencies.append((time.perf_counter() - start) * 1000)
            print_answers(answers)
    write_rows(answers[-1], delimiter=",")
    print_latencies(latencies)


def session(server: RemoteServer, models: Models, flags: argparse.Namespace) -> list[Tensors]:
    """The answers of one session, each with the whole session's text."""
    request = request_of(flags)
    rows = len(request["input_ids"])
    answers = []
    for step in steps(flags):
        tensors = {**request, **(first_tensors(flags, rows) if step.start else {})}
        print("set request")
        answers.append(server.infer(models.name, in_session(tensors), step=step))
        print("get request")
    return answers
