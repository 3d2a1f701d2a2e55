"""Words as the tensor that bad_words_list and stop_words_list are, for a request file.

The server's own preprocessing encodes them, so they are the ids that its model generates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.arguments import (
    add_server_flags,
    connect_server,
    in_session,
    run_client,
)
from launcher_scripts.clients.end_to_end_test import column
from launcher_scripts.clients.remote import RemoteServer, ServerModels, find_models
from launcher_scripts.common.command_line import CommandParser

NAMES = ("bad_words_list", "stop_words_list")


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="word_list", description=__doc__.partition("\n")[0])
    add_server_flags(parser)
    parser.add_argument(
        "--name", choices=NAMES, default=NAMES[0], help=f"name of the tensor [{NAMES[0]}]"
    )
    parser.add_argument(
        "rows",
        metavar="WORDS",
        nargs="+",
        help="the words of a row, comma separated; a blank in front is a part of a word; one in "
        "double quotes may hold commas",
    )
    return run_client(print_words, parser.parse_args(argv))


def print_words(flags: argparse.Namespace) -> None:
    """Print the tensor as a line of a request file."""
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        table = padded([encoded(server, models, row) for row in flags.rows])
    print(json.dumps({"name": flags.name, "data": table.tolist(), "dtype": "int32"}))


def encoded(server: RemoteServer, models: ServerModels, words: str) -> NDArray[Any]:
    """INT32 [2, n]: the ids of one row's words, and their end offsets, then -1."""
    tensors = {
        "QUERY": column([""]),
        "BAD_WORDS_DICT": column([words]),
        "STOP_WORDS_DICT": column([""]),
        "REQUEST_OUTPUT_LEN": np.array([[1]], np.uint32),
    }
    query = in_session(tensors) if models.sessions else tensors
    answer = server.infer(models.text_model("preprocessing"), query, ["BAD_WORDS_IDS"])
    table: NDArray[Any] = answer["BAD_WORDS_IDS"].reshape(2, -1)
    return table


def padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """INT32 [rows, 2, longest]."""
    table = np.zeros((len(rows), 2, max(row.shape[1] for row in rows)), np.int32)
    table[:, 1] = -1
    for target, row in zip(table, rows, strict=True):
        target[:, : row.shape[1]] = row
    return table
