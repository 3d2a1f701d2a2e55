"""Text through the models of interactive text generation one by one, and through the ensemble.

Flags and printed blocks are those of the FasterTransformer backend's
tools/interactive_text_generation/end_to_end_test.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launcher_scripts.clients.arguments import (
    add_sampling_flags,
    add_server_flags,
    add_session_flags,
    connect,
    run,
)
from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.end_to_end_test import (
    SENTENCES,
    add_text_flags,
    block,
    decoded,
    ensemble_tensors,
    generating_contract,
    model_inputs,
    query_tensors,
    shown,
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
from launcher_scripts.clients.tensors import sampling_tensors


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="interactive_end_to_end_test", description=__doc__.partition("\n")[0]
    )
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_session_flags(parser)
    add_text_flags(parser)
    flags = parser.parse_args(argv)
    return run(lambda: test(flags))


def test(flags: argparse.Namespace) -> None:
    """The blocks, with one of the model and one of the ensemble for every request of a session."""
    check_flags(flags)
    sampling = in_session(sampling_tensors(flags, len(SENTENCES), log_probs=flags.return_log_probs))
    with connect(flags) as server:
        models = find_models(server, flags.model)
        require_sessions(models)
        contract = generating_contract(models)
        query = in_session(query_tensors(flags.output_len))
        encoded = server.infer(models.text_model("preprocessing"), query)
        block("preprocessing", encoded["INPUT_ID"], encoded["REQUEST_INPUT_LEN"])
        request = {**model_inputs(contract, encoded), **sampling}
        answer = talk(server, models, models.name, request, flags)
        block("postprocessing", *decoded(server, models, answer))
        whole = in_session(ensemble_tensors(flags, {}))
        talk(server, models, models.text_model("ensemble"), {**whole, **sampling}, flags)


def talk(
    server: RemoteServer, models: Models, name: str, request: Tensors, flags: argparse.Namespace
) -> Tensors:
    """The last answer of a session in which the same request is sent at every step."""
    head, output = "fastertransformer", "output_ids"
    if name != models.name:
        head, output = "ensemble", "OUTPUT_0"
    answer: Tensors = {}
    first = in_session(first_tensors(flags, len(SENTENCES)))
    for step in steps(flags):
        tensors = {**request, **(first if step.start else {})}
        answer = server.infer(name, tensors, step=step)
        block(head, *shown(answer, output, flags.return_log_probs))
    return answer
