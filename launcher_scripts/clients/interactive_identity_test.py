"""One session of several requests to a model with interactive text generation.

Flags and printed lines are those of the FasterTransformer backend's
tools/interactive_text_generation/identity_test.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from launcher_scripts.clients.arguments import (
    add_server_flags,
    add_session_flags,
    check_flags,
    connect_server,
    in_session,
    require_sessions,
    run_client,
    steps,
)
from launcher_scripts.clients.connection import SequenceStep, Tensors
from launcher_scripts.clients.identity_test import add_request_flags, request_of, time_runs
from launcher_scripts.clients.remote import find_models
from launcher_scripts.common.command_line import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="interactive_identity_test", description=__doc__.partition("\n")[0])
    add_server_flags(parser)
    add_request_flags(parser)
    add_session_flags(parser)
    return run_client(test, parser.parse_args(argv))


def test(flags: argparse.Namespace) -> None:
    """Ask, print and time: a session is one run, and every answer has the whole session's text."""
    check_flags(flags)
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        require_sessions(models)
        request = request_of(flags)

        def send(step: SequenceStep, more: Tensors) -> Tensors:
            return server.infer(models.name, in_session({**request, **more}), step=step)

        session = [partial(send, *step) for step in steps(flags, len(request["input_ids"]))]
        time_runs(flags, session, warm_up=len(session), timed_as=1, delimiter=",")
