"""Talk to a model in the terminal: its ensemble's text appears as it is generated.

The conversation so far is sent with every turn, so any model that generates text will do; one
that streams (export.triton_deployment.decoupled) shows every token as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from launcher_scripts.clients.arguments import (
    add_server_flags,
    connect_server,
    equal_rows,
    run_client,
)
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.end_to_end_test import column, generating_contract
from launcher_scripts.clients.remote import RemoteServer, ServerModels, find_models
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import ConfigError, ServerError, problem

HINT = "/quit ends, /new forgets the conversation, Ctrl-C stops an answer"


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="chat", description=__doc__.partition("\n")[0], epilog=HINT)
    add_server_flags(parser, protocol="grpc")
    parser.add_argument(
        "--turn",
        default="{text}",
        metavar="TEXT",
        help=r"what a message becomes, {text} in it, \n for a line's end: a model that was "
        r"trained to chat wants its own marks [{text}]",
    )
    parser.add_argument("--stop", default="", metavar="WORDS", help="words that end an answer, CSV")
    parser.add_argument(
        "-o", "--output_len", type=int, default=128, help="most tokens of an answer [128]"
    )
    parser.add_argument("-topk", "--topk", type=int, default=0, help="top-k [0: all]")
    parser.add_argument("-topp", "--topp", type=float, default=0.0, help="top-p [0.0]")
    parser.add_argument("-t", "--temperature", type=float, default=1.0, help="[1.0]")
    parser.add_argument("--seed", type=int, default=0, help="of the first turn [0]")
    return run_client(chat, parser.parse_args(argv))


def chat(flags: argparse.Namespace) -> None:
    """Turns until /quit or the input's end."""
    if "{text}" not in flags.turn:
        raise ConfigError(problem("--turn has no {text}", got=flags.turn, change="--turn"))
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        check_model(models, flags)
        conversation = ChatHistory(server, models, flags)
        print(HINT, file=sys.stderr)
        for message in messages():
            if message == "/new":
                conversation.text = ""
            elif message.startswith("/"):
                print(HINT, file=sys.stderr)
            elif message:
                say(conversation, message)


def check_model(models: ServerModels, flags: argparse.Namespace) -> None:
    """Raises ConfigError when the model cannot be talked to in this way."""
    generating_contract(models)
    models.text_model("ensemble")
    if models.sessions:
        raise ConfigError(
            problem(
                f"model {models.name} keeps the conversation in sessions of its own",
                choices=("interactive_end_to_end_test",),
                change="--model",
            )
        )
    if models.decoupled and flags.protocol != "grpc":
        raise ConfigError(
            problem(
                f"model {models.name} streams, which only gRPC can carry",
                got=flags.protocol,
                change="--protocol",
            )
        )


def messages() -> Iterator[str]:
    """Iterate over the lines that the user types; Ctrl-C drops a line, /quit and Ctrl-D end."""
    while True:
        try:
            message = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{HINT}", file=sys.stderr)
            continue
        if message == "/quit":
            return
        yield message


@dataclass
class ChatHistory:
    """All that was said. text: the prompt of the next turn without its message."""

    server: RemoteServer
    models: ServerModels
    flags: argparse.Namespace
    text: str = ""
    turns: int = field(default=0)

    def answer(self, message: str) -> Generator[str, None, None]:
        """The pieces of the answer to a message; what has come becomes part of the conversation.

        Closing the iterator cancels the request.
        """
        template = self.flags.turn.replace("\\n", "\n").replace("{text}", message)
        self.text += template
        self.turns += 1
        responses = self._responses(self._request())
        with contextlib.closing(responses):
            for response in responses:
                piece = response["OUTPUT_DELTA"][0, 0, 0].decode("utf-8", "replace")
                self.text += piece
                yield piece

    def _request(self) -> Tensors:
        flags = self.flags
        return {
            "INPUT_0": column([self.text]),
            "INPUT_1": np.full((1, 1), flags.output_len, np.uint32),
            "INPUT_3": column([flags.stop]),
            **equal_rows(
                1,
                runtime_top_k=flags.topk,
                runtime_top_p=flags.topp,
                temperature=flags.temperature,
                random_seed=flags.seed + self.turns - 1,
            ),
        }

    def _responses(self, tensors: Tensors) -> Generator[Tensors, None, None]:
        ensemble = self.models.text_model("ensemble")
        if self.models.decoupled:
            yield from self.server.stream(ensemble, tensors)
        else:
            yield self.server.infer(ensemble, tensors)


def say(conversation: ChatHistory, message: str) -> None:
    """Print the answer as it comes; Ctrl-C ends it and not the chat, as does a refused request."""
    pieces = conversation.answer(message)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        pieces.close()
        print("\n[stopped]", file=sys.stderr)
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
