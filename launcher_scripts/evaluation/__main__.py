"""Work on reports: python3 -m launcher_scripts.evaluation COMMAND --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher_scripts.evaluation import compare


@dataclass(frozen=True)
class Command:
    """One word of the command line. run: gives the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "compare": Command("what differs between two reports", compare.add_arguments, compare.run)
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher_scripts.evaluation", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help))
    given = parser.parse_args(argv)
    return COMMANDS[given.command].run(given)


if __name__ == "__main__":
    sys.exit(main())
