"""`python3 -m launcher_scripts.clients NAME ...`: one entry for every client."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from launcher_scripts.clients import CLIENTS, FUNCTIONS
from launcher_scripts.common.command_line import CommandParser, installed_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client that argv names with the rest of argv; its exit status."""
    width = max(map(len, CLIENTS))
    parser = CommandParser(
        prog="python3 -m launcher_scripts.clients",
        description="Commands that talk to a running server. NAME --help says more of each.",
        epilog="\n".join(f"  {name:<{width}}  {summary}" for name, summary in CLIENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=CLIENTS, help=", ".join(CLIENTS))
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(arguments[:1]).name
    with installed_packages(name):
        module, function = FUNCTIONS.get(name, (name, "main"))
        client = importlib.import_module(f"launcher_scripts.clients.{module}")
    return int(getattr(client, function)(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
