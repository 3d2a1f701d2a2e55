"""What the clients' command lines share: the flags of the FasterTransformer backend's tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher_scripts.clients.connection import CONNECTIONS
from launcher_scripts.clients.models import DEFAULT_MODEL
from launcher_scripts.clients.remote import RemoteServer
from launcher_scripts.common.command_line import with_open_output
from launcher_scripts.common.errors import ConfigError, LauncherError, Problems
from launcher_scripts.config.security import ClientTls

DEFAULT_ADDRESSES = {"http": "localhost:8000", "grpc": "localhost:8001"}
TLS_FILES = {
    "ca": "certificates of whom to trust",
    "certificate": "this client's own, where the server wants one",
    "key": "of that certificate",
}


def run(body: Callable[[argparse.Namespace], None], flags: argparse.Namespace) -> int:
    """Do `body`; a LauncherError is printed without a traceback and gives 1, Ctrl-C 130."""
    try:
        return with_open_output(lambda: body(flags))
    except LauncherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def add_server_flags(parser: argparse.ArgumentParser, protocol: str | None = "http") -> None:
    """Where the server is, and which of its models is meant.

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
    for name, what in TLS_FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"gRPC with TLS: {what}")
    parser.add_argument(
        "-m",
        "--model",
        help=f"the model's name [{DEFAULT_MODEL}, else the only one of that backend]",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
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


def connect(flags: argparse.Namespace) -> RemoteServer:
    """The server that the flags of add_server_flags mean."""
    files = {name: getattr(flags, name) for name in TLS_FILES}
    address = flags.url or DEFAULT_ADDRESSES[flags.protocol]
    tls = client_tls(files, flags.protocol)
    return RemoteServer(address, protocol=flags.protocol, verbose=flags.verbose, tls=tls)


def client_tls(files: Mapping[str, str | None], protocol: str) -> ClientTls | None:
    """What TLS_FILES say; raises ConfigError when they do not belong together."""
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
