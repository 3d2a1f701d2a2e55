"""Command-line flags, tensors and sessions of the clients."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from launcher_scripts.clients.connection import CONNECTIONS, NUMPY_TYPES, SequenceStep, Tensors
from launcher_scripts.clients.remote import DEFAULT_MODEL, RemoteServer, ServerModels, find_models
from launcher_scripts.common.command_line import with_open_output
from launcher_scripts.common.errors import ConfigError, LauncherError, Problems, problem
from launcher_scripts.config.security import ClientTls
from launcher_scripts.contract.tensors import GPT_INPUTS

_TYPES = {tensor.name: NUMPY_TYPES[tensor.dtype] for tensor in GPT_INPUTS}
# Eight prompts of eight ids: common English words in the vocabulary of GPT-2.
PROMPTS = (
    (464, 318, 257, 290, 262, 286, 340, 373),
    (383, 326, 339, 284, 307, 287, 257, 318),
    (314, 423, 407, 284, 307, 319, 262, 373),
    (340, 318, 326, 345, 481, 307, 351, 262),
    (383, 373, 287, 262, 290, 340, 318, 286),
    (345, 460, 307, 319, 257, 351, 339, 290),
    (326, 373, 262, 286, 257, 284, 345, 423),
    (339, 481, 423, 340, 287, 383, 290, 464),
)


def equal_rows(rows: int, **values: Any) -> Tensors:
    """The contract's tensors of these names, [rows, 1] each, the same value in every row."""
    return {name: np.full((rows, 1), value, _TYPES[name]) for name, value in values.items()}


def sampling_tensors(flags: argparse.Namespace, rows: int, *, log_probs: bool) -> Tensors:
    """Return the sampling parameters, [rows, 1] each; start and end token are the checkpoint's
    own."""
    return equal_rows(
        rows,
        runtime_top_k=flags.topk,
        runtime_top_p=flags.topp,
        beam_search_diversity_rate=0.0,
        temperature=1.0,
        len_penalty=1.0,
        repetition_penalty=1.0,
        random_seed=0,
        is_return_log_probs=log_probs,
        beam_width=flags.beam_width,
    )


def no_words(rows: int) -> Tensors:
    """Words lists without a word, INT32 [rows, 2, 1]."""
    empty = np.tile(np.array([[0], [-1]], np.int32), (rows, 1, 1))
    return {"bad_words_list": empty, "stop_words_list": empty.copy()}


def identity_prompts(random: bool, batch_size: int, length: int, vocab_size: int) -> Any:
    """UINT32 [rows, length]: random ids, the same in every run, or the eight fixed prompts.

    Says on stderr that other sizes than theirs need random ids, as in the original's clients.
    """
    if not random:
        fixed = np.array(PROMPTS, np.uint32)
        if fixed.shape != (batch_size, length):
            rows, ids = fixed.shape
            print(
                f"warning: the fixed prompts are {rows} rows of {ids} ids; --batch_size and "
                "--start_len count with --random_start_ids alone",
                file=sys.stderr,
            )
        return fixed
    generator = np.random.default_rng([batch_size, length])
    return generator.integers(0, vocab_size, (batch_size, length), dtype=np.uint32)


def steps(flags: argparse.Namespace, rows: int) -> Iterator[tuple[SequenceStep, Tensors]]:
    """The requests of one session, the first and the last marked, with their further tensors:
    the first one carries the session's sizes, UINT32 [rows, 1] each.
    """
    sizes = {
        "session_len": np.full((rows, 1), flags.session_len, np.uint32),
        "memory_len": np.full((rows, 1), flags.memory_len, np.uint32),
    }
    last = flags.num_session_steps - 1
    for number in range(flags.num_session_steps):
        step = SequenceStep(flags.session_id, number == 0, number == last)
        yield step, sizes if step.start else {}


def in_session(tensors: Tensors) -> Tensors:
    """The tensors with the axis of one that a model with sessions has in front: [1, rows, ...]."""
    return {name: array[None] for name, array in tensors.items()}


@contextmanager
def session_server(flags: argparse.Namespace) -> Iterator[tuple[RemoteServer, ServerModels]]:
    """The server that flags mean, and a model on it that has sessions.

    Raises ConfigError that names every number that is too small, or a model that forgets every
    request.
    """
    problems = Problems("the session's flags")
    for name in ("num_session_steps", "session_len", "memory_len", "session_id"):
        problems.check_minimum(name, getattr(flags, name), 1, f"--{name}")
    problems.raise_if_any(ConfigError)
    with connect_server(flags) as server:
        models = find_models(server, flags.model)
        if not models.sessions:
            raise ConfigError(
                problem(
                    f"model {models.name} has no sessions",
                    change="--model, or export with export.triton_deployment.interactive=True",
                )
            )
        yield server, models


DEFAULT_ADDRESSES = {"http": "localhost:8000", "grpc": "localhost:8001"}
TLS_FILES = {
    "ca": "certificates of whom to trust",
    "certificate": "this client's own, where the server wants one",
    "key": "of that certificate",
}


def run_client(body: Callable[[argparse.Namespace], None], flags: argparse.Namespace) -> int:
    """Do `body`; a LauncherError is printed without a traceback and gives 1, Ctrl-C 130."""
    try:
        return with_open_output(lambda: body(flags))
    except LauncherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def add_server_flags(parser: argparse.ArgumentParser, protocol: str | None = "http") -> None:
    """Add flags for the server's address and the model's name.

    protocol: how to ask it unless the flag says so; None: something else says it
    """
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print what is sent and received"
    )
    parser.add_argument(
        "-u",
        "--url",
        metavar="HOST:PORT",
        help="the server; "
        + ", ".join(f"{address} by default over {p}" for p, address in DEFAULT_ADDRESSES.items()),
    )
    parser.add_argument(
        "-i",
        "--protocol",
        choices=sorted(CONNECTIONS),
        default=protocol,
        help="how to ask it" + (f" [{protocol}]" if protocol else ""),
    )
    for name, hint in TLS_FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"gRPC with TLS: {hint}")
    parser.add_argument(
        "-m",
        "--model",
        help=f"the model's name [{DEFAULT_MODEL}, else the only one of that backend]",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for sampling."""
    parser.add_argument("-beam", "--beam_width", type=int, default=1, help="beams [1]")
    parser.add_argument("-topk", "--topk", type=int, default=1, help="top-k [1]")
    parser.add_argument("-topp", "--topp", type=float, default=0.0, help="top-p [0.0]")


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    """The stateful session of interactive text generation."""
    parser.add_argument(
        "-n_s", "--num_session_steps", type=int, default=2, help="requests of the session [2]"
    )
    parser.add_argument(
        "-session_len",
        "--session_len",
        type=int,
        default=1024,
        help="most tokens of the session [1024]",
    )
    parser.add_argument(
        "-memory_len",
        "--memory_len",
        type=int,
        default=1024,
        help="tokens that the session remembers [1024]",
    )
    parser.add_argument(
        "-session_id",
        "--session_id",
        type=int,
        required=True,
        help="number of the session, at least 1",
    )


def connect_server(flags: argparse.Namespace) -> RemoteServer:
    """The server that the flags of add_server_flags mean."""
    files = {name: getattr(flags, name) for name in TLS_FILES}
    address = flags.url or DEFAULT_ADDRESSES[flags.protocol]
    tls = client_tls(files, flags.protocol)
    return RemoteServer(address, protocol=flags.protocol, verbose=flags.verbose, tls=tls)


def client_tls(files: Mapping[str, str | None], protocol: str) -> ClientTls | None:
    """Return the settings in TLS_FILES; raises ConfigError if they are inconsistent."""
    if not any(files.values()):
        return None
    problems = Problems("the files for TLS")
    if protocol != "grpc":
        problems.add("Triton's HTTP is not encrypted", choices=("grpc",), change="--protocol")
    if not files["ca"]:
        problems.add("whom to trust is not said", change="--ca")
    for name, path in files.items():
        if path and not Path(path).is_file():
            problems.add("there is no such file", got=path, change=f"--{name}")
    problems.raise_if_any(ConfigError)
    return ClientTls(**files)  # type: ignore[arg-type]
