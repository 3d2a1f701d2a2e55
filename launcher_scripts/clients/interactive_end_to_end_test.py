"""Text through the models of interactive text generation one by one, and through the ensemble.

Flags and printed blocks are those of the FasterTransformer backend's
tools/interactive_text_generation/end_to_end_test.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from launcher_scripts.clients.arguments import (
    add_sampling_flags,
    add_server_flags,
    add_session_flags,
    check_flags,
    connect_server,
    in_session,
    require_sessions,
    run_client,
    steps,
)
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.end_to_end_test import SENTENCES, add_text_flags, print_blocks
from launcher_scripts.clients.remote import find_models
from launcher_scripts.common.command_line import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="interactive_end_to_end_test", description=__doc__.partition("\n")[0]
    )
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_session_flags(parser)
    add_text_flags(parser)
    return run_client(test, parser.parse_args(argv))


def test(flags: argparse.Namespace) -> None:
    """The blocks, with one of the model and one of the ensemble for every request of a session."""
    check_flags(flags)
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        require_sessions(models)

        def talk(name: str, request: Tensors) -> Iterator[Tensors]:
            """The answers of a session in which the same request is sent at every step."""
            for step, more in steps(flags, len(SENTENCES)):
                yield server.infer(name, {**request, **in_session(more)}, step=step)

        print_blocks(flags, server, models, talk, in_session)
