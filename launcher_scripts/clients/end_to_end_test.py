"""Text through preprocessing, model and postprocessing one by one, and through their ensemble.

Flags and printed blocks are those of the FasterTransformer backend's tools/gpt/end_to_end_test.py,
of sessions those of tools/interactive_text_generation/end_to_end_test.py. The client `word_list`
has the server's own preprocessing encode words, so they are the ids that its model generates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.clients.arguments import (
    add_sampling_flags,
    add_server_flags,
    add_session_flags,
    connect_server,
    in_session,
    run_client,
    sampling_tensors,
    session_server,
    steps,
)
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.issue_request import with_text
from launcher_scripts.clients.remote import RemoteServer, ServerModels, find_models
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.contracts import CONTRACTS, Contract

SENTENCES = (
    "The harbour was quiet when the last ferry",
    "Three things to check before you sign a contract:",
    "for (int i = 0; i <",
    "About 40% of the seats were empty, so the ",
    "Contents | Glossary | Next page",
    "Anna, who had never seen snow, asked her brother",
    "The harbour was quiet when the first ferry",
    "In the first week of the new",
)
# Words lists as CSV: a word and the same with a blank in front are different tokens.
BAD_WORDS = ("Hawks, Hawks", *[""] * 7)
STOP_WORDS = (*[""] * 7, "month, month")
OUTPUT_LEN = 24
RULE = "=" * 43
INTERACTIVE = (
    "Text through the models of interactive text generation one by one, and through the ensemble."
)
WORDS = "Words as the tensor that bad_words_list and stop_words_list are, for a request file."


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="end_to_end_test", description=__doc__.partition("\n")[0])
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_text_flags(parser)
    return run_client(print_steps, parser.parse_args(argv))


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--return_log_probs",
        action="store_true",
        help="print the tokens' log-probabilities too: output_log_probs among the top k, so 0 for "
        "k 1; over the whole vocabulary with -topk 0 -topp 0.000001",
    )
    parser.add_argument(
        "--output-len",
        "--output_len",
        type=int,
        default=OUTPUT_LEN,
        help=f"tokens to generate [{OUTPUT_LEN}]",
    )
    parser.add_argument(
        "--model-variant",
        choices=("gpt", "bloom"),
        help="taken for old command lines: the served model knows its own tokenizer",
    )


def print_steps(flags: argparse.Namespace) -> None:
    """The four blocks, one after the other."""
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        print_blocks(flags, server, models, lambda *request: [server.infer(*request)])


def print_blocks(
    flags: argparse.Namespace,
    server: RemoteServer,
    models: ServerModels,
    send: Callable[[str, Tensors], Iterable[Tensors]],
    shaped: Callable[[Tensors], Tensors] = dict,
) -> None:
    """A block for preprocessing, for every answer of the model, for postprocessing of the last
    one, and for every answer of the ensemble.

    send:   the answers of a model to a request
    shaped: tensors [rows, ...] in the shape that these models take
    """
    contract = generating_contract(models)
    log_probs = flags.return_log_probs
    sampling = sampling_tensors(flags, len(SENTENCES), log_probs=log_probs)
    query = shaped(query_tensors(flags.output_len))
    encoded = server.infer(models.text_model("preprocessing"), query)
    block("preprocessing", encoded["INPUT_ID"], encoded["REQUEST_INPUT_LEN"])
    answer: Tensors = {}
    for answer in send(models.name, {**model_inputs(contract, encoded), **shaped(sampling)}):
        block("fastertransformer", *printable(answer, "output_ids", log_probs))
    block("postprocessing", *decoded(server, models, answer))
    inputs = shaped(ensemble_tensors(flags, sampling))
    for answer in send(models.text_model("ensemble"), inputs):
        block("ensemble", *printable(answer, "OUTPUT_0", log_probs))


def generating_contract(models: ServerModels) -> Contract:
    """The contract of a model that generates text."""
    contract = CONTRACTS.get(models.model_type)
    if contract is None or not contract.text.postprocessing_outputs:
        raise ConfigError(
            problem(
                f"model {models.name} generates no text",
                got=models.model_type,
                choices=[name for name, c in CONTRACTS.items() if c.text.postprocessing_outputs],
                change="--model",
            )
        )
    return contract


def model_inputs(contract: Contract, encoded: Tensors) -> Tensors:
    """Return the outputs of preprocessing, by the model's names.

    The original's makes no RETURN_PROGRESS, which only text that streams needs.
    """
    names = contract.text.model_inputs
    return {name: encoded[source] for name, source in names.items() if source in encoded}


def query_tensors(output_len: int) -> Tensors:
    """Return the inputs of preprocessing."""
    return {
        "QUERY": column(SENTENCES),
        "BAD_WORDS_DICT": column(BAD_WORDS),
        "STOP_WORDS_DICT": column(STOP_WORDS),
        "REQUEST_OUTPUT_LEN": np.full((len(SENTENCES), 1), output_len, np.uint32),
    }


def ensemble_tensors(flags: argparse.Namespace, sampling: Tensors) -> Tensors:
    """Return the inputs of the ensemble: the same under its own names."""
    names = ("INPUT_0", "INPUT_2", "INPUT_3", "INPUT_1")
    values = query_tensors(flags.output_len).values()
    return {**dict(zip(names, values, strict=True)), **sampling}


def decoded(server: RemoteServer, models: ServerModels, answer: Tensors) -> list[Any]:
    """The model's ids as text, by postprocessing."""
    model = models.text_model("postprocessing")
    accepted = {item["name"] for item in server.model_config(model).get("input", [])}
    sources = {
        "TOKENS_BATCH": "output_ids",
        "RESPONSE_INPUT_LENGTHS": "response_input_lengths",
        "sequence_length": "sequence_length",
    }
    outputs = {name: answer[source] for name, source in sources.items() if name in accepted}
    return [with_text(server.infer(model, outputs)["OUTPUT"])]


def printable(answer: Tensors, name: str, log_probs: bool) -> list[Any]:
    """The outputs of one block, in order."""
    names = [name, "sequence_length"]
    names += ["cum_log_probs", "output_log_probs"] if log_probs else []
    return [with_text(answer[name]) for name in names]


def block(name: str, *arrays: Any) -> None:
    """A block of printed arrays under its headline."""
    print(f"============After {name}============")
    for array in arrays:
        print(array)
    print(f"{RULE}\n\n\n")


def column(texts: Sequence[str]) -> Any:
    """STRING [rows, 1]"""
    return np.array([[text.encode("utf-8")] for text in texts], dtype=np.object_)


def text_session_main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="interactive_end_to_end_test", description=INTERACTIVE)
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_session_flags(parser)
    add_text_flags(parser)
    return run_client(print_session, parser.parse_args(argv))


def print_session(flags: argparse.Namespace) -> None:
    """The blocks, with one of the model and one of the ensemble for every request of a session."""
    with session_server(flags) as (server, models):

        def talk(name: str, request: Tensors) -> Iterator[Tensors]:
            """The answers of a session in which the same request is sent at every step."""
            for step, more in steps(flags, len(SENTENCES)):
                yield server.infer(name, {**request, **in_session(more)}, step=step)

        print_blocks(flags, server, models, talk, in_session)


NAMES = ("bad_words_list", "stop_words_list")


def words_main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="word_list", description=WORDS)
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
